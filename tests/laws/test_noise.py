"""Nothing is released but noisy integers: the law on every mechanism of the registry, and the
attack on single releases.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl import testing
from dpfl.core.errors import DpflError
from dpfl.core.grid import Grid
from dpfl.core.grid_noise import SCALE
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Observer, Phase, Who
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.methods import METHODS
from dpfl.models.features import make_features
from dpfl.models.preconditioning import linear_head
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.strategy import Strategy

VALUES: dict[str, Any] = {
    "lr": 0.2,
    "clip": 0.7,
    "batch_size": 6,
    "local_steps": 2,
    "dimension": 20,
}
"""What settings without a default are given; one that is not here must be added, so that no new
method is left out.
"""

CHOICES: dict[str, tuple[Any, ...]] = {
    "noise": ("distributed", "local"),
    "clip_after": (True,),
    "personal_starts": (True, False),
    "selection": (None, dpfl.FixedCohort(size=3, least=3), dpfl.PoissonCohort(sampling_rate=0.9)),
}
"""Settings that change the mechanism: all of them are tried."""


def mechanisms() -> list[tuple[str, Strategy]]:
    """Every method of the registry that protects anyone, with every setting that changes its
    mechanism.
    """
    found = []
    for name in sorted(METHODS):
        known = METHODS[name].settings
        needed = {p for p in known if known[p].default is inspect.Parameter.empty} | (
            {"local_steps"} & set(known)
        )
        if "public" in known:
            VALUES.setdefault("public", 0.3)
        for choice in [
            {},
            *({s: value} for s in sorted(set(CHOICES) & set(known)) for value in CHOICES[s]),
        ]:
            try:
                strategy = METHODS[name](
                    **{setting: VALUES[setting] for setting in needed} | choice
                )
            except DpflError:
                continue  # a combination that is refused releases nothing
            if strategy.observer is not Observer.NOBODY:
                found.append((f"{name} {choice}", strategy))
    return found


MECHANISMS = mechanisms()


def test_every_method_that_protects_anyone_is_in_the_list() -> None:
    named = {label.split()[0] for label, _ in MECHANISMS}
    assert named == {name for name in METHODS if name != "fedavg"}


@pytest.mark.parametrize(
    "strategy", [s for _, s in MECHANISMS], ids=[label for label, _ in MECHANISMS]
)
def test_nothing_is_released_but_noisy_integers(strategy: Strategy) -> None:
    if strategy.recipe is None:
        testing.check_releases(strategy)
        return
    model = linear_head(make_features("table", (16,)), 8)
    recipe = replace(strategy.recipe, force=True)  # type: ignore[call-arg]
    planned = replace(strategy, recipe=recipe).for_model(model)
    testing.check_releases(planned, engine="stacked", model=model)


@pytest.mark.parametrize("name", ["dp_fed", "dp_fed_ls", "robust_hdp", "weiavg"])
def test_the_law_catches_noise_in_floating_point(name: str) -> None:
    strategy = next(s for label, s in MECHANISMS if label.split()[0] == name)
    with testing.float_noise(), pytest.raises(AssertionError):
        testing.check_releases(strategy)


# -- the attack of the single release, with noise from the operating system ------------------------

TRIALS, COORDINATES, STD = 60, 100, 7.3


def uploads(noised: bool) -> tuple[int, int]:
    """For how many uploads without and with a client the attacker finds a value that noise alone
    cannot produce.
    """
    stages = (Clip(clip=1.0), GaussianNoise(noise_multiplier=STD, clip=1.0))
    who = Who(id="a", claims=Claims(epsilon=0.5, delta=1e-5, examples=10), drawn=1)
    update = torch.randn(COORDINATES, generator=PublicSeed(1).generator())

    def guilty(x: Tensor) -> bool:
        for stage in stages:
            x = stage.client(x, {}, who, SecretRng.from_system())
        scale = STD / SCALE if noised else STD

        def image(n: Tensor) -> Tensor:
            return (n * scale).to(torch.float32) if noised else n * torch.tensor(scale)

        return bool(
            testing.impossible(x.to(torch.float32), x.double() / scale, image, whole=noised).any()
        )

    return sum(guilty(torch.zeros(COORDINATES)) for _ in range(TRIALS)), sum(
        guilty(update) for _ in range(TRIALS)
    )


def test_an_upload_tells_nothing_by_its_support() -> None:
    assert uploads(noised=True) == (0, 0)


def test_the_attack_on_an_upload_breaks_noise_in_floating_point() -> None:
    with testing.float_noise():
        without, with_client = uploads(noised=False)
    assert without == 0
    assert with_client >= 0.95 * TRIALS


@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_a_step_of_dp_sgd_is_a_whole_number_of_steps_of_the_grid(engine: str) -> None:
    """From ordinary initial weights, at rate 0.2: the attack that told 39 of 200 steps."""
    model = nn.Linear(25, 4)
    layout = Layout.of_module(model)
    start = layout.read(model)
    phase = Phase(steps=1, batch_size=4, sampling="poisson", lr=0.2, clip=1.0, noise_multiplier=1.1)
    rate = 0.2 * Grid.of(1.1).step / 4

    def image(n: Tensor) -> Tensor:
        if engine == "stacked":
            return torch.addcmul(start, n.float(), torch.full_like(start, rate), value=-1)
        return start.clone().sub_((n * Grid.of(1.1).step / 4).float(), alpha=0.2)

    for zeroed in (True, False):
        for trial in range(40):
            features = (
                torch.zeros(20, 25)
                if zeroed
                else torch.randn(20, 25, generator=PublicSeed(trial).generator())
            )
            job = Job(
                client="a", start=start, phases=(phase,), features=features, labels=torch.arange(20) % 4,
                rng=SecretRng.from_system(),
            )  # fmt: skip
            (after,) = make_engine(engine).run(model, layout, [job])
            assert not testing.impossible(
                after, (start - after).double() / rate, image, whole=True
            ).any()


def test_noise_has_no_holes_in_its_low_bits() -> None:
    """Of what a client sends the low bits are uniform, with and without the client."""
    numbers = 200_000
    for x in (torch.zeros(numbers), torch.full((numbers,), 1 / math.sqrt(numbers))):
        grid = Grid.of(1.0)
        integers = grid.integers(grid.noised(x, SecretRng.from_system())).to(torch.int64)
        counts = torch.bincount(integers & 255, minlength=256).double()
        chi = float(((counts - numbers / 256) ** 2 / (numbers / 256)).sum())
        assert chi < 255 + 6 * math.sqrt(2 * 255)


def test_the_sampler_s_law_on_every_integer() -> None:
    limits = testing.check_sampler()
    assert limits[10] < 2**-28
