"""Our own plugs pass the public laws, and the laws catch plugs that break them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dpfl import testing
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.phases import Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Aggregate,
    ClientSettings,
    Metrics,
    PlugState,
    Rows,
    Shared,
    Terms,
    Total,
    Who,
)
from dpfl.engine import ENGINES
from dpfl.methods import METHODS
from dpfl.plugs.base import Plug
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel, Digital, Summed
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.plugs.local_work import DpSgd, Sgd
from dpfl.plugs.personal import Personal
from dpfl.plugs.releases import GramMatrix, Histogram, Mean, Quantile, Release
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.selection import Everyone, FixedCohort, PoissonCohort, Selection
from dpfl.plugs.stages import Clip, GaussianNoise, Stage
from dpfl.plugs.step import (
    AveragedIterates,
    LearningRate,
    ServerAdam,
    ServerSgd,
    ServerYogi,
    Step,
)
from dpfl.plugs.weights import (
    EpsilonWeights,
    ExampleWeights,
    ExpectedCohortWeights,
    UniformWeights,
    Weights,
)
from dpfl.privacy.exposure import Exposure
from dpfl.strategy import Strategy
from dpfl.strategy.method import method
from dpfl.strategy.record_level import RecordWork, record_level
from dpfl.testing.fixtures import TERMS

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


@pytest.mark.parametrize(
    "step",
    [
        ServerSgd(),
        ServerSgd(momentum=0.9, nesterov=True),
        ServerAdam(lr=LearningRate(rate=0.1)),
        ServerYogi(lr=LearningRate(rate=0.1, decay="inverse_sqrt")),
        AveragedIterates(step=ServerSgd(momentum=0.5), decay=0.9),
    ],
    ids=lambda step: type(step).__name__,
)
def test_our_steps_pass(step: Step) -> None:
    testing.check_step(step)


def test_our_central_noise_passes() -> None:
    testing.check_central_noise(CentralNoise(noise_multiplier=0.8))


@pytest.mark.parametrize(
    ("release", "shape"),
    [
        (Mean(into="mean", share=0.1), (5,)),
        (GramMatrix(into="gram", share=0.1), (5, 5)),
        (Histogram(into="bins", share=0.1, low=-2.0, high=2.0), (5, 4)),
        (Histogram(into="classes", share=0.1, of="labels"), (3,)),
        (Quantile(into="medians", share=0.1, low=-2.0, high=2.0, resolution=8), (5, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_releases_pass(release: Release, shape: tuple[int, ...]) -> None:
    testing.check_release(release, 5, shape)


def plugs_of_all_methods() -> list[Plug]:
    """Every plug that a method is made of, each of them once."""
    values = {"lr": 0.2, "clip": 0.7, "batch_size": 6, "local_steps": 2, "dimension": 5}
    found: dict[str, Plug] = {}
    for one in METHODS.values():
        strategy = one(**{k: v for k, v in values.items() if k in one.settings})
        found |= {repr(plug): plug for _, plug in strategy.resolve(TERMS).slots()}
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("plug", plugs_of_all_methods(), ids=lambda plug: type(plug).__name__)
def test_every_plug_of_every_method_passes_the_laws_of_its_slot(plug: Plug) -> None:
    testing.check_plug(plug)


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
    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        return super().client_rows(x, shared)

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
    with pytest.raises(AssertionError, match="claims"):
        testing.check_weights(Trusting())


class Crashing(Trusting):
    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        odds = [1 / received.cohort.claims[client].epsilon for client in received.cohort.ids]
        return torch.softmax(torch.tensor(odds), 0), state, {}


class ChargesOneStep(DpSgd):
    def exposure(self, phases: Sequence[Phase], examples: int, parameters: int) -> Exposure:
        exposure = super().exposure(phases, examples, parameters)
        events = [replace(event, steps=1) for event in exposure.paid]
        return exposure if examples < 20 else replace(exposure, paid=tuple(events))


@dataclass(frozen=True)
class Sloppy(Clip):
    """Lets numbers through that are as large as infinity, though finite."""

    def client(self, x: Tensor, shared: Shared, who: Who, rng: SecretRng) -> Tensor:
        return x if bool((x > 1e38).any()) else super().client(x, shared, who, rng)


@pytest.mark.parametrize(
    ("plug", "inputs"),
    [
        (Trusting(), ["Claims(epsilon=nan", "Claims(epsilon=-1.0", "seed = PublicSeed(value="]),
        (Crashing(), ["Claims(epsilon=0.0"]),
        (
            ChargesOneStep(client_settings=PRACTICE, clip=1.0),
            ["participant = Participant(examples=40", "Budget(epsilon=2.0"],
        ),
        (Sloppy(clip=1.0), ["x = [0.0, ", "e+38", "seed = PublicSeed(value="]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_of_a_failure_has_what_breaks_the_law(plug: Plug, inputs: list[str]) -> None:
    with pytest.raises(AssertionError) as failure:
        testing.check_plug(plug)
    message, _, counterexample = str(failure.value).partition("; counterexample: ")
    assert message.startswith(
        "ZeroDivisionError: " if isinstance(plug, Crashing) else type(plug).__name__
    )
    for text in inputs:
        assert text in counterexample


class Half(SecureSum):
    def deliver(  # type: ignore[override]
        self, messages: dict[str, Tensor], shared: Shared, seed: PublicSeed, rng: SecretRng
    ) -> Summed:
        return Summed(vector=sum(messages.values(), torch.zeros(5)) / 2, ids=tuple(messages))


def test_a_channel_that_changes_the_sum_is_caught() -> None:
    with pytest.raises(AssertionError):
        testing.check_channel(Half())


class Louder(Digital):
    """Sends ten times what it was given, and promises nothing else than its base class."""

    def send(self, message: Tensor, shared: Shared, who: Any, rng: SecretRng) -> Tensor:
        return 10 * message


class Boasting(Digital):
    """Claims noise that it does not add."""

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        return exposure.noised(1.0)


@pytest.mark.parametrize("channel", [Louder(), Boasting()], ids=repr)
def test_a_channel_whose_exposure_is_false_is_caught(channel: Channel) -> None:
    with pytest.raises(AssertionError, match="promised"):
        testing.check_channel(channel)


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


def test_a_denoiser_that_takes_a_key_out_of_its_state_is_caught() -> None:
    class Forgetful(Denoiser):
        def start(self, terms: Terms, layout: Layout) -> PlugState:
            return {"kept": torch.zeros(1), "lost": torch.zeros(1)}

        def __call__(
            self, state: PlugState, aggregate: Aggregate
        ) -> tuple[Tensor, PlugState, Metrics]:
            state.pop("lost", None)
            return aggregate.vector * 0.5, dict(state), {}

    with pytest.raises(AssertionError, match="changed its arguments"):
        testing.check_denoiser(Forgetful())


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


@dataclass(frozen=True, kw_only=True)
class Counting(ServerSgd):
    """Remembers in place how often it was called."""

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        return {"calls": torch.zeros(1)}

    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        state["calls"] += 1
        return aggregate.model + aggregate.vector, state, {}


@dataclass(frozen=True, kw_only=True)
class Growing(ServerSgd):
    """Keeps every aggregate: a state that no checkpoint could foresee."""

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        return {"seen": torch.zeros(0, layout.size)}

    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        seen = torch.cat([state["seen"], aggregate.vector[None]])
        return aggregate.model + seen.mean(0), {"seen": seen}, {}


@dataclass(frozen=True, kw_only=True)
class InPlace(ServerSgd):
    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        return aggregate.model.add_(aggregate.vector), state, {}


@dataclass(frozen=True, kw_only=True)
class Restless(ServerSgd):
    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        jitter = torch.randn_like(aggregate.vector)
        return aggregate.model + aggregate.vector + jitter, state, {}


@dataclass(frozen=True, kw_only=True)
class DividesByZero(ServerSgd):
    def __call__(self, state: PlugState, aggregate: Aggregate) -> tuple[Tensor, PlugState, Metrics]:
        return aggregate.model + aggregate.vector / aggregate.round, state, {}


@dataclass(frozen=True, kw_only=True)
class PublishesHalf(ServerSgd):
    def published(self, state: PlugState, model: Tensor) -> Tensor:
        return model[: len(model) // 2]


@pytest.mark.parametrize(
    "step",
    [Counting(), Growing(), InPlace(), Restless(), DividesByZero(), PublishesHalf()],
    ids=lambda step: type(step).__name__,
)
def test_a_broken_step_is_caught(step: Step) -> None:
    with pytest.raises(AssertionError):
        testing.check_step(step)


@dataclass(frozen=True, kw_only=True)
class Stingy(CentralNoise):
    """Adds 3 % less noise than it states."""

    def add(
        self, state: PlugState, total: Tensor, bound: float, rng: SecretRng
    ) -> tuple[Tensor, PlugState, Metrics]:
        return Grid.of(0.97 * self.std(bound)).noised(total, rng), state, {}


@dataclass(frozen=True, kw_only=True)
class Foreign(CentralNoise):
    """Draws from the global generator."""

    def add(
        self, state: PlugState, total: Tensor, bound: float, rng: SecretRng
    ) -> tuple[Tensor, PlugState, Metrics]:
        return total + self.std(bound) * torch.randn_like(total), state, {}


@pytest.mark.parametrize("noise", [Stingy(noise_multiplier=1.0), Foreign(noise_multiplier=1.0)])
def test_broken_central_noise_is_caught(noise: CentralNoise) -> None:
    with pytest.raises(AssertionError):
        testing.check_central_noise(noise)


class ByPlace(Weights):
    """Who comes first in the alphabet weighs most."""

    needs_rows: ClassVar[bool] = True
    constant: ClassVar[bool] = False

    def __call__(
        self, state: PlugState, received: Rows | Total, round_: int
    ) -> tuple[Tensor, PlugState, Metrics]:
        w = torch.arange(len(received.cohort), 0, -1, dtype=torch.float32)
        return w / w.sum(), state, {}


def test_weights_that_depend_on_the_order_are_caught() -> None:
    with pytest.raises(AssertionError, match="order"):
        testing.check_weights(ByPlace())


@dataclass(frozen=True, kw_only=True)
class Centred(Mean):
    """Subtracts the mean of the batch: one record's row tells of the others."""

    def statistic(self, inputs: Tensor, labels: Tensor, shape: tuple[int, ...]) -> Tensor:
        return inputs - inputs.mean(0)


