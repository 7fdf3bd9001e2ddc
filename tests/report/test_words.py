"""What a board member reads: true for a mathematician, and never smaller than it is."""

from __future__ import annotations

import html
import math
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from dpfl.core.types import Adjacency, Observer, Promise, Unit
from dpfl.privacy.accountant import shown
from dpfl.report import words
from dpfl.report.page import full_page
from dpfl.report.reading import of_folders
from dpfl.runs.folder import RunFolder

RECORD = Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER)
CLIENT = Promise(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, observer=Observer.WORLD)


def odds(sentence: str) -> Decimal:
    """The number that the sentence names, as a number."""
    found = re.search(
        r"is at most (?:10 to the (\d+)|([\d.]+(?:e\+\d+)?)) times as likely", sentence
    )
    assert found, sentence
    return Decimal(10) ** int(found[1]) if found[1] else Decimal(found[2])


@given(st.floats(min_value=1e-3, max_value=5000, allow_nan=False))
@example(9.21034)  # just below ten thousand
@example(9.3)
@example(710.0)
def test_odds_are_never_rounded_down_nor_far_up(epsilon: float) -> None:
    told, true = odds(words.meaning(RECORD, epsilon, 1e-5)), Decimal(epsilon).exp()
    assert told >= true
    assert told <= true * (Decimal("1.0101") if true < 9990 else Decimal(11))


@given(st.floats(min_value=0, max_value=1e-3, allow_nan=False))
@example(1e-12)
def test_not_even_tiny_odds_are_rounded_down(epsilon: float) -> None:
    assert odds(words.meaning(RECORD, epsilon, None)) >= Decimal(epsilon).exp()


@given(st.floats(min_value=0, max_value=5000, allow_nan=False))
def test_the_epsilon_of_the_sentence_is_never_below_the_epsilon(epsilon: float) -> None:
    said = re.match(r"An epsilon of ([\d.]+) means", words.meaning(RECORD, epsilon, 1e-5))
    assert said
    assert Decimal(said[1]) >= Decimal(epsilon)


@pytest.mark.parametrize("epsilon", [9.2100, 9.2103, 9.21034])
def test_odds_just_below_ten_thousand_are_a_number_people_can_read(epsilon: float) -> None:
    assert "e+" not in words.meaning(RECORD, epsilon, None)


def test_delta_is_named_where_there_is_one() -> None:
    assert "except with a probability of at most 1e-05" in words.meaning(RECORD, 1.0, 1e-5)
    assert "except" not in words.meaning(RECORD, 1.0, None)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("observer", list(Observer))
@pytest.mark.parametrize("unit", list(Unit))
def test_there_are_words_for_every_promise(
    unit: Unit, observer: Observer, adjacency: Adjacency
) -> None:
    told = Promise(unit=unit, adjacency=adjacency, observer=observer)
    sentence, meaning = words.promise(told), words.meaning(told, 1.0, 1e-5)
    assert sentence.endswith(".")
    assert unit.value in meaning
    assert "{" not in sentence + meaning


def test_the_two_worlds_are_those_of_the_adjacency() -> None:
    without = words.meaning(CLIENT, 1.0, None)
    nothing = words.meaning(replace(CLIENT, adjacency=Adjacency.ZERO_OUT), 1.0, None)
    other = words.meaning(replace(CLIENT, adjacency=Adjacency.REPLACE_ONE), 1.0, None)
    assert "and without it" in without
    assert "replaced by nothing while the number of clients stays known" in nothing
    assert "any other client in its place" in other


def test_who_is_protected_from_whom() -> None:
    assert "Each record is protected, from the server" in words.promise(RECORD)
    assert (
        "The whole contribution of a site is protected, from everyone who sees the published models"
        in words.promise(CLIENT)
    )
    assert words.promise(replace(RECORD, observer=Observer.NOBODY)).startswith(
        "This method protects nobody"
    )


def test_a_trusted_server_is_said_to_be_trusted() -> None:
    for said in (words.promise(CLIENT), words.promise(CLIENT, 2.0, math.inf)):
        assert "The server is trusted: against it nothing is guaranteed." in said


def test_the_loss_against_the_server_is_named_rounded_up() -> None:
    assert "at most epsilon 7.124" in words.promise(CLIENT, 2.0, 7.1231)


def test_a_loss_against_the_server_is_called_larger_only_if_it_is() -> None:
    assert "larger" in words.promise(CLIENT, 2.0, 7.1231)
    assert "larger" not in words.promise(CLIENT, 2.0, 2.0)
    assert "larger" not in words.promise(CLIENT, 9.0, 7.1231)


def test_a_finished_run_is_described_by_its_own_numbers(weiavg: Path) -> None:
    told = RunFolder(weiavg).read_summary()
    said = html.unescape(full_page(of_folders([weiavg])).parts["summary"])
    assert told.epsilon is not None and told.epsilon.budget is not None
    assert "<p>8 sites trained one model together by the method 'weiavg', in 5 of 5 rounds." in said
    budget, spent = told.epsilon.budget, told.epsilon.spent
    assert f"between epsilon {shown(budget.smallest)} and {shown(budget.largest)}; spent:" in said
    assert f"between epsilon {shown(spent.smallest)} and {shown(spent.largest)}." in said


@given(st.integers(min_value=0, max_value=2**50))
@example(1024)
@example(2**20)
@example(2**30 - 1)
@example(2**30)
def test_a_number_of_bytes_is_told_in_a_unit_that_fits(number: int) -> None:
    value, unit = words.size(number).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(value) * factor - number) <= 0.051 * factor
    assert unit == "B" or float(value) >= 1
    assert unit == "GiB" or float(value) <= 1024
