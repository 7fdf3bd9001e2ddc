"""Laws of what the server does: weights, row denoisers, central noise, denoisers, steps."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Aggregate, Claims, Cohort, PlugState, Rows
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.plugs.step import Step
from dpfl.plugs.weights import Weights
from dpfl.testing.fixtures import LAYOUT, SEED, TERMS, always, cohort_of, std_ratio

FALSE_CLAIMS = (0.0, -1.0, float("nan"), 1e9, float("inf"), 1.0)


def _rows(size: int, seed: PublicSeed) -> Rows:
    matrix = torch.randn(size, LAYOUT.size, generator=seed.generator())
    origin = torch.zeros(LAYOUT.size)
    return Rows(matrix=matrix, origin=origin, cohort=cohort_of(size), layout=LAYOUT)


def check_weights(weights: Weights) -> None:
    """Check weights.

    They are finite and non-negative, one for each client, also where claims are zero, negative,
    infinite or not numbers at all. Unless they are ``constant`` they sum to one. Constant ones
    equal the value that they promise, because a privacy cost may rest on it. Permuting clients
    permutes weights: nothing hangs on names or on the order of arrival.

    >>> from dpfl.plugs.weights import EpsilonWeights
    >>> check_weights(EpsilonWeights())
    """
    weights = weights.resolve(TERMS)

    def weigh(rows: Rows) -> Tensor:
        w, state, metrics = weights(weights.start(TERMS, LAYOUT), rows, 0)
        assert w.shape == (len(rows.cohort),), f"{weights} gave {tuple(w.shape)} weights"
        assert bool(torch.isfinite(w).all() & (w >= 0).all()), f"{weights} gave {w}"
        assert isinstance(state, dict)
        assert isinstance(metrics, dict)
        return w

    @given(st.integers(1, 8), SEED)
    def sums_to_one(size: int, seed: PublicSeed) -> None:
        w = weigh(_rows(size, seed))
        if weights.constant:
            same = torch.full((size,), weights.value(TERMS))
            assert torch.allclose(w, same), f"{weights} are not constant"
        else:
            assert abs(float(w.sum()) - 1) < 1e-5, f"{weights} sum to {float(w.sum())}"

    @given(st.integers(3, 6), SEED)
    def permutes_with_clients(size: int, seed: PublicSeed) -> None:
        rows = _rows(size, seed)
        turn = torch.roll(torch.arange(size), 1)
        w, turned = weigh(rows), weigh(_turned(rows, turn))
        assert torch.allclose(turned, w[turn], atol=1e-3), f"{weights} depend on the order"

    @given(SEED)
    def false_claims_stay_finite(seed: PublicSeed) -> None:
        pairs = enumerate(FALSE_CLAIMS)
        claims = {f"c{i}": Claims(epsilon=e, delta=1e-5, examples=10) for i, e in pairs}
        rows = _rows(len(claims), seed)
        cohort = Cohort.of(claims)
        weigh(Rows(matrix=rows.matrix, origin=rows.origin, cohort=cohort, layout=LAYOUT))

    always(sums_to_one)
    always(permutes_with_clients)
    always(false_claims_stay_finite)


def _turned(rows: Rows, turn: Tensor) -> Rows:
    claims = {f"c{i}": rows.cohort.claims[f"c{int(j)}"] for i, j in enumerate(turn)}
    return Rows(
        matrix=rows.matrix[turn], origin=rows.origin, cohort=Cohort.of(claims), layout=LAYOUT
    )


def check_row_denoiser(clean: RowDenoiser) -> None:
    """Check a row denoiser.

    The matrix keeps its shape, and finite rows stay finite. Unless the denoiser says that it is
    ``ordered``, permuting clients permutes rows.
    """
    clean = clean.resolve(TERMS)

    @given(st.integers(2, 6), SEED)
    def keeps_shape_and_order(size: int, seed: PublicSeed) -> None:
        rows = _rows(size, seed)
        cleaned, _, _ = clean(clean.start(TERMS, LAYOUT), rows, 0)
        assert cleaned.shape == rows.matrix.shape, f"{clean} changed the shape"
        assert bool(torch.isfinite(cleaned).all()), f"{clean} gave a non-finite row"
        if clean.ordered:
            return
        turn = torch.roll(torch.arange(size), 1)
        public = tuple(f"c{i}" for i, j in enumerate(turn) if f"c{int(j)}" in TERMS.public)
        start = clean.start(replace(TERMS, public=public), LAYOUT)
        again, _, _ = clean(start, _turned(rows, turn), 0)
        assert torch.allclose(again, cleaned[turn], atol=1e-4), f"{clean} depends on the order"

    always(keeps_shape_and_order)


def check_central_noise(noise: CentralNoise, *, bound: float = 0.7) -> None:
    """Check central noise.

    At a sum of zero, what is added has the standard deviation that ``std`` states for contributions
    of at most ``bound``, within 2 %. It comes from the generator that is handed in and from nowhere
    else. The length of the sum stays.

    >>> check_central_noise(CentralNoise(noise_multiplier=2.0))
    """
    noise = noise.resolve(TERMS)
    state, total = noise.start(TERMS, LAYOUT), torch.zeros(200_000, dtype=torch.float64)
    rng = SecretRng.simulated(PublicSeed(7))
    noisy, _, _ = noise.add(state, total, bound, rng)
    assert noisy.shape == total.shape, f"{noise} changed the length"
    std_ratio(noise, noisy, noise.std(bound))
    once, again = (
        noise.add(state, total[:50], bound, SecretRng.simulated(PublicSeed(8)))[0] for _ in "ab"
    )
    assert torch.equal(once, again), f"{noise} draws from somewhere else than its generator"


def check_denoiser(denoise: Denoiser) -> None:
    """Check a denoiser.

    It is pure: equal arguments give equal results, and neither the aggregate nor the state that is
    handed in changes. It keeps the length, and finite numbers stay finite. One that says ``linear``
    is: what it leaves of the noise is reported by applying it to the noise alone.
    """
    denoise = denoise.resolve(TERMS)
    state = denoise.start(TERMS, LAYOUT)

    @given(SEED)
    def tame(seed: PublicSeed) -> None:
        aggregate = _aggregate(seed)
        _check_pure(denoise, state, aggregate)
        if denoise.linear:
            twice = Aggregate(**{**vars(aggregate), "vector": 2 * aggregate.vector})
            one, two = denoise(state, aggregate)[0], denoise(state, twice)[0]
            assert torch.allclose(two, 2 * one, atol=1e-4), f"{denoise} says linear, but is not"

    always(tame)


def check_step(step: Step) -> None:
    """Check a step, over several rounds.

    It is pure, keeps the length, and finite numbers stay finite. Its state keeps names and shapes
    from round to round, so that it can be checkpointed and resumed. The model that it publishes has
    the shape of the model, and is finite.

    >>> from dpfl.plugs.step import ServerSgd
    >>> check_step(ServerSgd(momentum=0.9))
    """
    step = step.resolve(TERMS)

    @given(SEED)
    def tame(seed: PublicSeed) -> None:
        state = step.start(TERMS, LAYOUT)
        aggregate = _aggregate(seed)
        for round_ in range(4):
            aggregate = Aggregate(**{**vars(aggregate), "round": round_})
            _check_pure(step, state, aggregate)
            shapes = {name: tensor.shape for name, tensor in state.items()}
            model, state, _ = step(state, aggregate)
            assert {k: t.shape for k, t in state.items()} == shapes, f"{step} changed its state"
            published = step.published(state, model)
            good = published.shape == model.shape and bool(torch.isfinite(published).all())
            assert good, f"{step} publishes something else than a model"
            aggregate = Aggregate(**{**vars(aggregate), "model": model})

    always(tame)


def _aggregate(seed: PublicSeed) -> Aggregate:
    vector, model = torch.randn(2, LAYOUT.size, generator=seed.generator())
    return Aggregate(vector=vector, model=model, layout=LAYOUT, round=1)


def _check_pure(plug: Denoiser | Step, state: PlugState, aggregate: Aggregate) -> None:
    before = aggregate.vector.clone(), aggregate.model.clone()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    once = plug(state, aggregate)[0]
    assert once.shape == aggregate.vector.shape, f"{plug} changed the length"
    assert bool(torch.isfinite(once).all()), f"{plug} gave a non-finite number"
    same = torch.equal(aggregate.vector, before[0]) and torch.equal(aggregate.model, before[1])
    assert same, f"{plug} changed its argument"
    assert all(torch.equal(state[k], v) for k, v in kept.items()), f"{plug} changed its state"
    assert torch.equal(once, plug(state, aggregate)[0]), f"{plug} is not pure"
