"""Flags of data: what was read off the records, what counts as zero, batches that are cut; and who
may see them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.random import PublicSeed
from dpfl.data.partition import Partition
from dpfl.data.schema import Schema
from dpfl.datasets.named import DATASETS, load_dataset
from dpfl.experiments.describe import describe
from dpfl.privacy.flags import Flag
from dpfl.rounds.members import data_flags, honest_members
from dpfl.runs.experiment import Experiment
from dpfl.tasks import Binary, Classification, PerPerson, Regression, Task, TokenPrediction

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(40, 2)).astype(np.float32)
Y = np.arange(40) % 2
BUDGETS = {name: dpfl.Budget(epsilon=2.0, delta=1e-3) for name in ("a", "b")}
WORK: Any = {"lr": 0.1, "local_steps": 1, "batch_size": 8}
PRIVATE: Any = {**WORK, "clip": 1.0}
DATA_FLAGS = {Flag.INFERRED, Flag.TOO_LARGE, Flag.WHOLE_BATCHES}
pytestmark = pytest.mark.filterwarnings("ignore::dpfl.NotPrivateWarning")


def raised(
    clients: dict[str, Any] | None = None,
    strategy: dpfl.Strategy | None = None,
    width: int = 2,
    **options: Any,
) -> set[Flag]:
    """The flags of data that a run of one round raises."""
    options = {"classes": 2, "budgets": BUDGETS, **options}
    federation = dpfl.Federation.from_arrays(clients or {"a": (X, Y), "b": (X, Y)}, **options)
    strategy = strategy or dpfl.weiavg(**PRIVATE)
    features = federation.record_shape[0]
    result = dpfl.train(nn.Linear(features, width), federation, strategy, rounds=1, progress=False)
    return {flag.flag for flag in result.summary.flags} & DATA_FLAGS


# -- what was read off the records -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "inferred"),
    [
        (Classification(), "classes"),
        (Classification(classes=2), ""),
        (PerPerson(task=Classification()), "classes"),
        (TokenPrediction(), "vocabulary"),
        (TokenPrediction(vocabulary=9), ""),
        (Binary(), ""),
        (Regression(), ""),
    ],
)
def test_a_task_says_what_it_reads_off_the_values_of_targets(task: Task, inferred: str) -> None:
    assert task.inferred == inferred


def test_classes_that_were_counted_in_the_records_are_flagged() -> None:
    assert raised() == set()
    assert raised(classes=None) == {Flag.INFERRED}
    assert raised(classes=None, task=Classification(classes=2)) == set()
    assert raised(classes=None, task="binary", width=1) == set()
    assert raised(classes=None, task="regression", width=1) == set()
    nobody = dpfl.fedavg(**WORK)  # which promises nothing that could rest on it
    assert raised(classes=None, strategy=nobody) == set()


def test_the_classes_of_a_schema_are_declared() -> None:
    columns = {"x": {"type": "number"}, "ill": {"type": "boolean"}}
    schema = Schema.from_dict({"target": "ill", "columns": columns})
    tables = {name: {"x": X[:, 0], "ill": Y} for name in ("a", "b")}
    assert dpfl.Federation.from_frame(tables, schema=schema).inferred == ""
    assert dpfl.Federation.from_frame(tables, target="ill").inferred == "classes"


@pytest.mark.parametrize("name", [name for name, own in DATASETS.items() if own.embedded])
def test_the_classes_of_named_data_sets_are_documented_and_so_declared(name: str) -> None:
    for task in ({}, {"task": {"metric": "loss"}}):
        values: Any = {"data": {"name": name}, "method": {"name": "fedavg", **WORK}, **task}
        assert Experiment.from_dict({**values, "run": {"rounds": 1}}).federation().inferred == ""
    dataset = load_dataset(name)
    if dataset.task is None:
        task_left_open, seed = Classification(), PublicSeed(0)
        own = dpfl.Federation.from_dataset(dataset, Partition(), 2, seed, task_left_open)
        assert own.inferred == "" and own.classes == dataset.classes


def test_what_was_counted_changes_no_result_and_no_name_of_one(tmp_path: Path) -> None:
    """A run that is resumed may declare the classes that it has counted before."""

    def train(**options: Any) -> dpfl.Result:
        clients = {"a": (X, Y), "b": (X, Y)}
        federation = dpfl.Federation.from_arrays(clients, budgets=BUDGETS, **options)
        torch.manual_seed(0)
        strategy = dpfl.weiavg(**PRIVATE)
        more: Any = {"folder": tmp_path / "run", "resume": True, "progress": False}
        return dpfl.train(nn.Linear(2, 2), federation, strategy, rounds=1, **more)

    assert train().summary.to_dict() == train(classes=2).summary.to_dict()


def test_an_accounted_score_carries_the_flag() -> None:
    for classes in (2, None):
        clients = {"a": (X, Y), "b": (X, Y)}
        federation = dpfl.Federation.from_arrays(clients, budgets=BUDGETS, classes=classes)
        score = dpfl.evaluate(nn.Linear(2, 2), federation, epsilon=0.5)
        assert ("INFERRED" in str(score)) == (classes is None)


# -- records that are too large, and batches that are cut ------------------------------------------


def grown(factor: float, rows: int = 1) -> np.ndarray:
    features = X.copy()
    features[:rows] = factor / np.sqrt(2)
    return features


def test_records_that_count_as_zero_are_flagged() -> None:
    assert raised({"a": (X, Y), "b": (grown(0.9e15, 40), Y)}) == set()
    assert raised({"a": (X, Y), "b": (grown(1.1e15, 40), Y)}) == {Flag.TOO_LARGE}
    tested = {"a": (X, Y, X, Y), "b": (X, Y, grown(1.1e15), Y)}
    assert raised(tested) == set()  # nobody learns from test records
    assert raised({"a": (X, Y), "b": (grown(1.1e15, 40), Y)}, dpfl.fedavg(**WORK)) == set()


def test_one_such_record_among_many_is_enough(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.tile(grown(1.1e15), (5, 1)))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    halves = {"a": (mapped[:80], np.tile(Y, 2)), "b": (mapped[81:121], Y)}
    federation = dpfl.Federation.from_arrays(halves, classes=2)
    large = {c: s.train.too_large(s.span) for c, s in federation.shards.items()}
    assert large == {"a": True, "b": False}
    sixteen = dpfl.Federation.from_arrays({"a": (X, Y), "b": (grown(1.1e15, 39), Y)}, classes=2)
    large = {c: s.train.too_large(s.span) for c, s in sixteen.shards.items()}
    assert large == {"a": False, "b": True}  # of one storage


@pytest.mark.parametrize(
    ("strategy", "flagged"),
    [
        (dpfl.weiavg(**{**PRIVATE, "batch_size": 32}), False),  # 32 of 40 are trained on
        (dpfl.weiavg(**{**PRIVATE, "batch_size": 33}), True),
        (dpfl.fedavg(**{**WORK, "batch_size": 33}), True),
        (dpfl.pooled_dp(**{**PRIVATE, "batch_size": 33}), False),  # of everyone together
    ],
)
def test_batches_larger_than_the_data_are_flagged(strategy: dpfl.Strategy, flagged: bool) -> None:
    assert raised(strategy=strategy) == ({Flag.WHOLE_BATCHES} if flagged else set())


def test_a_method_that_takes_all_records_anyway_is_not_flagged() -> None:
    federation = dpfl.Federation.from_arrays({"a": (X, Y), "b": (X, Y)}, budgets=BUDGETS)
    assert data_flags(honest_members(federation), dpfl.preconditioned().local) == []


def test_batches_of_single_clients_are_looked_at() -> None:
    own = {"b": dpfl.ClientSettings(batch_size=33)}
    assert raised(client_settings=own) == {Flag.WHOLE_BATCHES}
    small = {"a": dpfl.ClientSettings(batch_size=32), "b": dpfl.ClientSettings(batch_size=8)}
    large = dpfl.weiavg(**{**PRIVATE, "batch_size": 64})
    assert raised(client_settings=small, strategy=large) == set()


# -- who sees them ---------------------------------------------------------------------------------


def texts(flags: Collection[Flag]) -> list[str]:
    return [flag.about.partition(":")[0] for flag in flags]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flags") / "run"
    federation = dpfl.Federation.from_arrays(
        {"a": (X, Y), "b": (grown(1e16, 40), Y, X, np.zeros(40))},
        budgets={name: dpfl.Budget(epsilon=2.0, delta=0.5) for name in ("a", "b")},
    )
    strategy = dpfl.weiavg(**{**PRIVATE, "batch_size": 64})
    options: Any = {"rounds": 1, "folder": folder, "progress": False}
    dpfl.train(nn.Linear(2, 2), federation, strategy, **options)
    return folder


def test_the_operator_sees_all_of_them_with_the_clients(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((run / "summary.json").read_text())["flags"]
    details = {own["flag"]: own["detail"] for own in told if own["flag"] in DATA_FLAGS}
    assert details == {
        "inferred": "declare classes",
        "too_large": "1 client(s): b",
        "whole_batches": "2 client(s): a, b",
    }
    assert run_command(["report", str(run), "--out", str(run / "board.html")]) == 0
    page = (run / "board.html").read_text()
    assert all(text in page for text in texts(DATA_FLAGS))


def test_the_world_sees_none_that_follows_from_a_record_or_a_size(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", str(run), "--public", "--out", str(run / "public.html")]) == 0
    for file in ("public.html", "model.json", "model.safetensors"):
        content = (run / file).read_bytes().decode("latin-1")
        assert "INFERRED" in content and "declare" not in content
        for text in ("TOO LARGE", "WHOLE BATCHES", "ONE-SIDED", "client(s)"):
            assert text not in content
    assert "WEAK" in (run / "public.html").read_text()


def test_a_description_tells_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, features in (("a", X), ("b", grown(1e16, 40))):
        rows = [f"{p!r},{q!r},{label}" for (p, q), label in zip(features.tolist(), Y, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y,ill", *rows]) + "\n")
    values: Any = {
        "data": {"folder": str(tmp_path)},
        "budgets": {"epsilon": 2.0, "delta": 1e-3},
        "method": {"name": "weiavg", **PRIVATE, "batch_size": 64},
        "run": {"rounds": 1},
    }
    described = describe(Experiment.from_dict(values))
    assert {flag.flag for flag in described.flags} == DATA_FLAGS
    assert {flag["flag"] for flag in described.to_dict()["flags"]} == DATA_FLAGS
    assert all(text in str(described) for text in texts(DATA_FLAGS))
    declared = {**values, "task": {"classes": 2}}
    assert Flag.INFERRED not in {
        flag.flag for flag in describe(Experiment.from_dict(declared)).flags
    }
    command = ["describe", "--dataset", str(tmp_path), "--method", "weiavg", "--rounds", "1"]
    options = ["--budgets", "2", "--delta", "1e-3", "--clip", "1", "--batch-size", "64"]
    assert run_command([*command, *options]) == 0
    warned = capsys.readouterr().err
    assert all(text in warned for text in texts(DATA_FLAGS))
