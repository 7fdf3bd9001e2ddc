"""Whether one more round fits a budget, asked every round and answered by a handful of evaluations in all."""

from __future__ import annotations

from collections.abc import Iterable

from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import within
from dpfl.privacy.events import Event, History, merged

_Key = tuple[History, Event, float, float, Adjacency]


class Allowance:
    """Remembers, for a mechanism on top of a fixed rest, how many steps are known to fit and how many not to.

    Epsilon grows with every step, so two numbers decide all further questions between them. ``horizon`` says how many
    more rounds are planned: if they all fit, one evaluation settles the run.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, tuple[int, int | None]] = {}

    def fits(
        self,
        history: Iterable[Event],
        more: Iterable[Event],
        limit: float,
        delta: float,
        *,
        adjacency: Adjacency,
        horizon: int = 1,
    ) -> bool:
        """Whether ``history`` followed by ``more`` stays within ``limit`` at ``delta``."""
        addition = merged(more)
        everything = merged([*history, *addition])
        if not everything:
            return True
        if len(addition) != 1:
            return within(everything, limit, delta, adjacency=adjacency)
        mechanism, added = addition[0].times(1), addition[0].steps
        rest = tuple(event for event in everything if event.times(1) != mechanism)
        asked = next(event.steps for event in everything if event.times(1) == mechanism)
        key = (rest, mechanism, limit, delta, adjacency)

        def good(steps: int) -> bool:
            return within((*rest, mechanism.times(steps)), limit, delta, adjacency=adjacency)

        fits, fails = self._known.get(key, (0, None))
        if fails is None and asked > fits:
            far = asked + max(horizon - 1, 0) * added
            if good(far):
                fits = far
            else:
                fails = far
        while fits < asked and (fails is None or fails > asked):
            # The answer lies strictly between: try the middle of what is open, in whole rounds from the question.
            middle = asked + ((fails - asked) // (2 * added)) * added if fails is not None else asked
            if good(middle):
                fits = middle
            else:
                fails = middle
        self._known[key] = (fits, fails)
        return asked <= fits
