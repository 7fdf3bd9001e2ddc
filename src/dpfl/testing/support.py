"""Laws about noise: the exact law of the sampler, and that nothing is released beside noisy
integers.

Tests of likelihood pass noise that has holes: values that noise alone can never produce prove that
something was added to it. :func:`check_releases` rules that out for a whole method. It plays a
round with one client's data, and again with the data of that client zeroed and the noise moved so
that every noisy integer q + X is the same. Then whatever is released must be the same, bit for bit:
uploads where the method protects against the server, the model where it protects against the world.
Noise added in floating point fails this (:func:`float_noise` is the positive control).
:func:`impossible` is the attack itself, on a single release.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core import grid_noise
from dpfl.core.grid import Grid, NoiseSource
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Observer
from dpfl.data.federation import Federation
from dpfl.engine import make_engine
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import (
    Run,
    Workshop,
    buffer_shapes,
    charging,
    client_round,
    close_round,
    enrol,
    first_state,
    open_round,
)
from dpfl.rounds.members import honest_members
from dpfl.strategy import Strategy

VICTIM = "c0"
_SHAPE = (8, 16)  # classes, features: 128 coordinates


# -- one release -----------------------------------------------------------------------------------


def impossible(
    released: Tensor, guess: Tensor, image: Callable[[Tensor], Tensor], *, whole: bool
) -> Tensor:
    """Which coordinates of a float32 release noise alone can never produce.

    The attacker knows how a release is computed from noise n alone (``image``), and about which n
    it would take (``guess``). ``whole``: n is an integer, otherwise any float32 number. Candidates
    are the guess and its neighbours.
    """
    found = torch.zeros_like(released, dtype=torch.bool)
    if whole:
        for away in range(-64, 65):
            found |= image(guess.round() + away) == released
        return ~found
    start = guess.to(torch.float32)
    for direction in (-math.inf, math.inf):
        near = start.clone()
        for _ in range(4):
            found |= image(near) == released
            near = torch.nextafter(near, torch.full_like(near, direction))
    return ~found


# -- a whole method --------------------------------------------------------------------------------


def check_releases(
    strategy: Strategy, engine: str = "one_by_one", model: nn.Module | None = None
) -> None:
    """Nothing that the method's adversary sees depends on a client's data but through noisy
    integers.

    ``model`` takes 16 inputs and gives 8 outputs; strategies with releases before round one need
    one that has their buffers.
    """
    recorded: list[Tensor] = []
    with _noisy_integers(recorded.append, None):
        present = _transcript(strategy, engine, model, zeroed=False)
    assert recorded, f"{strategy.name} draws no noise on a grid"
    script = iter(recorded)
    with _noisy_integers(lambda _: None, lambda: next(script)):
        absent = _transcript(strategy, engine, model, zeroed=True)
    assert next(script, None) is None, (
        f"{strategy.name} draws noise more or less often when a client's data is zeroed"
    )
    for what, bytes_present, bytes_absent in zip(
        ("uploads", "the model"), present, absent, strict=True
    ):
        assert bytes_present == bytes_absent, (
            f"{strategy.name}: {what} tell more of a client than noisy integers do"
        )


class _Rigged:
    """Hands out given noise in place of a generator's."""

    def __init__(self, noise: Tensor) -> None:
        self._noise = noise

    def grid_noise_(self, out: Tensor) -> Tensor:
        return out.copy_(self._noise.reshape(out.shape))


@contextmanager
def _noisy_integers(
    record: Callable[[Tensor], None], forced: Callable[[], Tensor] | None
) -> Iterator[None]:
    """Watch the noisy integers of every mechanism, or move the noise so that they are the given
    ones.
    """
    original = Grid.noised

    def noised(grid: Grid, vector: Tensor, rng: NoiseSource) -> Tensor:
        own = grid.integers(vector)
        if forced is None:
            noise = rng.grid_noise_(torch.empty(vector.numel())).view(vector.shape).double()
        else:
            wanted = forced()
            assert wanted.shape == vector.shape, "a release changes its length with a client's data"
            noise = wanted - own
        record(own + noise)
        return original(grid, vector, _Rigged(noise))

    Grid.noised = noised  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Grid.noised = original  # type: ignore[method-assign]


