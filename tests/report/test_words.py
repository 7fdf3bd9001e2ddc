"""What a board member reads: true for a mathematician, and never smaller than it is."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpfl.core.types import Adjacency, Observer, Unit
from dpfl.report import words

RECORD = {"unit": "record", "adjacency": "zero_out", "observer": "server"}
CLIENT = {"unit": "client", "adjacency": "add_remove", "observer": "world"}


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
    assert "but for a failure of probability at most 1e-05" in words.meaning(RECORD, 1.0, 1e-5)
    assert "failure" not in words.meaning(RECORD, 1.0, None)


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("observer", list(Observer))
@pytest.mark.parametrize("unit", list(Unit))
def test_there_are_words_for_every_promise(
    unit: Unit, observer: Observer, adjacency: Adjacency
) -> None:
    told = {"unit": unit.value, "adjacency": adjacency.value, "observer": observer.value}
    sentence, meaning = words.promise(told), words.meaning(told, 1.0, 1e-5)
    assert sentence.endswith(".")
    assert unit.value in meaning
    assert "{" not in sentence + meaning


def test_the_two_worlds_are_those_of_the_adjacency() -> None:
    without = words.meaning({**CLIENT}, 1.0, None)
    nothing = words.meaning({**CLIENT, "adjacency": "zero_out"}, 1.0, None)
    other = words.meaning({**CLIENT, "adjacency": "replace_one"}, 1.0, None)
    assert "and without it" in without
    assert "replaced by nothing while the number of clients stays known" in nothing
    assert "any other client in its place" in other


def test_who_is_protected_from_whom() -> None:
    assert "each single record of a site, from the server" in words.promise(RECORD)
    assert (
        "the whole contribution of a site, from everyone who sees the published models"
        in words.promise(CLIENT)
    )
    assert words.promise({**RECORD, "observer": "nobody"}).startswith("This method protects nobody")


def _by_server(largest: Any) -> dict[str, Any]:
    own = {"largest": 2.0}
    return {
        **CLIENT,
        "epsilon": {"spent": own},
        "epsilon_by_observer": {"server": {"spent": {"largest": largest}}, "world": {"spent": own}},
    }


def test_a_trusted_server_is_said_to_be_trusted() -> None:
    for told in (_by_server("infinite"), CLIENT):
        assert "The server is trusted: against it nothing is guaranteed." in words.promise(told)


def test_the_loss_against_the_server_is_named_rounded_up() -> None:
    assert "at most epsilon 7.124" in words.promise(_by_server(7.1231))


def test_a_loss_against_the_server_is_called_larger_only_if_it_is() -> None:
    assert "larger" in words.promise(_by_server(7.1231))
    assert "larger" not in words.promise(_by_server(2.0))


def test_the_word_for_an_epsilon_grows_weaker() -> None:
    assert [words.strength(e) for e in (0.1, 1.0, 1.01, 10.0, 10.1)] == ["strong"] * 2 + [
        "moderate"
    ] * 2 + ["weak"]
