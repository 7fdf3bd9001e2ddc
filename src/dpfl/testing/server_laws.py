"""Laws of channels and of what the server does: weights, denoisers, central noise, steps."""

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Aggregate, Claims, Cohort, PlugState, Rows, Unit
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel, Summed
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.plugs.step import Step
from dpfl.plugs.weights import Weights
from dpfl.privacy.exposure import Exposure
from dpfl.testing.fixtures import CLIENT, LAYOUT, SEED, TERMS, always, cohorts, has_std, well_formed

_EPSILONS = (0.0, -1.0, float("nan"), 1e9, float("inf"), 1.0)
FALSE_CLAIMS = {
    f"c{i}": Claims(epsilon=epsilon, delta=1e-5, examples=10) for i, epsilon in enumerate(_EPSILONS)
}


def _rows(cohort: Cohort, seed: PublicSeed) -> Rows:
    matrix = torch.randn(len(cohort), LAYOUT.size, generator=seed.generator())
    origin = torch.zeros(LAYOUT.size)
    return Rows(matrix=matrix, origin=origin, cohort=cohort, layout=LAYOUT)


def _turned(rows: Rows) -> tuple[Rows, Tensor]:
    """The same rows with every client one place further, and who is where."""
    turn = torch.roll(torch.arange(len(rows.cohort)), 1)
    claims = {f"c{i}": rows.cohort.claims[f"c{int(j)}"] for i, j in enumerate(turn)}
    return replace(rows, matrix=rows.matrix[turn], cohort=Cohort.of(claims)), turn


def check_channel(channel: Channel) -> None:
    """Check a channel that adds no noise of its own.

    One that ``sees_rows`` delivers each message as it was sent, any other the sum of the messages
    that it says are in it. What leaves a client is within the bound that ``exposure`` promises. No
    more noise is promised than the shares carry that must arrive and are not the colluders'.

    >>> from dpfl.plugs.channels import Digital
    >>> check_channel(Digital())
    """
    dropouts = channel.tolerated_dropouts
    colluders = channel.colluders
    fewest = 1 + max(channel.least(1), colluders + 2 * dropouts)

    @always(st.integers(fewest, fewest + 5), SEED)
    def delivers(size: int, seed: PublicSeed) -> None:
        rows = torch.randn(size, 5, generator=seed.generator())
        messages = {f"c{i}": row for i, row in enumerate(rows)}
        promised = channel.exposure(Exposure(unit=Unit.CLIENT, bound=float(rows[0].norm())), size)
        sent = channel.send(rows[0], {}, CLIENT, SecretRng.simulated(seed)).norm()
        kept = promised.noise == 0 and sent <= promised.bound * (1 + 1e-6)
        assert kept, f"{channel} promised {promised}, and sent a norm of {sent}"
        noise = channel.exposure(Exposure(unit=Unit.CLIENT, bound=1.0, noise=1.0), size).noise
        shares = 1 if channel.sees_rows else size - dropouts - colluders
        assert noise <= math.sqrt(shares), f"{channel} promised noise of {noise} in {shares} shares"
        arrived = channel.deliver(messages, {}, seed, SecretRng.simulated(seed))
        if channel.sees_rows:
            assert isinstance(arrived, dict), f"{channel} says it delivers rows"
            same = all(torch.equal(arrived[client], messages[client]) for client in arrived)
            assert same, f"{channel} changed a message"
        else:
            assert isinstance(arrived, Summed), f"{channel} says it delivers sums only"
            total = sum((messages[client] for client in arrived.ids), torch.zeros(5))
            same = torch.allclose(arrived.vector.to(total.dtype), total, atol=1e-5)
            assert same, f"{channel} delivers something else than the sum"


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
        found, state, metrics = weights(weights.start(TERMS, LAYOUT), rows, 0)
        well_formed(weights, found, (len(rows.cohort),))
        assert bool((found >= 0).all()), f"{weights} gave {found}"
        assert isinstance(state, dict), f"{weights} returns no state"
        assert isinstance(metrics, dict), f"{weights} returns no metrics"
        return found

    @always(cohorts(1, 8), SEED)
    def sums_to_one(cohort: Cohort, seed: PublicSeed) -> None:
        found = weigh(_rows(cohort, seed))
        if weights.constant:
            same = torch.full((len(cohort),), weights.value(TERMS))
            assert torch.allclose(found, same), f"{weights} are not constant"
        else:
            assert abs(float(found.sum()) - 1) < 1e-5, f"{weights} sum to {float(found.sum())}"

    @always(cohorts(3, 6), SEED)
    def permutes_with_clients(cohort: Cohort, seed: PublicSeed) -> None:
        rows = _rows(cohort, seed)
        turned, turn = _turned(rows)
        same = torch.allclose(weigh(turned), weigh(rows)[turn], atol=1e-3)
        assert same, f"{weights} depend on the order"

    @always(st.just(Cohort.of(FALSE_CLAIMS)), SEED)
    def false_claims_stay_finite(cohort: Cohort, seed: PublicSeed) -> None:
        weigh(_rows(cohort, seed))