@contextmanager
def float_noise() -> Iterator[None]:
    """Replace noise on a grid by noise computed in single precision and then added: what the laws
    must catch.
    """
    original = Grid.noised

    def noised(grid: Grid, vector: Tensor, rng: NoiseSource) -> Tensor:
        noise = rng.grid_noise_(torch.empty(vector.numel())).view(vector.shape) / grid_noise.SCALE
        return (
            vector.to(torch.float32)
            + torch.tensor(grid.step * grid_noise.SCALE, dtype=torch.float32) * noise
        )

    Grid.noised = noised  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Grid.noised = original  # type: ignore[method-assign]


def _transcript(
    strategy: Strategy, engine: str, given: nn.Module | None, *, zeroed: bool
) -> tuple[list[bytes], bytes]:
    """Play all releases and one round, seeded; return the uploads (where the server is an
    adversary) and the next model with its public buffers.
    """
    torch.manual_seed(0)
    classes, features = _SHAPE
    usual = nn.Sequential(nn.Linear(features, 4, bias=False), nn.Linear(4, classes, bias=False))
    model = usual if given is None else copy.deepcopy(given)
    generator = PublicSeed(1).generator()
    arrays = {}
    for i in range(4):
        x, y = torch.randn(12, features, generator=generator), torch.arange(12) % classes
        arrays[f"c{i}"] = (x * (0.0 if zeroed and f"c{i}" == VICTIM else 1.0), y, x[:2], y[:2])
    federation = Federation.from_arrays(
        {name: tuple(np.asarray(part) for part in parts) for name, parts in arrays.items()},
        classes=classes,
        budgets={name: Budget(epsilon=2.0**i, delta=1e-5) for i, name in enumerate(arrays)},
    )
    members, layout = honest_members(federation), Layout.of_module(model)
    claims = {client: member.claims for client, member in members.items()}
    shapes = buffer_shapes(model, strategy.releases)
    agreement = enrol(strategy, claims, 1, layout, shapes)
    sent: list[bytes] = []
    with closing(Ledger.create(":memory:", "law")) as ledger:
        run = Run(name="law", ledger=ledger, seed=PublicSeed(2), public=PublicSeed(3))
        ledger.register(run.name, seeded=True, title=strategy.name)
        workshop = Workshop(
            agreement=agreement,
            run=run.name,
            engine=make_engine(engine),
            model=model,
            secret=lambda round_, client: run.secret("client", round_, client),
        )
        state, admit = first_state(agreement, layout.read(model)), charging(agreement, run)
        while state.round < 1:
            plan = open_round(agreement, state, run, lambda client: True)
            cohort = {client: members[client] for client in plan.cohort.ids}
            uplinks = client_round(workshop, plan.downloads, cohort, admit=admit)
            sent += [uplink.payload or b"" for uplink in uplinks if uplink.client == VICTIM]
            state, _ = close_round(agreement, state, plan, uplinks, run)
    seen = sent if strategy.observer is Observer.SERVER and strategy.channel.sees_rows else []
    public = [state.model, *(state.buffers[name] for name in sorted(state.buffers))]
    return seen, b"".join(tensor.numpy().tobytes() for tensor in public)


# -- the sampler -----------------------------------------------------------------------------------


