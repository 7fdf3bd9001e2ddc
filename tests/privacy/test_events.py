"""Events are immutable data that any accountant can read again years later."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, strategies as st

from dpfl.core.errors import ConfigurationError, LedgerError
from dpfl.privacy.costs import PrivacyCost
from dpfl.privacy.events import Event, merged


@st.composite
def events(draw: st.DrawFn) -> Event:
    sampling = draw(st.sampled_from(["none", "poisson", "uniform"]))
    return Event(
        noise_multiplier=draw(st.floats(0, 1e6)),
        steps=draw(st.integers(0, 10**6)),
        sampling=sampling,
        sampling_rate=1.0 if sampling == "none" else draw(st.floats(0, 1)),
        failure=draw(st.floats(0, 1)),
        numbers=draw(st.integers(0, 10**12)),
    )


@given(events())
def test_an_event_reads_back_as_it_was_written(event: Event) -> None:
    assert Event.from_dict(json.loads(event.to_json())) == event


@given(events(), events())
def test_equal_events_and_only_those_give_equal_text(one: Event, other: Event) -> None:
    assert (one == other) == (one.to_json() == other.to_json())


def test_a_whole_number_and_the_same_number_as_a_float_give_equal_text() -> None:
    """Equal events are one event to Python; a ledger that stores their text must agree."""
    one, other = (
        Event(noise_multiplier=2, sampling_rate=1, failure=0, numbers=3.0),
        Event(noise_multiplier=2.0, numbers=3),
    )
    assert one == other
    assert one.to_json() == other.to_json()


@pytest.mark.parametrize(
    "fields",
    [
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"noise_multiplier": -0.1},
        {"sampling": "shuffle"},
        {"sampling": "poisson", "sampling_rate": -0.1},
        {"sampling": "poisson", "sampling_rate": 1.1},
        {"sampling": "poisson", "sampling_rate": math.nan},
        {"sampling": "none", "sampling_rate": 0.5},
        {"steps": -1},
        {"steps": 1.5},
        {"steps": math.nan},
        {"steps": math.inf},
        {"failure": -0.1},
        {"failure": 1.1},
        {"failure": math.nan},
        {"numbers": -1},
        {"numbers": 0.5},
        {"numbers": math.inf},
        {"numbers": math.nan},
    ],
    ids=str,
)
def test_an_event_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Event(**{"noise_multiplier": 1.0, **fields})


WRITTEN = json.loads(Event(noise_multiplier=1.0).to_json())


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "{",
        "[]",
        "5",
        "null",
        json.dumps({**WRITTEN, "colour": 1}),
        json.dumps({k: v for k, v in WRITTEN.items() if k != "failure"}),
        json.dumps({k: v for k, v in WRITTEN.items() if k != "numbers"}),
        json.dumps({**WRITTEN, "numbers": "many"}),
        json.dumps({**WRITTEN, "noise_multiplier": "much"}),
        json.dumps({**WRITTEN, "noise_multiplier": None}),
        json.dumps({**WRITTEN, "noise_multiplier": -1}),
        json.dumps({**WRITTEN, "steps": math.nan}),
        json.dumps({**WRITTEN, "steps": math.inf}),
        json.dumps({**WRITTEN, "sampling": "shuffle"}),
    ],
)
def test_text_that_is_no_event_is_a_ledger_error_and_never_guessed_at(text: str) -> None:
    body = f'{{"unit": "record", "adjacency": "zero_out", "events": [{text}]}}'
    for stored in (body, text):
        with pytest.raises(LedgerError, match="cannot be read"):
            PrivacyCost.from_json(stored)


@given(st.lists(events(), max_size=6), st.randoms(use_true_random=False))
def test_merging_keeps_every_step_and_forgets_the_order(
    history: list[Event], random: object
) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    result = merged(history)
    assert merged(shuffled) == result == merged(result)
    assert sum(event.steps for event in result) == sum(event.steps for event in history)
    mechanisms = [event.times(1) for event in result]
    assert len(set(mechanisms)) == len(mechanisms)
    for mechanism, event in zip(mechanisms, result, strict=True):
        assert event.steps == sum(old.steps for old in history if old.times(1) == mechanism) > 0
