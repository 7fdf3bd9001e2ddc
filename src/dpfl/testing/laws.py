"""The laws themselves: each function raises AssertionError with the counterexample Hypothesis
found.

They test what a protocol's docstring promises, by behaviour only, so that a stranger's piece can be
checked without knowing how it works.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Aggregate,
    Budget,
    Claims,
    ClientSettings,
    Cohort,
    Phase,
    Rows,
    Terms,
    Unit,
    Who,
)
from dpfl.engine.base import Engine, Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.plugs.base import Participant
from dpfl.plugs.channels import Channel, Summed
from dpfl.plugs.denoise import Denoiser
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.row_denoise import RowDenoiser
from dpfl.plugs.sampling import sampler
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.weights import Weights
from dpfl.privacy.exposure import Exposure

LAYOUT = Layout.of({"weight": torch.zeros(4, 3), "bias": torch.zeros(4)})
TERMS = Terms(
    rounds=5,
    population=8,
    expected_cohort=4.0,
    participations=3,
    smallest_epsilon=0.5,
    largest_epsilon=8.0,
    parameters=LAYOUT.size,
)
_ODD = st.sampled_from(
    [0.0, -0.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan")]
)
_NUMBER = st.floats(-100, 100, width=32)


def _vectors(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    return st.lists(numbers, min_size=LAYOUT.size, max_size=LAYOUT.size).map(torch.tensor)


# Half of them ordinary: among odd numbers alone, hardly a vector would stay finite.
_VECTOR = _vectors(_NUMBER) | _vectors(_NUMBER | _ODD)
_SEED = st.integers(0, 2**64 - 1).map(PublicSeed)


def _always(law: Callable[..., None]) -> None:
    settings(
        max_examples=60, deadline=None, database=None, derandomize=True, report_multiple_bugs=False
    )(law)()


def _who(drawn: int = 4) -> Who:
    return Who(id="a", claims=Claims(epsilon=1.0, delta=1e-5, examples=10), drawn=drawn)


def _cohort(size: int) -> Cohort:
    return Cohort.of(
        {f"c{i}": Claims(epsilon=0.5 + i, delta=1e-5, examples=10 + i) for i in range(size)}
    )


def check_stage(stage: Stage) -> None:
    """A stage keeps the length, enforces the bound its exposure promises for any input, and is
    linear where it says so.
    """
    shared = stage.open(stage.start(TERMS, LAYOUT), 0, _cohort(4), PublicSeed(0))
    promised = stage.exposure(Exposure(unit=Unit.CLIENT, numbers=LAYOUT.size), 4)
    bounded = stage.exposure(Exposure(unit=Unit.CLIENT, bound=1.0, numbers=LAYOUT.size), 4)
    adds_noise = (
        bounded.noise > 0
    )  # noise on what is not bounded protects nobody, and is not promised

    @given(_VECTOR, _SEED)
    def bounded_and_right_length(x: Tensor, seed: PublicSeed) -> None:
        y = stage.client(x, dict(shared), _who(), SecretRng.simulated(seed))
        if not adds_noise and math.isfinite(promised.bound):
            norm = torch.linalg.vector_norm(y.double())
            assert torch.isfinite(norm), f"{stage} let a non-finite value through"
            assert norm <= promised.bound, (
                f"{stage} promised norms up to {promised.bound}, sent {norm}"
            )
        assert stage.server(y, dict(shared), _who()).shape == (LAYOUT.size,), (
            f"{stage} changed the length"
        )

    @given(_SEED)
    def noise_is_the_generator_s(seed: PublicSeed) -> None:
        x = torch.ones(LAYOUT.size)
        once = stage.client(x, dict(shared), _who(), SecretRng.simulated(seed))
        torch.manual_seed(1)
        again = stage.client(x, dict(shared), _who(), SecretRng.simulated(seed))
        assert torch.equal(once, again), f"{stage} draws from somewhere else than its generator"

    @given(_SEED)
    def linear_server_half(seed: PublicSeed) -> None:
        draws = [torch.randn(LAYOUT.size, generator=seed.child(i).generator()) for i in range(2)]
        sent = [
            stage.client(d, dict(shared), _who(), SecretRng.simulated(seed.child("s", i)))
            for i, d in enumerate(draws)
        ]
        whole = stage.server(sent[0] + sent[1], dict(shared), None)
        parts = sum((stage.server(s, dict(shared), _who()) for s in sent), torch.zeros(LAYOUT.size))
        assert torch.allclose(whole, parts, rtol=1e-4, atol=1e-5), (
            f"{stage} says linear, but is not"
        )

    @given(_SEED)
    def many_at_once_as_one_by_one(seed: PublicSeed) -> None:
        rows = torch.randn(3, LAYOUT.size, generator=seed.generator())
        together = stage.client_rows(rows, dict(shared))
        alone = [stage.client(row, dict(shared), _who(), SecretRng.simulated(seed)) for row in rows]
        assert torch.allclose(together, torch.stack(alone), atol=1e-5), (
            f"{stage} acts otherwise on many rows at once"
        )

    _always(bounded_and_right_length)
    if stage.acts_on_rows:
        _always(many_at_once_as_one_by_one)
    _always(noise_is_the_generator_s)
    if stage.linear:
        _always(linear_server_half)
    if adds_noise:
        _check_noise_scale(stage, dict(shared), bounded)


def _check_noise_scale(stage: Stage, shared: dict[str, Tensor], promised: Exposure) -> None:
    """At zero input, what is sent has the std the exposure promises, within 2 %, over some 200,000
    numbers.
    """
    rounds = 200_000 // LAYOUT.size
    rng = SecretRng.simulated(PublicSeed(7))
    sent = torch.stack(
        [stage.client(torch.zeros(LAYOUT.size), shared, _who(), rng) for _ in range(rounds)]
    )
    ratio = float(sent.double().std()) / promised.noise
    assert 0.98 < ratio < 1.02, f"{stage} adds {ratio:.3f} times the noise its exposure promises"


def check_channel(channel: Channel) -> None:
    """Rows arrive as sent, or the sum of those said to be in it arrives, and nothing else."""

    @given(st.integers(1, 6), _SEED)
    def delivers(size: int, seed: PublicSeed) -> None:
        messages = {
            f"c{i}": torch.randn(5, generator=seed.child(i).generator()) for i in range(size)
        }
        arrived = channel.deliver(messages, {}, seed, SecretRng.simulated(seed))
        if channel.sees_rows:
            assert isinstance(arrived, dict)
            assert all(torch.equal(arrived[c], messages[c]) for c in arrived), (
                f"{channel} changed a message"
            )
        else:
            assert isinstance(arrived, Summed), f"{channel} says it delivers sums only"
            total = sum((messages[c] for c in arrived.ids), torch.zeros(5))
            assert torch.allclose(arrived.vector.to(total.dtype), total, atol=1e-5), (
                f"{channel} delivers something else than the sum"
            )

    _always(delivers)


def _rows(size: int, seed: PublicSeed) -> Rows:
    matrix = torch.randn(size, LAYOUT.size, generator=seed.generator())
    return Rows(matrix=matrix, origin=torch.zeros(LAYOUT.size), cohort=_cohort(size), layout=LAYOUT)


def check_weights(weights: Weights) -> None:
    """Finite, non-negative, summing to one unless constant; constant ones are the value they
    promise.
    """

    @given(st.integers(1, 8), _SEED)
    def sane(size: int, seed: PublicSeed) -> None:
        rows = _rows(size, seed)
        w, state, metrics = weights(weights.start(TERMS, LAYOUT), rows, 0)
        assert w.shape == (size,)
        assert bool(torch.isfinite(w).all()), f"{weights} gave {w}"
        assert bool((w >= 0).all()), f"{weights} gave {w}"
        assert isinstance(state, dict)
        assert isinstance(metrics, dict)
        if weights.constant:
            assert torch.allclose(w, torch.full((size,), weights.value(TERMS))), (
                f"{weights} are not constant"
            )
        else:
            assert abs(float(w.sum()) - 1) < 1e-5, f"{weights} sum to {float(w.sum())}"

    @given(_SEED)
    def lies_stay_finite(seed: PublicSeed) -> None:
        lies = [0.0, -1.0, float("nan"), 1e9, float("inf"), 1.0]
        claims = {
            f"c{i}": Claims(epsilon=lie, delta=1e-5, examples=10) for i, lie in enumerate(lies)
        }
        rows = _rows(len(lies), seed)
        told = Rows(matrix=rows.matrix, origin=rows.origin, cohort=Cohort.of(claims), layout=LAYOUT)
        w, _, _ = weights(weights.start(TERMS, LAYOUT), told, 0)
        assert bool(torch.isfinite(w).all()), f"{weights} let a lie through: {w}"
        assert bool((w >= 0).all()), f"{weights} let a lie through: {w}"

    _always(sane)
    _always(lies_stay_finite)


def check_selection(selection: Selection) -> None:
    """Only candidates are drawn, none twice, by the public seed alone; and as often as the rate
    says.
    """
    candidates = [f"c{i}" for i in range(8)]

    @given(_SEED)
    def valid(seed: PublicSeed) -> None:
        drawn = selection.order(candidates, seed)
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(candidates)
        assert drawn == selection.order(candidates, seed), (
            f"{selection} depends on something else than its seed"
        )

    _always(valid)
    size, rounds = selection.cohort_size(8), 4000
    counts = dict.fromkeys(candidates, 0)
    for i in range(rounds):
        for client in selection.order(candidates, PublicSeed(i))[: 8 if size is None else size]:
            counts[client] += 1
    rate = selection.rate(8)
    tolerance = 5 * math.sqrt(max(rate * (1 - rate), 1e-12) * rounds) + 1e-9
    worst = max(abs(count - rate * rounds) for count in counts.values())
    assert worst <= tolerance, (
        f"{selection} draws someone {worst / rounds:.3f} more or less often than {rate}"
    )


def check_row_denoiser(clean: RowDenoiser) -> None:
    """The matrix keeps its shape and stays finite; unless ordered, permuting clients permutes rows."""

    @given(st.integers(2, 6), _SEED)
    def keeps_shape_and_order(size: int, seed: PublicSeed) -> None:
        rows = _rows(size, seed)
        cleaned, _, _ = clean(clean.start(TERMS, LAYOUT), rows, 0)
        assert cleaned.shape == rows.matrix.shape
        assert bool(torch.isfinite(cleaned).all())
        if clean.ordered:
            return
        turn = torch.roll(torch.arange(size), 1)
        claims = {f"c{i}": rows.cohort.claims[f"c{int(j)}"] for i, j in enumerate(turn)}
        turned = Rows(
            matrix=rows.matrix[turn], origin=rows.origin, cohort=Cohort.of(claims), layout=LAYOUT
        )
        again, _, _ = clean(clean.start(TERMS, LAYOUT), turned, 0)
        assert torch.allclose(again, cleaned[turn], atol=1e-4), (
            f"{clean} depends on the order of clients"
        )

    _always(keeps_shape_and_order)


def check_denoiser(denoise: Denoiser) -> None:
    """Pure, keeps the length, finite in gives finite out."""

    @given(_SEED)
    def tame(seed: PublicSeed) -> None:
        vector = torch.randn(LAYOUT.size, generator=seed.generator())
        before = vector.clone()
        place = Aggregate(
            vector=vector,
            model=torch.randn(LAYOUT.size, generator=seed.generator()),
            layout=LAYOUT,
            round=1,
        )
        state = denoise.start(TERMS, LAYOUT)
        once, _, _ = denoise(state, place)
        assert once.shape == vector.shape
        assert bool(torch.isfinite(once).all())
        assert torch.equal(vector, before), f"{denoise} changed its argument"
        assert torch.equal(once, denoise(state, place)[0]), f"{denoise} is not pure"

    _always(tame)


def check_local_work(local: LocalWork) -> None:
    """Phases are pure, and the bill is exactly what their own sampler says they release."""
    for examples in (5, 40):
        participant = Participant(
            examples=examples,
            client_settings=ClientSettings(),
            budget=Budget(epsilon=2.0, delta=1e-3),
        )
        phases = local.phases(TERMS, participant)
        assert phases == local.phases(TERMS, participant), f"{local} plans differently each time"
        assert all(phase.steps >= 1 for phase in phases)
        exposure = local.exposure(phases, examples, LAYOUT.size)
        assert exposure.unit is local.unit
        assert exposure.finite == local.private, (
            f"{local} says private = {local.private}, its exposure says otherwise"
        )
        if exposure.paid:
            written = tuple(
                sampler(p, examples).event(p.noise_multiplier, p.steps, LAYOUT.size) for p in phases
            )
            assert exposure.paid == written, f"{local} bills something else than it does"


def check_engine(engine: Engine, *, tolerance: float = 5e-5) -> None:
    """An engine agrees with ``one_by_one`` in relative error of the update, and its blocks cover
    everyone once.
    """
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    layout = Layout.of_module(model)
    start = layout.read(model)

    def jobs() -> list[Job]:
        made = []
        for i, (batch, steps, lr) in enumerate(
            [(4, 3, 0.1), (4, 3, 0.5), (7, 2, 0.3), (50, 3, 0.2)]
        ):
            generator = PublicSeed(i).generator()
            phase = Phase(
                steps=steps,
                batch_size=batch,
                sampling="poisson",
                lr=lr,
                clip=0.5 + 0.1 * i,
                noise_multiplier=0.1 * i,
            )
            made.append(
                Job(
                    client=f"c{i}",
                    start=start,
                    phases=(phase,),
                    features=torch.randn(20, 6, generator=generator),
                    labels=torch.randint(0, 3, (20,), generator=generator),
                    rng=SecretRng.simulated(PublicSeed(100 + i)),
                )
            )
        return made

    plans = [job.phases for job in jobs()]
    covered = sorted(i for block in engine.blocks(plans) for i in block)
    assert covered == list(range(len(plans))), (
        f"{engine} leaves someone out, or takes someone twice"
    )
    for mine, oracle in zip(
        engine.run(model, layout, jobs()), OneByOne().run(model, layout, jobs()), strict=True
    ):
        error = float((mine - oracle).norm() / (oracle - start).norm())
        assert error < tolerance, f"{engine} is {error:.2e} off"
