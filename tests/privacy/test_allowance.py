"""The remembered answers are those of asking the accountant every time."""

from __future__ import annotations

import pytest

from dpfl.core.types import Adjacency
from dpfl.privacy import allowance as module
from dpfl.privacy.accountant import spend, within
from dpfl.privacy.allowance import Allowance
from dpfl.privacy.events import Event

DELTA = 1e-5
MECHANISM = Event(noise_multiplier=12.0)
REST = (
    Event(noise_multiplier=30.0, steps=4),
    Event(noise_multiplier=9.0, sampling="poisson", sampling_rate=0.3, steps=5),
)
ADD_REMOVE = Adjacency.ADD_REMOVE


def cost(rest: tuple[Event, ...], mechanism: Event, steps: int, adjacency: Adjacency = ADD_REMOVE) -> float:
    return spend((*rest, mechanism.times(steps)), DELTA, adjacency=adjacency).epsilon


def limit_after(rest: tuple[Event, ...], mechanism: Event, steps: int, adjacency: Adjacency = ADD_REMOVE) -> float:
    """A limit that ``steps`` of the mechanism keep and one more breaks."""
    return (cost(rest, mechanism, steps, adjacency) + cost(rest, mechanism, steps + 1, adjacency)) / 2


@pytest.mark.parametrize("horizon", [1, 5, 100])
@pytest.mark.parametrize("rest", [(), REST], ids=["alone", "on top of a rest"])
@pytest.mark.parametrize("order", ["upwards", "downwards", "at once"])
def test_the_answer_is_that_of_brute_force_around_the_limit(rest: tuple[Event, ...], horizon: int, order: str) -> None:
    last = 13
    limit = limit_after(rest, MECHANISM, last)
    asked = list(range(last - 4, last + 5))
    if order == "downwards":
        asked.reverse()
    allowance = Allowance()
    for total in asked:
        memory = Allowance() if order == "at once" else allowance
        past = (*rest, MECHANISM.times(total - 1))
        expected = within((*rest, MECHANISM.times(total)), limit, DELTA, adjacency=ADD_REMOVE)
        assert expected == (total <= last)
        found = memory.fits(past, (MECHANISM,), limit, DELTA, adjacency=ADD_REMOVE, horizon=horizon)
        assert found == expected


@pytest.mark.parametrize("horizon", [1, 5, 100])
@pytest.mark.parametrize("adjacency", [ADD_REMOVE, Adjacency.REPLACE_ONE])
def test_a_run_from_the_first_round_stops_exactly_at_the_limit(horizon: int, adjacency: Adjacency) -> None:
    limit = limit_after((), MECHANISM, 7, adjacency)
    allowance = Allowance()
    past: list[Event] = []
    while allowance.fits(past, (MECHANISM,), limit, DELTA, adjacency=adjacency, horizon=horizon):
        past.append(MECHANISM)
        assert len(past) < 50
    assert len(past) == 7


@pytest.mark.parametrize("steps", [3, 10])
@pytest.mark.parametrize("horizon", [1, 4, 100])
def test_rounds_of_many_steps_are_judged_whole(steps: int, horizon: int) -> None:
    """A round is all its steps or none: the limit may fall in the middle of one."""
    limit = limit_after((), MECHANISM, 25)
    allowance = Allowance()
    answers = [
        allowance.fits(
            (MECHANISM.times(done * steps),),
            (MECHANISM.times(steps),),
            limit,
            DELTA,
            adjacency=ADD_REMOVE,
            horizon=horizon,
        )
        for done in range(10)
    ]
    assert answers == [(done + 1) * steps <= 25 for done in range(10)]


def test_another_limit_delta_rest_or_adjacency_is_another_question() -> None:
    allowance = Allowance()
    limit = limit_after((), MECHANISM, 7)
    past = (MECHANISM.times(6),)

    def fits(history: tuple[Event, ...], at: float, delta: float, adjacency: Adjacency) -> bool:
        return allowance.fits(history, (MECHANISM,), at, delta, adjacency=adjacency)

    assert fits(past, limit, DELTA, ADD_REMOVE)
    assert not fits(past, limit * 0.9, DELTA, ADD_REMOVE)
    assert not fits(past, limit, DELTA / 10, ADD_REMOVE)
    assert not fits((*past, *REST), limit, DELTA, ADD_REMOVE)
    assert not fits(past, limit, DELTA, Adjacency.REPLACE_ONE)
    assert fits(past, limit, DELTA, ADD_REMOVE)


def test_a_rest_that_grows_between_questions_is_noticed() -> None:
    """Another run on the same ledger spends too."""
    allowance = Allowance()
    limit = limit_after((), MECHANISM, 10)
    assert allowance.fits((MECHANISM.times(4),), (MECHANISM,), limit, DELTA, adjacency=ADD_REMOVE, horizon=5)
    big = Event(noise_multiplier=6.0, steps=2)  # as much as eight of ours
    assert not allowance.fits((MECHANISM.times(4), big), (MECHANISM,), limit, DELTA, adjacency=ADD_REMOVE, horizon=5)


def test_several_mechanisms_at_once_are_judged_together() -> None:
    other = Event(noise_multiplier=10.0)
    limit = limit_after((other,), MECHANISM, 5)
    allowance = Allowance()
    for steps, expected in ((4, True), (5, True), (6, False)):
        more = (MECHANISM.times(steps), other)
        assert allowance.fits((), more, limit, DELTA, adjacency=ADD_REMOVE) == expected


def test_nothing_on_top_of_nothing_always_fits() -> None:
    assert Allowance().fits((), (), 1e-12, DELTA, adjacency=ADD_REMOVE)


def test_no_noise_never_fits() -> None:
    bare = Event(noise_multiplier=0.0)
    for horizon in (1, 5, 100):
        assert not Allowance().fits((), (bare,), 1e9, DELTA, adjacency=ADD_REMOVE, horizon=horizon)
        assert not Allowance().fits((bare,), (MECHANISM,), 1e9, DELTA, adjacency=ADD_REMOVE, horizon=horizon)


def test_failing_clips_that_add_up_end_the_run() -> None:
    fragile = Event(noise_multiplier=100.0, failure=1e-6)
    allowance = Allowance()
    answers = [
        allowance.fits((fragile.times(done),), (fragile,), 5.0, DELTA, adjacency=ADD_REMOVE, horizon=20)
        for done in range(12)
    ]
    assert answers == [True] * 9 + [False] * 3


@pytest.mark.parametrize(("planned", "most"), [(40, 1), (400, 12)])
def test_a_run_is_settled_by_a_handful_of_evaluations(monkeypatch: pytest.MonkeyPatch, planned: int, most: int) -> None:
    """Forty planned rounds fit: one evaluation. Of four hundred only fifty do: a bisection, not fifty evaluations."""
    asked = []

    def counted(history: tuple[Event, ...], limit: float, delta: float, *, adjacency: Adjacency) -> bool:
        asked.append(history)
        return within(history, limit, delta, adjacency=adjacency)

    limit = limit_after((), MECHANISM, 50)
    monkeypatch.setattr(module, "within", counted)
    allowance = Allowance()
    done = 0
    while done < planned and allowance.fits(
        (MECHANISM.times(done),), (MECHANISM,), limit, DELTA, adjacency=ADD_REMOVE, horizon=planned - done
    ):
        done += 1
    assert done == min(planned, 50)
    assert len(asked) <= most
