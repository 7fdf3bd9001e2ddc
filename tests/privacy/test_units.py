"""The unit of the data has a word of its own, and accounts of two words never mix."""

import pickle

import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import LedgerError
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.methods import make_strategy
from dpfl.privacy.costs import PrivacyCost, PrivacyPlan, speak_of, unit_of
from dpfl.privacy.events import Event
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.statement import statement

SERVER, PATIENT = Observer.SERVER, Unit("patient")
WORDS = st.from_regex(r"[a-z]+([ -][a-z]+)*", fullmatch=True).filter(
    lambda word: word not in ("record", "client", "site") and len(word) <= 60
)
SETTINGS = {"clip": 1.0, "lr": 0.1, "batch_size": 4, "local_steps": 1}


def cost(unit: Unit) -> PrivacyCost:
    events = (Event(noise_multiplier=5.0),)
    return PrivacyCost(unit=unit, adjacency=Adjacency.ZERO_OUT, events=events)


def plan(unit: Unit) -> PrivacyPlan:
    return PrivacyPlan(account="north", observer=SERVER, cost=cost(unit), releases=1)


def book(*runs: str) -> Ledger:
    ledger = Ledger.create(":memory:", "book")
    for run in runs:
        ledger.register(run, seeded=False, title=run)
    return ledger


@given(WORDS)
def test_a_word_is_one_unit_wherever_it_comes_from(word: str) -> None:
    unit = Unit(word)
    assert unit is Unit(word) is pickle.loads(pickle.dumps(unit))
    assert unit == word and str(unit) == word and unit.of_data
    assert PrivacyCost.from_json(cost(unit).to_json()) == cost(unit)
    assert list(Unit) == [Unit.RECORD, Unit.CLIENT]


@pytest.mark.parametrize(
    "word", ["", "Record", "site", "two  spaces", "p4tient", "a\nb", "a" * 61, 3, None]
)
def test_what_is_not_a_word_for_a_person_is_no_unit(word: object) -> None:
    with pytest.raises(ValueError):
        Unit(word)


def test_costs_of_two_words_do_not_speak_of_either() -> None:
    record, patient, client = cost(Unit.RECORD), cost(PATIENT), cost(Unit.CLIENT)
    assert speak_of([patient, client], PATIENT) and not speak_of([record], PATIENT)
    assert not speak_of([patient], Unit.RECORD) and not speak_of([patient], Unit.CLIENT)
    assert speak_of([patient], None) and not speak_of([record, patient], None)
    assert unit_of([client, patient]) is PATIENT and unit_of([client]) is Unit.CLIENT


def test_a_ledger_refuses_to_mix_records_and_persons() -> None:
    for first, second in ((Unit.RECORD, PATIENT), (PATIENT, Unit.RECORD), (PATIENT, Unit("child"))):
        ledger = book("one", "two")
        ledger.commit("one", [plan(first)])
        with pytest.raises(LedgerError, match=f"accounted per {first}, .* each {second}"):
            ledger.commit("two", [plan(second)])
        ledger.commit("two", [plan(Unit.CLIENT)])  # protects both
        line = statement(ledger, "north", SERVER, 1e-5)
        assert line is not None and line.unit == first and line.epsilon < float("inf")


def test_a_ledger_refuses_a_plan_beside_the_budget_of_another_word() -> None:
    ledger, budget = book("one"), Budget(epsilon=9.0, delta=1e-5)
    ledger.set_budgets({"north": budget}, unit=Unit.RECORD, observer=SERVER)
    with pytest.raises(LedgerError, match="accounted per record"):
        ledger.commit("one", [plan(PATIENT)])
    with pytest.raises(LedgerError, match=r"per record .* not .* per patient"):
        ledger.set_budgets({"north": budget}, unit=PATIENT, observer=SERVER)


def test_a_strategy_takes_the_word_of_its_data() -> None:
    strategy = make_strategy("weiavg", SETTINGS).protecting(PATIENT)
    assert str(strategy.promise).startswith("per patient,")
    assert not any("record" in one for one in strategy.assumptions)
    assert any("at several clients" in one for one in strategy.assumptions)
    by_client = make_strategy("udp_fedavg", {**SETTINGS})
    assert by_client.protecting(PATIENT) is by_client
