"""Our own plugs pass the public laws, and the laws catch plugs that break them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dpfl import testing
from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Aggregate, ClientSettings, Metrics, PlugState, Rows, Shared, Total, Who
from dpfl.engine import ENGINES
from dpfl.plugs.channels import Channel, Digital, Summed
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import DpSgd, Sgd
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection
from dpfl.plugs.stages import Clip, GaussianNoise, Stage
from dpfl.plugs.weights import (
    EpsilonWeights,
    ExampleWeights,
    ExpectedCohortWeights,
    UniformWeights,
    Weights,
)
from dpfl.privacy.exposure import Exposure

PRACTICE = ClientSettings(batch_size=4, local_steps=2, lr=0.1)


@pytest.mark.parametrize(
    "stage", [Clip(clip=0.7), GaussianNoise(noise_multiplier=1.3, clip=2.0)], ids=repr
)
def test_our_stages_pass(stage: Stage) -> None:
    testing.check_stage(stage)


@pytest.mark.parametrize("channel", [Digital(), SecureSum()], ids=repr)
def test_our_channels_pass(channel: Channel) -> None:
    testing.check_channel(channel)


@pytest.mark.parametrize(
    "weights",
    [
        UniformWeights(),
        ExampleWeights(),
        EpsilonWeights(),
        ExpectedCohortWeights(expected_cohort=4),
    ],
    ids=repr,
)
def test_our_weights_pass(weights: Weights) -> None:
    testing.check_weights(weights)


@pytest.mark.parametrize(
    "selection", [Everyone(), FixedCohort(size=3), PoissonCohort(sampling_rate=0.4)], ids=repr
)
def test_our_selections_pass(selection: Selection) -> None:
    testing.check_selection(selection)


def test_our_local_work_passes() -> None:
    testing.check_local_work(Sgd(client_settings=PRACTICE))
    testing.check_local_work(Sgd(client_settings=PRACTICE, ball=0.5))
    testing.check_local_work(DpSgd(client_settings=PRACTICE, clip=1.0))


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_our_engines_pass(name: str) -> None:
    testing.check_engine(ENGINES[name]())


# ---- the laws have teeth ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LetsNaNThrough(Clip):
    """Flower's way: one NaN makes the comparison false and nothing is clipped."""

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        norm = x.norm()
        return x * (self.clip / norm) if norm > self.clip else x


@dataclass(frozen=True)
class TooLittleNoise(GaussianNoise):
    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        return Grid.of(0.97 * self.std(who.drawn)).noised(x, rng)


@dataclass(frozen=True)
class GlobalNoise(GaussianNoise):
    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        return x + self.std(who.drawn) * torch.randn_like(x)


@dataclass(frozen=True)
class CrookedServer(Clip):
    def server(self, y: Tensor, shared: Shared, who: Who | None) -> Tensor:
        return y.abs()


@dataclass(frozen=True)
class OtherwiseTogether(Clip):
    def client_rows(self, rows: Tensor, shared: Shared) -> Tensor:
        return super().client_rows(rows, shared) / 2


@dataclass(frozen=True)
class WrongPromise(Clip):
    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        return exposure.clipped(self.clip / 2)


@pytest.mark.parametrize(
    "stage",
    [
        LetsNaNThrough(clip=1.0),
        TooLittleNoise(noise_multiplier=1.0, clip=1.0),
        GlobalNoise(noise_multiplier=1.0, clip=1.0),
        CrookedServer(clip=1.0),
        OtherwiseTogether(clip=1.0),
        WrongPromise(clip=1.0),
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_broken_stage_is_caught(stage: Stage) -> None:
    with pytest.raises(AssertionError):
        testing.check_stage(stage)


def test_a_client_half_of_one_s_own_is_not_bypassed_by_the_rows_of_its_parent() -> None:
    assert Clip(clip=1.0).acts_on_rows
    assert OtherwiseTogether(clip=1.0).acts_on_rows
    assert not LetsNaNThrough(clip=1.0).acts_on_rows
    assert not GaussianNoise(noise_multiplier=1.0, clip=1.0).acts_on_rows


class Trusting(Weights):
    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        claimed = torch.tensor([received.cohort.claims[c].epsilon for c in received.cohort.ids])
        return claimed / claimed.sum(), state, {}


def test_weights_that_believe_any_claim_are_caught() -> None:
    with pytest.raises(AssertionError, match="lie"):
        testing.check_weights(Trusting())


class Half(Channel):
    sees_rows: ClassVar[bool] = False
    simulated: ClassVar[bool] = True

    def deliver(  # type: ignore[override]
        self, messages: dict[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> Summed:
        return Summed(vector=sum(messages.values(), torch.zeros(5)) / 2, ids=tuple(messages))


def test_a_channel_that_changes_the_sum_is_caught() -> None:
    with pytest.raises(AssertionError):
        testing.check_channel(Half())


class FirstRowRules(RowDenoiser):
    ordered: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        return rows.matrix - rows.matrix[0], state, {}


class MeanFirst(RowDenoiser):
    ordered: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, rows: Rows, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        return rows.matrix.mean(0).expand_as(rows.matrix), state, {}


def test_an_order_dependent_cleaner_must_say_so() -> None:
    testing.check_row_denoiser(MeanFirst())
    with pytest.raises(AssertionError, match="order"):
        testing.check_row_denoiser(FirstRowRules())


def test_a_denoiser_that_changes_its_argument_is_caught() -> None:
    class Halve(Denoiser):
        def __call__(
            self, state: PlugState, aggregate: Aggregate
        ) -> tuple[Tensor, PlugState, Metrics]:
            return aggregate.vector * 0.5, state, {}

    class HalveInPlace(Denoiser):
        def __call__(
            self, state: PlugState, aggregate: Aggregate
        ) -> tuple[Tensor, PlugState, Metrics]:
            return aggregate.vector.mul_(0.5), state, {}

    testing.check_denoiser(Halve())
    with pytest.raises(AssertionError):
        testing.check_denoiser(HalveInPlace())


class Favourite(Selection):
    sampling: ClassVar[str] = "uniform"  # type: ignore[assignment]

    def rate(self, population: int) -> float:
        return 0.5

    def cohort_size(self, population: int) -> int | None:
        return population // 2

    def order(self, candidates: list[str], seed: PublicSeed) -> list[str]:  # type: ignore[override]
        return list(candidates)


def test_a_selection_with_favourites_is_caught() -> None:
    with pytest.raises(AssertionError):
        testing.check_selection(Favourite())


def test_an_engine_that_forgets_to_clip_is_caught() -> None:
    from dpfl.engine.stacked import Stacked

    class Lazy(Stacked):
        def run(self, model, layout, jobs):  # type: ignore[no-untyped-def]
            return [after * 1.001 for after in super().run(model, layout, jobs)]

    with pytest.raises(AssertionError, match="off"):
        testing.check_engine(Lazy())
