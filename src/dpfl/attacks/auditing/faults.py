"""Deliberate faults: positive controls that an audit must catch.

Each fault breaks the code, or overstates the claim, as real software has done. The method, its
settings and the tests stay the same, so how often a fault is caught says what a clean audit is
worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from dpfl.attacks.auditing.audit import MakeGames, Misstate, Progress, audit_lines
from dpfl.attacks.auditing.canaries import Game
from dpfl.attacks.auditing.claims import Claim
from dpfl.attacks.auditing.plan import Audit, games
from dpfl.attacks.auditing.result import AuditLine, ControlResult
from dpfl.attacks.observation import Transcript
from dpfl.core import grid_noise, random
from dpfl.core.types import Budget, Observer, Plain
from dpfl.numerics import clipping
from dpfl.plugs.base import Participant
from dpfl.plugs.selection import FixedCohort
from dpfl.rounds import Agreement
from dpfl.strategy.method import Method

_ENGINES = ("one_by_one", "ghost_clipping", "private_stacks", "full_batches")


def scaled_noise(factor: float) -> AbstractContextManager[Any]:
    """All noise is this many times what it should be."""
    original = grid_noise.fill_rows

    def fill(sources: Sequence[grid_noise.GridNoise], out: np.ndarray) -> np.ndarray:
        np.rint(original(sources, out) * np.float32(factor), out=out)
        return out

    return patch.object(grid_noise, "fill_rows", fill)


def one_key() -> AbstractContextManager[Any]:
    """Every generator has the same key: noise repeats from round to round and run to run."""
    return patch.object(random.SecretRng, "_own_key", lambda rng: bytes(32))


def float_noise() -> AbstractContextManager[Any]:
    """Noise is computed in single precision, and then added."""
    from dpfl.testing.methods import float_noise

    return float_noise()


@contextmanager
def layers_apart() -> Iterator[None]:
    """Every layer is clipped on its own, to the whole clip."""

    def factors(
        squares: Mapping[str, Tensor], whole: Tensor, bound: float | Tensor, how: str, layers: int
    ) -> dict[str, Tensor]:
        return {name: clipping.clip_factor(part.sqrt(), bound) for name, part in squares.items()}

    with ExitStack() as patches:
        for name in _ENGINES:
            patches.enter_context(patch(f"dpfl.engine.{name}.layer_factors", factors))
        yield


def quiet_releases() -> AbstractContextManager[Any]:
    """Releases before round one have a tenth of their noise, as if nobody had planned them."""
    original = Agreement.release_noise

    def noise(agreement: Agreement, round_: int, participant: Participant) -> float:
        return original(agreement, round_, participant) / 10

    return patch.object(Agreement, "release_noise", noise)


def rounds_alone(game: Game, seen: Transcript) -> Claim:
    """Claim what the rounds cost, without the releases before them."""
    agreement = seen.agreement
    participant = seen.participant(game.clients[0])
    cost = agreement.plan(game.observer, participant).of_round
    return replace(game.claim(seen), history=cost.times(agreement.terms.participations))


def as_the_world(game: Game, seen: Transcript) -> Claim:
    """Claim against the server what holds against the world, which does not see who was drawn."""
    return game.claim(seen, Observer.WORLD)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and to which methods it can be done.

    ``apply`` breaks the code, ``misstate`` overstates the claim, ``change`` fits the audit to it;
    ``observers`` are the adversaries whose view is looked at, if not those of the method.
    ``simulated`` is whether it takes a simulation.
    """

    name: str
    about: str
    apply: Callable[[], AbstractContextManager[Any]] = nullcontext
    misstate: Misstate | None = None
    fits: Callable[[Method, Audit], bool] = lambda method, how: True
    change: Callable[[Audit], Audit] = lambda how: how
    observers: Sequence[Observer] = field(default_factory=tuple)
    simulated: bool = False


def _clips_layers(method: Method, how: Audit) -> bool:
    return "clipping" in method.settings and method.model is None


def _releases(method: Method, how: Audit) -> bool:
    return method.model is not None


def _draws(method: Method, how: Audit) -> bool:
    strategy = method.build(how.settings_of(method))
    rows = strategy.channel.sees_rows and strategy.personal is None
    return "selection" in method.settings and strategy.observer is Observer.WORLD and rows


def _changed(settings: Plain, **more: Any) -> Callable[[Audit], Audit]:
    return lambda how: replace(how, settings={**how.settings, **settings}, **more)


FAULTS = (
    Fault(name="noise off", about="no noise is added", apply=lambda: scaled_noise(0.0)),
    Fault(name="half the noise", about="half the noise", apply=lambda: scaled_noise(0.5)),
    Fault(name="seed reused", about="one key for all noise, in every run", apply=one_key),
    Fault(name="float32 noise", about="noise with holes in its support", apply=float_noise),
    Fault(
        name="clipping per layer",
        about="each of 16 layers is clipped to the whole clip",
        apply=layers_apart,
        fits=_clips_layers,
        change=_changed(probe="split", engine="one_by_one", settings={"clipping": "per_layer"}),
        simulated=True,
    ),
    Fault(
        name="unaccounted release",
        about="statistics before round one have a tenth of their noise, and are not charged",
        apply=quiet_releases,
        misstate=rounds_alone,
        fits=_releases,
    ),
    Fault(
        name="amplification",
        about="the secrecy of the draw is claimed against the server, which draws",
        misstate=as_the_world,
        fits=_draws,
        change=_changed(
            budget=Budget(epsilon=1.0, delta=1e-5), settings={"selection": FixedCohort(size=16)}
        ),
        observers=(Observer.SERVER,),
        simulated=True,
    ),
)
"""What controls do, one after the other."""


def caught_in(
    method: Method, how: Audit, runs: int, progress: Progress, make: MakeGames = games
) -> list[ControlResult]:
    """Put every fault that fits into a method, ``runs`` times, and count how often it is caught."""
    found = []
    for fault in FAULTS:
        if not fault.fits(method, how) or (fault.simulated and make is not games):
            continue
        own = fault.change(how)
        by = Counter[str]()
        caught = 0
        for number in range(runs):
            progress(f"{method.name}: {fault.name}", number, runs)
            seed = None if own.seed is None else own.seed + number
            lines = audit_lines(
                method,
                replace(own, seed=seed, coins=own.coins + number, readings=own.readings[:1]),
                misstate=fault.misstate,
                fault=fault.apply,
                observers=fault.observers,
                make=make,
            )
            tests = {test for line in lines for test in _caught_by(line)}
            by.update(tests)
            caught += bool(tests)
        result = ControlResult(
            method=method.name,
            fault=fault.name,
            about=fault.about,
            runs=runs,
            caught=caught,
            by=dict(by),
        )
        found.append(result)
    return found


def _caught_by(line: AuditLine) -> list[str]:
    """The tests that refute a line's claim."""
    found = [bound.test for bound in line.bounds if bound.refutes]
    return [*found, *["support"] * line.support.startswith("broken")]