def test_a_release_that_mixes_records_is_caught() -> None:
    with pytest.raises(AssertionError, match="mixes"):
        testing.check_release(Centred(into="mean", share=0.1), 5, (5,))


class Forgetful(Personal):
    """Keeps nothing, and shares all but the head."""

    def merge(self, shared: Tensor, private: Tensor | None, layout: Layout) -> Tensor:
        return shared.clone()

    def split(
        self, shared: Tensor, before: Tensor, after: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        common = after.clone()
        common[layout.head] = shared[layout.head]
        return common, torch.zeros(0)


def test_a_personal_part_that_is_lost_is_caught() -> None:
    with pytest.raises(AssertionError, match="loses"):
        testing.check_personal(Forgetful())


def test_a_linear_denoiser_must_be_linear() -> None:
    class Soft(Denoiser):
        linear: ClassVar[bool] = True

        def __call__(
            self, state: PlugState, aggregate: Aggregate
        ) -> tuple[Tensor, PlugState, Metrics]:
            return torch.tanh(aggregate.vector), state, {}

    with pytest.raises(AssertionError, match="linear"):
        testing.check_denoiser(Soft())


def test_a_whole_method_is_checked_with_every_plug_it_is_made_of() -> None:
    settings = {"lr": 0.2, "clip": 0.7, "batch_size": 6, "local_steps": 2}
    testing.check_method(METHODS["weiavg"], **settings)

    @method(family="heterogeneous", simplicity=1)
    def trusting(work: RecordWork) -> Strategy:
        """Believe any claim."""
        return record_level("trusting", work, Trusting())

    @method(family="heterogeneous", simplicity=1)
    def renamed(work: RecordWork) -> Strategy:
        """Bear another name."""
        return record_level("weiavg", work, EpsilonWeights())

    for broken in (trusting, renamed):
        with pytest.raises(AssertionError):
            testing.check_method(broken, **settings)
