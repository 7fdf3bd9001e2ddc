"""What is measured, in one place. Needs numpy only, so that every side can import it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

SEED = 20260
CHECK_RECORDS = 32
CHECK_STEPS = 3
LARGEST_ERROR = 5e-5
TEST_RECORDS = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One federated round: who trains what, for how long, against whom, and how much faster we mean
    to be.

    Client number i uses ``batch_sizes[i % len(batch_sizes)]``. ``steps`` counts steps of local
    work, ``epochs`` passes; one of the two is given. With ``clip`` the work is DP-SGD on Poisson
    batches; otherwise it is plain SGD on shuffled ones, with the model kept within ``ball`` of its
    start. With a ``cohort`` about that many clients are drawn each round, and our side is
    ``dp_fed``, noise and ledger included. ``deep`` networks are checked against double precision,
    because float32 alone moves their updates by more than two implementations may differ elsewhere.
    With ``head_only`` everything but the last layer is frozen.
    """

    key: str
    about: str
    peer: str
    model: str
    shape: tuple[int, ...]
    clients: int
    records: int
    batch_sizes: tuple[int, ...]
    steps: int | None = None
    epochs: int | None = None
    classes: int = 10
    tokens: int | None = None
    lr: float = 0.05
    clip: float | None = None
    ball: float | None = None
    cohort: int | None = None
    deep: bool = False
    head_only: bool = False
    workers: int = 1
    repeats: int = 5
    goal: float | None = None
    plain_goal: float | None = None

    def batch_size(self, client: int) -> int:
        """Batch size of a client."""
        return self.batch_sizes[client % len(self.batch_sizes)]

    def small(self) -> Workload:
        """The same work in miniature: it shows that everything runs, and measures nothing."""
        return replace(
            self,
            clients=1 if self.deep else 2 if self.cohort is None else 20,
            cohort=None if self.cohort is None else 2,
            batch_sizes=self.batch_sizes[:2],
            records=min(self.records, max(CHECK_RECORDS, 2 * self.batch_sizes[0])),
            steps=None if self.steps is None else min(self.steps, 1 if self.deep else 2),
            goal=None,
            plain_goal=None if self.plain_goal is None else math.inf,
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A round of ``cohort`` clients out of ever larger populations; ours alone."""

    key: str = "scale"
    about: str = "cohort of 50 from a growing population, logistic regression on 60 features"
    populations: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    cohort: int = 50
    records: int = 20
    features: int = 60
    classes: int = 10
    batch_size: int = 10
    clip: float = 1.0
    lr: float = 0.05
    repeats: int = 3
    seconds_allowed: float = 600.0

    def small(self) -> Scale:
        """The same in miniature."""
        return replace(self, populations=(100, 300))


WORKLOADS: dict[str, Workload] = {
    w.key: w
    for w in (
        Workload(
            key="W1",
            about="20 clients x 2400 images, CNN of 28,938 parameters, DP-SGD, 1 epoch, batch 16..128",
            peer="opacus",
            model="cnn",
            shape=(1, 28, 28),
            clients=20,
            records=2400,
            batch_sizes=(16, 32, 64, 128),
            epochs=1,
            clip=1.0,
            repeats=3,
            goal=2.0,
            plain_goal=1.3,
        ),
        Workload(
            key="W2",
            about="50 clients, logistic regression of 7,850 parameters, 100 DP-SGD steps of batch 8",
            peer="opacus",
            model="logistic",
            shape=(784,),
            clients=50,
            records=500,
            batch_sizes=(8,),
            steps=100,
            clip=1.0,
            goal=12.0,
        ),
        Workload(
            key="W3",
            about="50 clients x 50 records, logistic regression, 5 epochs of SGD in a ball, batch 10",
            peer="pfl",
            model="logistic",
            shape=(784,),
            clients=50,
            records=50,
            batch_sizes=(10,),
            epochs=5,
            ball=0.5,
            repeats=10,
            goal=10.0,
        ),
        Workload(
            key="dp_fed",
            about="50 of 1,000 clients x 50 records, logistic regression, 5 epochs in a ball; ours with noise and a ledger",
            peer="pfl",
            model="logistic",
            shape=(784,),
            clients=1000,
            cohort=50,
            records=50,
            batch_sizes=(10,),
            epochs=5,
            ball=0.5,
            repeats=10,
            goal=10.0,
        ),
        Workload(
            key="W2-flower",
            about="W2 on two cores, against a simulation by Flower of clients with Opacus",
            peer="flower",
            model="logistic",
            shape=(784,),
            clients=50,
            records=500,
            batch_sizes=(8,),
            steps=100,
            clip=1.0,
            workers=2,
            goal=15.0,
        ),
        Workload(
            key="resnet18",
            about="2 clients x 64 images, ResNet-18 with GroupNorm (11.2 M), 4 DP-SGD steps of batch 16",
            peer="opacus",
            model="resnet18",
            shape=(3, 32, 32),
            clients=2,
            records=64,
            batch_sizes=(16,),
            steps=4,
            clip=1.0,
            deep=True,
            repeats=3,
        ),
        Workload(
            key="lstm",
            about="4 clients x 64 texts of 100 words, two LSTM layers of 64, 4 DP-SGD steps of batch 16",
            peer="opacus",
            model="lstm",
            shape=(100,),
            clients=4,
            records=64,
            batch_sizes=(16,),
            steps=4,
            classes=2,
            tokens=2000,
            lr=1.0,
            clip=1.0,
            repeats=3,
        ),
        Workload(
            key="frozen",
            about="4 clients x 64 images, frozen ResNet-18, a head of 5,130 parameters, 4 DP-SGD steps of batch 16",
            peer="opacus",
            model="resnet18",
            shape=(3, 32, 32),
            clients=4,
            records=64,
            batch_sizes=(16,),
            steps=4,
            clip=1.0,
            head_only=True,
            repeats=3,
            goal=1.0,
        ),
        Workload(
            key="lora",
            about="4 clients x 64 texts of 64 words, BERT of 4 layers with PEFT's LoRA, 4 DP-SGD steps of batch 16",
            peer="opacus",
            model="lora",
            shape=(64,),
            clients=4,
            records=64,
            batch_sizes=(16,),
            steps=4,
            classes=2,
            tokens=2000,
            lr=0.5,
            clip=1.0,
            repeats=3,
            goal=1.0,
        ),
    )
}
SCALE = Scale()
KEYS = (*WORKLOADS, SCALE.key)


def workload(key: str, small: bool) -> Workload:
    """Return the workload of this name, whole or in miniature."""
    found = WORKLOADS[key]
    return found.small() if small else found


def write_data(work: Workload, path: Path) -> None:
    """Write made-up records of the right shape, the same for every side."""
    generator = np.random.default_rng(SEED)
    size = (work.clients, work.records, *work.shape)
    if work.tokens is None:
        features = generator.standard_normal(size, dtype=np.float32)
    else:
        features = generator.integers(0, work.tokens, size, dtype=np.int64)
    labels = generator.integers(0, work.classes, size[:2], dtype=np.int64)
    np.savez(path, features=features, labels=labels)


def read_data(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read features (clients, records, ...) and labels (clients, records)."""
    with np.load(path) as found:
        return found["features"], found["labels"]


def check_data(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the few records of the first client that the numerical check trains on."""
    features, labels = read_data(path)
    return features[0, :CHECK_RECORDS], labels[0, :CHECK_RECORDS]