def check_row_denoiser(clean: RowDenoiser) -> None:
    """Check a row denoiser.

    The matrix keeps its shape, and finite rows stay finite. Unless the denoiser says that it is
    ``ordered``, permuting clients permutes rows.
    """
    clean = clean.resolve(TERMS)

    @always(cohorts(2, 6), SEED)
    def keeps_shape_and_order(cohort: Cohort, seed: PublicSeed) -> None:
        rows = _rows(cohort, seed)
        cleaned, _, _ = clean(clean.start(TERMS, LAYOUT), rows, 0)
        well_formed(clean, cleaned, rows.matrix.shape)
        if clean.ordered:
            return
        turned, turn = _turned(rows)
        public = tuple(f"c{i}" for i, j in enumerate(turn) if f"c{int(j)}" in TERMS.public)
        start = clean.start(replace(TERMS, public=public), LAYOUT)
        again, _, _ = clean(start, turned, 0)
        assert torch.allclose(again, cleaned[turn], atol=1e-4), f"{clean} depends on the order"


def check_central_noise(noise: CentralNoise, *, bound: float = 0.7) -> None:
    """Check central noise.

    At a sum of zero, what is added has the standard deviation that ``std`` states for contributions
    of at most ``bound``, within 2 %. It comes from the generator that is handed in and from nowhere
    else. The length of the sum stays.

    >>> check_central_noise(CentralNoise(noise_multiplier=2.0))
    """
    noise = noise.resolve(TERMS)

    def noisy(numbers: int) -> Tensor:
        zero = torch.zeros(numbers, dtype=torch.float64)
        rng = SecretRng.simulated(PublicSeed(7))
        found, _, _ = noise.add(noise.start(TERMS, LAYOUT), zero, bound, rng)
        well_formed(noise, found, zero.shape)
        return found

    has_std(noise, noisy(200_000), noise.std(bound))
    same = torch.equal(noisy(50), noisy(50))
    assert same, f"{noise} draws from somewhere else than its generator"


def check_denoiser(denoise: Denoiser) -> None:
    """Check a denoiser.

    It is pure: equal arguments give equal results, and neither the aggregate nor the state that is
    handed in changes. It keeps the length, and finite numbers stay finite. One that says ``linear``
    is: what it leaves of the noise is reported by applying it to the noise alone.
    """
    denoise = denoise.resolve(TERMS)

    @always(SEED)
    def tame(seed: PublicSeed) -> None:
        aggregate = _aggregate(seed)
        state = denoise.start(TERMS, LAYOUT)
        one = _pure(denoise, state, aggregate)
        if denoise.linear:
            two = denoise(state, replace(aggregate, vector=2 * aggregate.vector))[0]
            assert torch.allclose(two, 2 * one, atol=1e-4), f"{denoise} says linear, but is not"


def check_step(step: Step) -> None:
    """Check a step, over several rounds.

    It is pure, keeps the length, and finite numbers stay finite. Its state keeps names and shapes
    from round to round, so that it can be checkpointed and resumed. The model that it publishes has
    the shape of the model, and is finite.

    >>> from dpfl.plugs.step import ServerSgd
    >>> check_step(ServerSgd(momentum=0.9))
    """
    step = step.resolve(TERMS)

    @always(SEED)
    def tame(seed: PublicSeed) -> None:
        state = step.start(TERMS, LAYOUT)
        aggregate = _aggregate(seed)
        shapes = {name: tensor.shape for name, tensor in state.items()}
        for round_ in range(4):
            aggregate = replace(aggregate, round=round_)
            _pure(step, state, aggregate)
            model, state, _ = step(state, aggregate)
            assert {k: t.shape for k, t in state.items()} == shapes, f"{step} changed its state"
            well_formed(step, step.published(state, model), model.shape)
            aggregate = replace(aggregate, model=model)


def _aggregate(seed: PublicSeed) -> Aggregate:
    vector, model = torch.randn(2, LAYOUT.size, generator=seed.generator())
    return Aggregate(vector=vector, model=model, layout=LAYOUT, round=1)


def _pure(plug: Denoiser | Step, state: PlugState, aggregate: Aggregate) -> Tensor:
    """What a plug makes of an aggregate, twice, leaving its arguments as they were."""

    def given() -> list[Tensor]:
        return [aggregate.vector, aggregate.model, *state.values()]

    before = [tensor.clone() for tensor in given()]
    once, again = (plug(state, aggregate)[0] for _ in range(2))
    well_formed(plug, once, aggregate.vector.shape)
    assert torch.equal(once, again), f"{plug} is not pure"
    kept = len(given()) == len(before) and all(map(torch.equal, given(), before))
    assert kept, f"{plug} changed its arguments"
    return once