def check_sampler() -> dict[int, float]:
    """The law of what the sampler really does against the ideal one, on every integer it can
    produce.

    Returns the largest |log ratio| within 2, 6 and 10 standard deviations, and under 0 the root of
    its mean square. The code's integer thresholds and its 53-bit acceptance are taken as they are;
    nothing is sampled.
    """
    wide, scale, cell = np.longdouble, grid_noise.SCALE, grid_noise.CELL
    shares = _cell_shares()
    inside = np.arange(cell)
    accepted = []
    for number, share in enumerate(shares):
        f, roof = grid_noise.rest(number * cell + inside), grid_noise.ROOFS[number]
        assert f.min() > 0, f"the fast path exceeds the ideal law in cell {number}"
        assert f.max() <= roof, f"the envelope is too low in cell {number}"
        odds = np.ceil(f / roof * 2.0**53).clip(0, 2.0**53).astype(wide) * wide(2) ** -53
        accepted.append(share * wide(2) ** -17 * odds)  # one of 2^16 places, one of two signs
    # Negative numbers are -1 - x: the same odds, one place further out.
    negative = [_rare_negative(number, share) for number, share in enumerate(shares)]
    mass = sum(part.sum() for part in accepted) + sum(part.sum() for part in negative)
    rare = 1 - wide(1) / 512
    limits = dict.fromkeys((2, 6, 10), 0.0)
    total, square = wide(0), wide(0)
    for number in range(len(shares)):
        for sign, drawn in ((1, accepted[number]), (-1, negative[number])):
            x = number * cell + inside if sign > 0 else -1 - (number * cell + inside)
            real = rare * grid_noise.fast(x).astype(wide) + (1 - rare) * drawn / mass
            total += real.sum()
            ideal = _ideal(x)
            ratios = np.log1p((real - ideal) / ideal)
            square += (ideal * ratios**2).sum()
            worst = float(np.abs(ratios).max())
            for limit in limits:
                if (number + 1) * cell <= limit * scale:
                    limits[limit] = max(limits[limit], worst)
    assert abs(float(total - 1)) < 1e-15, f"the law adds up to 1 + {float(total - 1)}"
    gap = (int(grid_noise.GAPS[0]) * 512 - 2**64) / 2**64
    assert abs(gap) < 2**-50, "a number is rare with another probability than 1 / 512"
    limits[0] = math.sqrt(float(square))
    # The surcharge: over 10^12 numbers log ratios of this size add up to less than 5e-8, but for
    # 1e-16 of probability.
    for limit, bound in ((0, 2.0**-50), (2, 2.0**-49), (6, 2.0**-42), (10, 2.0**-28)):
        assert limits[limit] <= bound, (
            f"log ratio {limits[limit]:.3g} within {limit} standard deviations"
        )
    return limits


def _rare_negative(number: int, share: np.longdouble) -> np.ndarray:
    x = -1 - (number * grid_noise.CELL + np.arange(grid_noise.CELL))
    f = grid_noise.rest(x)
    odds = np.ceil(f / grid_noise.ROOFS[number] * 2.0**53).clip(0, 2.0**53).astype(np.longdouble)
    drawn: np.ndarray = share * np.longdouble(2) ** -70 * odds
    return drawn


def _cell_shares() -> list[np.longdouble]:
    """How often the rare path proposes each cell, from the 64-bit thresholds themselves."""

    def steps(thresholds: np.ndarray, count: int) -> list[np.longdouble]:
        ends = [0, *(int(t) for t in thresholds), 2**64]
        return [np.longdouble(ends[i + 1] - ends[i]) / np.longdouble(2) ** 64 for i in range(count)]

    near = steps(grid_noise.NEAR_CELLS, grid_noise.NEAR + 1)
    far = steps(grid_noise.FAR_CELLS, grid_noise.CELLS - grid_noise.NEAR)
    return near[: grid_noise.NEAR] + [near[grid_noise.NEAR] * part for part in far]


def _ideal(x: np.ndarray) -> np.ndarray:
    """The law of round(N(0, SCALE^2)), with two terms of the series beyond the density."""
    wide, s = np.longdouble, np.longdouble(grid_noise.SCALE)
    t = np.square(x.astype(wide) / s)
    peak = 1 / (np.sqrt(2 * wide("3.14159265358979323846264338327950288")) * s)
    density: np.ndarray = (
        peak * np.exp(-t / 2) * (1 + (t - 1) / (24 * s * s) + (t * t - 6 * t + 3) / (1920 * s**4))
    )
    return density


__all__ = ["check_releases", "check_sampler", "float_noise", "impossible"]
