"""Server optimisers against plain loops: torch's SGD, and the formulas of Reddi et al., 2021."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, PlugState, State, Terms
from dpfl.plugs.step import (
    DECAYS,
    AveragedIterates,
    LearningRate,
    ServerAdam,
    ServerSgd,
    ServerYogi,
    Step,
)
from dpfl.runs.folder import Checkpoint, RunFolder

LAYOUT = Layout.of({"weight": torch.zeros(4, 3), "bias": torch.zeros(4)})
TERMS = Terms(
    rounds=9,
    population=4,
    expected_cohort=4.0,
    participations=9,
    smallest_epsilon=1.0,
    largest_epsilon=1.0,
    parameters=LAYOUT.size,
)
ROUNDS = 9
RATES = [
    LearningRate(rate=0.3),
    LearningRate(rate=0.3, decay="exponential", factor=0.8),
    LearningRate(rate=0.3, decay="inverse_sqrt"),
    LearningRate(rate=0.3, decay="inverse_time"),
    LearningRate(rate=0.3, decay="cosine", rounds=ROUNDS),
]
OPTIMISERS: list[Step] = [
    ServerSgd(),
    ServerSgd(momentum=0.9),
    ServerSgd(momentum=0.9, nesterov=True),
    ServerAdam(lr=RATES[0]),
    ServerYogi(lr=RATES[0]),
    AveragedIterates(step=ServerAdam(lr=RATES[0])),
    AveragedIterates(step=ServerSgd(momentum=0.5), decay=0.9, first=2),
]


def normal(seed: int) -> Tensor:
    return torch.randn(LAYOUT.size, generator=dpfl.PublicSeed(seed).generator())


def walk(
    step: Step, rounds: int = ROUNDS, seed: int = 0
) -> tuple[list[Tensor], list[PlugState], list[Tensor]]:
    """The models and states of some rounds, one before the first, and the aggregates between."""
    models, states = [normal(1000 + seed)], [step.start(TERMS, LAYOUT)]
    aggregates = [normal(100 * seed + round_) for round_ in range(rounds)]
    for round_, vector in enumerate(aggregates):
        place = Aggregate(vector=vector, model=models[-1], layout=LAYOUT, round=round_)
        model, state, metrics = step(states[-1], place)
        assert isinstance(metrics, dict)
        models.append(model)
        states.append(state)
    return models, states, aggregates


# -- learning rates --------------------------------------------------------------------------------

EXPECTED: dict[str, Callable[[int], float]] = {  # t = 1, 2, ...
    "constant": lambda t: 0.3,
    "exponential": lambda t: 0.3 * 0.8 ** (t - 1),
    "inverse_sqrt": lambda t: 0.3 / math.sqrt(t),
    "inverse_time": lambda t: 0.3 / t,
    "cosine": lambda t: 0.3 * 0.5 * (1 + math.cos(math.pi * (t - 1) / ROUNDS)),
}


@pytest.mark.parametrize("lr", RATES, ids=lambda lr: lr.decay)
def test_a_learning_rate_follows_its_formula(lr: LearningRate) -> None:
    for round_ in range(ROUNDS):
        assert lr.at(round_) == pytest.approx(EXPECTED[lr.decay](round_ + 1), rel=1e-12)


def test_every_schedule_is_tested_and_begins_at_the_rate() -> None:
    assert sorted(EXPECTED) == sorted(DECAYS) == sorted(lr.decay for lr in RATES)
    for lr in RATES:
        assert lr.at(0) == 0.3


@pytest.mark.parametrize("lr", RATES, ids=lambda lr: lr.decay)
def test_a_schedule_never_rises_and_stays_a_number(lr: LearningRate) -> None:
    rates = [lr.at(round_) for round_ in range(2000)]
    assert all(a >= b >= 0 for a, b in itertools.pairwise(rates))


def test_a_cosine_ends_at_zero_and_stays_there() -> None:
    lr = LearningRate(rate=2.0, decay="cosine", rounds=10)
    assert lr.at(5) == pytest.approx(1.0)
    assert lr.at(10) == lr.at(11) == lr.at(500) == 0.0


@pytest.mark.parametrize("lr", RATES, ids=lambda lr: lr.decay)
def test_every_optimiser_takes_the_rate_of_its_round(lr: LearningRate) -> None:
    """The way a round goes is a multiple of its rate."""
    for make in (ServerSgd, ServerAdam, ServerYogi):
        place = Aggregate(vector=normal(1), model=torch.zeros(LAYOUT.size), layout=LAYOUT, round=4)
        one, scheduled = (
            step(step.start(TERMS, LAYOUT), place)[0]
            for step in (make(lr=LearningRate(rate=1.0)), make(lr=lr))
        )
        assert torch.allclose(scheduled, lr.at(4) * one, rtol=1e-5, atol=1e-9)


# -- SGD -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", RATES, ids=lambda lr: lr.decay)
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
def test_sgd_is_torch_s_on_the_negative_aggregate(
    momentum: float, nesterov: bool, lr: LearningRate
) -> None:
    step = ServerSgd(lr=lr, momentum=momentum, nesterov=nesterov)
    models, _, aggregates = walk(step)
    parameter = nn.Parameter(models[0].clone())
    optimiser = torch.optim.SGD([parameter], lr=1.0, momentum=momentum, nesterov=nesterov)
    for round_, aggregate in enumerate(aggregates):
        optimiser.param_groups[0]["lr"] = lr.at(round_)
        parameter.grad = -aggregate
        optimiser.step()
        assert torch.allclose(models[round_ + 1], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_momentum_and_nesterov_are_steps_of_their_own() -> None:
    ends = [
        walk(ServerSgd(momentum=momentum, nesterov=nesterov))[0][-1]
        for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True))
    ]
    assert not torch.allclose(ends[0], ends[1], atol=1e-2)
    assert not torch.allclose(ends[1], ends[2], atol=1e-2)


@given(seed=st.integers(0, 99), size=st.floats(1e-3, 1e3))
def test_at_rate_one_without_momentum_the_model_moves_by_the_aggregate_bit_for_bit(
    seed: int, size: float
) -> None:
    model, vector = normal(seed), size * normal(seed + 1)
    place = Aggregate(vector=vector, model=model, layout=LAYOUT, round=seed)
    moved, state, _ = ServerSgd()({}, place)
    assert torch.equal(moved, model + vector)
    assert state == ServerSgd().start(TERMS, LAYOUT) == {}


# -- Adam and Yogi, Algorithm 2 of the paper -------------------------------------------------------


def reference(
    kind: str,
    model: Tensor,
    aggregates: list[Tensor],
    lr: LearningRate,
    beta1: float,
    beta2: float,
    tau: float,
) -> list[np.ndarray]:
    """Coordinate by coordinate in double precision, as printed: v starts at tau^2, m at 0."""
    x, found = [float(value) for value in model], []
    m, v = [0.0] * len(x), [tau**2] * len(x)
    for t, aggregate in enumerate(aggregates, start=1):
        for j, delta in enumerate(aggregate.tolist()):
            m[j] = beta1 * m[j] + (1 - beta1) * delta
            if kind == "adam":
                v[j] = beta2 * v[j] + (1 - beta2) * delta**2
            else:
                sign = (v[j] > delta**2) - (v[j] < delta**2)
                v[j] = v[j] - (1 - beta2) * delta**2 * sign
            x[j] = x[j] + lr.at(t - 1) * m[j] / (math.sqrt(v[j]) + tau)
        found.append(np.array(x))
    return found


@pytest.mark.parametrize("lr", [RATES[0], RATES[2]], ids=lambda lr: lr.decay)
@pytest.mark.parametrize(
    ("beta1", "beta2", "tau"), [(0.9, 0.99, 1e-3), (0.0, 0.5, 1e-1), (0.5, 0.0, 1e-8)]
)
@pytest.mark.parametrize(("kind", "make"), [("adam", ServerAdam), ("yogi", ServerYogi)])
def test_an_adaptive_step_is_the_paper_s(
    kind: str,
    make: type[ServerAdam] | type[ServerYogi],
    beta1: float,
    beta2: float,
    tau: float,
    lr: LearningRate,
) -> None:
    step = make(lr=lr, beta1=beta1, beta2=beta2, tau=tau)
    models, states, aggregates = walk(step, rounds=25)
    assert torch.equal(states[0]["second"], torch.full((LAYOUT.size,), tau**2))
    assert not states[0]["first"].any()
    expected = reference(kind, models[0], aggregates, lr, beta1, beta2, tau)
    for model, wanted in zip(models[1:], expected, strict=True):
        assert np.allclose(model.numpy(), wanted, rtol=2e-4, atol=2e-4)


def test_adam_and_yogi_part_where_squares_fall() -> None:
    """Adam forgets large squares at once, Yogi at the pace at which it learned them."""
    seconds = []
    for make in (ServerAdam, ServerYogi):
        step = make(lr=RATES[0], beta2=0.5)
        state = step.start(TERMS, LAYOUT)
        for round_, size in enumerate([10.0] * 20 + [0.1] * 20):
            vector = torch.full((LAYOUT.size,), size)
            place = Aggregate(vector=vector, model=vector, layout=LAYOUT, round=round_)
            _, state, _ = step(state, place)
        seconds.append(float(state["second"][0]))
    assert seconds[0] < 0.1
    assert seconds[1] > 50


@pytest.mark.parametrize("make", [ServerAdam, ServerYogi])
def test_an_adaptive_step_moves_every_coordinate_alike_whatever_its_scale(
    make: type[ServerAdam] | type[ServerYogi],
) -> None:
    scales = torch.logspace(0, 4, LAYOUT.size)
    step = make(lr=LearningRate(rate=1.0), beta1=0.0, beta2=0.0, tau=1e-6)
    place = Aggregate(vector=scales, model=torch.zeros(LAYOUT.size), layout=LAYOUT, round=0)
    moved, _, _ = step(step.start(TERMS, LAYOUT), place)
    assert torch.allclose(moved, torch.ones(LAYOUT.size), rtol=1e-4)


# -- averaging of iterates -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("inner", [ServerSgd(), ServerSgd(momentum=0.9), ServerAdam(lr=RATES[2])])
def test_a_uniform_average_is_the_mean_of_the_models_and_rounds_go_on_from_the_last(
    inner: Step, first: int
) -> None:
    step = AveragedIterates(step=inner, first=first)
    models, states, _ = walk(step)
    plain, _, _ = walk(inner)
    assert all(torch.equal(a, b) for a, b in zip(models, plain, strict=True))
    for done in range(1, ROUNDS + 1):
        published = step.published(states[done], models[done])
        assert published.dtype == models[done].dtype
        if done <= first:
            assert torch.equal(published, models[done])
        else:
            mean = torch.stack(models[first + 1 : done + 1]).double().mean(0)
            assert torch.allclose(published.double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_an_exponential_average_begins_at_the_first_model(decay: float) -> None:
    step = AveragedIterates(decay=decay, first=1)
    models, states, _ = walk(step)
    expected = models[2].double()
    for done in range(2, ROUNDS + 1):
        if done > 2:
            expected = decay * expected + (1 - decay) * models[done].double()
        published = step.published(states[done], models[done])
        assert torch.allclose(published.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_mean_of_many_models_does_not_drift() -> None:
    """An average in single precision would lose the late ones."""
    step = AveragedIterates()
    state, model = step.start(TERMS, LAYOUT), torch.full((LAYOUT.size,), 1000.0)
    total = torch.zeros(LAYOUT.size, dtype=torch.float64)
    for round_ in range(3000):
        vector = 1e-3 * normal(round_)
        place = Aggregate(vector=vector, model=model, layout=LAYOUT, round=round_)
        model, state, _ = step(state, place)
        total += model
    assert torch.allclose(state["average"], total / 3000, rtol=1e-9, atol=0)


def test_a_step_of_any_kind_publishes_the_model_unless_it_averages() -> None:
    for step in OPTIMISERS:
        models, states, _ = walk(step)
        same = torch.equal(step.published(states[-1], models[-1]), models[-1])
        assert same is not isinstance(step, AveragedIterates)


# -- the laws of a step ----------------------------------------------------------------------------


@pytest.mark.parametrize("step", OPTIMISERS, ids=repr)
def test_a_step_is_pure_keeps_the_length_and_stays_finite(step: Step) -> None:
    models, states, aggregates = walk(step, rounds=3)
    for round_, vector in enumerate(aggregates):
        kept = {name: tensor.clone() for name, tensor in states[round_].items()}
        place = Aggregate(vector=vector, model=models[round_], layout=LAYOUT, round=round_)
        model, state, _ = step(states[round_], place)
        assert torch.equal(model, models[round_ + 1])
        assert state.keys() == states[round_ + 1].keys() == kept.keys()
        assert all(torch.equal(state[name], states[round_ + 1][name]) for name in state)
        assert all(torch.equal(kept[name], states[round_][name]) for name in kept)
        assert model.shape == (LAYOUT.size,)
        assert model.dtype == torch.float32
    assert torch.equal(aggregates[0], normal(0))
    for vector in (torch.zeros(LAYOUT.size), torch.full((LAYOUT.size,), 1e18)):
        place = Aggregate(vector=vector, model=models[0], layout=LAYOUT, round=0)
        moved, state, _ = step(step.start(TERMS, LAYOUT), place)
        assert bool(torch.isfinite(moved).all())
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())
        if not vector.any():
            assert torch.equal(moved, models[0])


@pytest.mark.parametrize("step", OPTIMISERS, ids=repr)
def test_what_a_step_remembers_survives_a_checkpoint(step: Step, tmp_path: Any) -> None:
    models, states, aggregates = walk(step)
    folder = RunFolder(tmp_path)
    state = State(round=4, model=models[4], plugs={"step": states[4]})
    folder.save_state(Checkpoint(state=state, run="run", experiment="digest"))
    found = folder.load_state("digest").state
    model, memory = found.model, dict(found.plugs["step"])
    for round_ in range(4, ROUNDS):
        place = Aggregate(vector=aggregates[round_], model=model, layout=LAYOUT, round=round_)
        model, memory, _ = step(memory, place)
    assert torch.equal(model, models[-1])
    assert torch.equal(step.published(memory, model), step.published(states[-1], models[-1]))


# -- in training -----------------------------------------------------------------------------------


def federation() -> dpfl.Federation:
    rng = np.random.default_rng(0)
    arrays = {f"c{i}": (rng.normal(size=(20, 5)), rng.integers(0, 3, 20)) for i in range(4)}
    budgets = {client: dpfl.Budget(epsilon=4.0, delta=1e-3) for client in arrays}
    return dpfl.Federation.from_arrays(arrays, budgets=budgets, classes=3)


def trained(step: Step | None, rounds: int = 4) -> dpfl.Result:
    strategy = dpfl.fedavg_dp(lr=0.2, clip=1.0, batch_size=5, local_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    return dpfl.train(
        model, federation(), replace(strategy, step=step) if step else strategy, rounds=rounds
    )


def test_rate_one_without_momentum_is_fedavg_bit_for_bit() -> None:
    plain, sgd = trained(None), trained(ServerSgd(lr=LearningRate(rate=1.0), momentum=0.0))
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, sgd.model.state_dict()[name])
    assert plain.history == sgd.history


def test_a_step_is_post_processing_it_moves_the_model_and_never_a_cost() -> None:
    plain = trained(None)
    for step in OPTIMISERS[1:]:
        other = trained(step)
        assert not torch.equal(plain.model.weight, other.model.weight)
        spent = {client: line.epsilon for client, line in plain.spent.items()}
        assert spent == {client: line.epsilon for client, line in other.spent.items()}


def test_a_run_hands_out_and_evaluates_the_average_and_goes_on_from_the_last_model() -> None:
    strategy = dpfl.fedavg(lr=0.2, batch_size=5, local_steps=2)  # shorter runs are prefixes
    torch.manual_seed(0)
    model = nn.Linear(5, 3)

    def run(step: Step, rounds: int) -> dpfl.Result:
        return dpfl.train(model, federation(), replace(strategy, step=step), rounds=rounds)

    lasts = [run(ServerSgd(), rounds) for rounds in (1, 2, 3)]
    averaged = run(AveragedIterates(), 3)
    mean = torch.stack([result.model.weight for result in lasts]).mean(0)
    assert torch.allclose(averaged.model.weight, mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(averaged.model.weight, lasts[-1].model.weight)
    norms = [[line.update_norm for line in result.history] for result in (averaged, lasts[-1])]
    assert norms[0] == norms[1]
    assert averaged.history[0].scores == lasts[-1].history[0].scores
    assert averaged.history[-1].scores != lasts[-1].history[-1].scores
    last = averaged.history[-1].scores
    assert last is not None
    assert (averaged.summary.value, averaged.summary.scores.loss) == (last.value, last.loss)
    late = run(AveragedIterates(first=2), 3)
    assert torch.equal(late.model.weight, lasts[-1].model.weight)


# -- what makes no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (LearningRate, {"rate": 0.0}, "lr = 0.0"),
        (LearningRate, {"rate": -1.0}, "lr = -1.0"),
        (LearningRate, {"rate": math.nan}, "lr = nan"),
        (LearningRate, {"rate": math.inf}, "lr = inf"),
        (LearningRate, {"decay": "linear"}, "linear"),
        (LearningRate, {"decay": "exponential", "factor": 0.0}, "factor = 0.0"),
        (LearningRate, {"decay": "exponential", "factor": 1.5}, "factor = 1.5"),
        (LearningRate, {"decay": "cosine"}, "rounds"),
        (LearningRate, {"decay": "cosine", "rounds": 2.5}, "rounds = 2.5"),
        (LearningRate, {"decay": "cosine", "rounds": -1}, "rounds = -1"),
        (LearningRate, {"decay": "cosine", "rounds": 0}, "rounds"),
        (ServerSgd, {"momentum": 1.0}, "momentum = 1.0"),
        (ServerSgd, {"momentum": -0.1}, "momentum = -0.1"),
        (ServerSgd, {"momentum": math.nan}, "momentum = nan"),
        (ServerAdam, {"lr": RATES[0], "tau": 0.0}, "tau = 0.0"),
        (ServerAdam, {"lr": RATES[0], "beta1": 1.0}, "beta1 = 1.0"),
        (ServerYogi, {"lr": RATES[0], "beta2": -0.1}, "beta2 = -0.1"),
        (ServerYogi, {"lr": RATES[0], "beta2": math.nan}, "beta2 = nan"),
        (AveragedIterates, {"decay": 0.0}, "decay = 0.0"),
        (AveragedIterates, {"decay": 1.1}, "decay = 1.1"),
        (AveragedIterates, {"first": -1}, "first = -1"),
        (AveragedIterates, {"first": 1.5}, "first = 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    make: Callable[..., Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named.replace(".", r"\.")):
        make(**settings)


def test_an_adaptive_step_has_no_rate_of_its_own_accord() -> None:
    for make in (ServerAdam, ServerYogi):
        with pytest.raises(TypeError, match="lr"):
            make()
