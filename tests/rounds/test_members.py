from __future__ import annotations

import math

import numpy as np
import pytest

from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Budget, Claims, ClientSettings, Observer, Unit
from dpfl.data.federation import Federation
from dpfl.rounds.members import Member, check_budget, honest_members

EPSILONS = {"a": 0.5, "b": 3.0}
FEDERATION = Federation.from_arrays(
    {client: (np.zeros((10, 2)), np.arange(10) % 2) for client in EPSILONS},
    budgets={client: Budget(epsilon=epsilon, delta=1e-5) for client, epsilon in EPSILONS.items()},
    client_settings={"b": ClientSettings(lr=0.3)},
    classes=2,
)


def member(budget: Budget | None) -> Member:
    federation = Federation.from_arrays(
        {"a": (np.zeros((10, 2)), np.zeros(10))}, budgets={"a": budget} if budget else {}
    )
    return honest_members(federation)["a"]


def test_honest_members_claim_what_they_enforce_and_hold() -> None:
    for client, person in honest_members(FEDERATION).items():
        assert person.claims == Claims(epsilon=EPSILONS[client], delta=1e-5, examples=8)
        assert person.participant.budget == Budget(epsilon=EPSILONS[client], delta=1e-5)
        assert person.participant.examples == 8
    assert honest_members(FEDERATION)["b"].participant.client_settings.lr == 0.3


@pytest.mark.parametrize("lie", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_a_claim_never_changes_the_budget_or_the_records_that_are_billed(lie: float) -> None:
    honest = honest_members(FEDERATION)
    misreports = honest_members(FEDERATION, {"a": Claims(epsilon=lie, delta=0.9, examples=10**9)})
    assert misreports["a"].budget == honest["a"].budget
    assert misreports["a"].participant == honest["a"].participant
    assert misreports["a"].claims.examples == 10**9
    assert misreports["b"] == honest["b"]


def test_a_member_without_a_budget_claims_that_it_asks_for_nothing() -> None:
    person = member(None)
    assert person.budget is None
    assert person.claims == Claims(epsilon=math.inf, delta=0.0, examples=8)


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("asked", [None, *Unit])
def test_a_budget_for_another_unit_is_refused(asked: Unit | None, unit: Unit) -> None:
    person = member(Budget(epsilon=1.0, delta=1e-5, unit=asked))
    if asked in (None, unit):
        check_budget(person, unit=unit, observer=Observer.SERVER)
    else:
        with pytest.raises(
            ConfigurationError,
            match=f"budget of 'a': is per {asked}, but the method protects a {unit}",
        ):
            check_budget(person, unit=unit, observer=Observer.SERVER)


# Who hides from the server hides from the world, which sees no more; never the reverse.
COVERED = {
    (Observer.SERVER, Observer.SERVER),
    (Observer.WORLD, Observer.SERVER),
    (Observer.WORLD, Observer.WORLD),
}


@pytest.mark.parametrize("offered", list(Observer))
@pytest.mark.parametrize("asked", [Observer.SERVER, Observer.WORLD])
def test_a_budget_against_someone_the_method_does_not_hide_from_is_refused(
    asked: Observer, offered: Observer
) -> None:
    person = member(Budget(epsilon=1.0, delta=1e-5, observer=asked))
    if (asked, offered) in COVERED:
        check_budget(person, unit=Unit.RECORD, observer=offered)
    else:
        with pytest.raises(ConfigurationError, match=f"is against the {asked}"):
            check_budget(person, unit=Unit.RECORD, observer=offered)


def test_a_member_without_a_budget_has_nothing_to_refuse() -> None:
    check_budget(member(None), unit=Unit.RECORD, observer=Observer.NOBODY)
