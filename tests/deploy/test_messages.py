"""What arrives is refused as a peer's mistake, or read: never another exception, never a pickle."""

from __future__ import annotations

import json
import math
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message as FlowerMessage, RecordDict
from hypothesis import given, strategies as st

from dpfl.core.errors import PeerError
from dpfl.core.types import Claims, Terms
from dpfl.deploy.messages import (
    LARGEST_HEADER,
    Introduction,
    Message,
    read_header,
    refusal,
    terms_from_dict,
    terms_to_dict,
    write_header,
)
from dpfl.deploy.transport import RECORD, from_record, limit_parts, to_record

TERMS = Terms(
    rounds=3,
    population=3,
    expected_cohort=3.0,
    participations=3,
    smallest_epsilon=1.0,
    largest_epsilon=2.0,
    parameters=10,
    public=("a",),
)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=10**308, max_value=10**330),
    st.floats(),
    st.sampled_from([math.nan, math.inf]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5))
VALUES = st.recursive(
    LEAVES,
    lambda x: st.one_of(
        st.lists(x, max_size=3), st.dictionaries(st.text(max_size=5), x, max_size=3)
    ),
    max_leaves=6,
)


@given(st.one_of(st.text(), VALUES.map(json.dumps)))
def test_a_header_is_a_table_or_a_peer_s_mistake(text: str) -> None:
    try:
        assert isinstance(read_header(text), dict)
    except PeerError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        '{"a": ' + "9" * 5000 + "}",
        "",
        "[]",
        "null",
        '"x"',
        "\x00",
        "{",
    ],
    ids=lambda text: f"{text[:6]!r} x {len(text)}",
)
def test_a_header_made_to_hurt_is_a_peer_s_mistake(text: str) -> None:
    with pytest.raises(PeerError):
        read_header(text)


def test_a_header_has_a_largest_size() -> None:
    fits = json.dumps({"a": "x" * (LARGEST_HEADER - 9)})
    assert len(fits) == LARGEST_HEADER
    assert read_header(fits)["a"]
    with pytest.raises(PeerError, match="characters"):
        read_header(fits.replace("x", "xx", 1))


@given(st.one_of(VALUES, st.dictionaries(st.sampled_from(sorted(terms_to_dict(TERMS))), VALUES)))
def test_terms_are_read_or_are_a_peer_s_mistake(values: Any) -> None:
    told = {**terms_to_dict(TERMS), **values} if isinstance(values, dict) else values
    try:
        terms = terms_from_dict(told)
    except PeerError:
        return
    for whole in (terms.rounds, terms.population, terms.participations):
        assert type(whole) is int
        assert whole >= 0
    for number in (terms.expected_cohort, terms.smallest_epsilon, terms.largest_epsilon):
        assert type(number) is float
    assert all(type(client) is str for client in terms.public)


@pytest.mark.parametrize("field", sorted(terms_to_dict(TERMS)))
def test_terms_that_lack_something_are_a_peer_s_mistake(field: str) -> None:
    told = terms_to_dict(TERMS)
    del told[field]
    with pytest.raises(PeerError, match="terms"):
        terms_from_dict(told)


def test_terms_come_back_as_they_were() -> None:
    for terms in (TERMS, TERMS.with_noise(1.25)):
        assert terms_from_dict(read_header(write_header(terms_to_dict(terms)))) == terms


@given(
    st.one_of(
        VALUES,
        st.fixed_dictionaries({"claims": VALUES, "site": VALUES, "token": VALUES, "dpfl": VALUES}),
    )
)
def test_introductions_are_read_or_are_a_peer_s_mistake(header: Any) -> None:
    if not isinstance(header, dict):
        return
    try:
        said = Introduction.from_header(header)
    except PeerError:
        return
    assert type(said.claims.examples) is int
    assert type(said.claims.usable) is bool


@pytest.mark.parametrize(
    "field", ["expected_cohort", "smallest_epsilon", "largest_epsilon", "noise_multiplier"]
)
def test_numbers_beyond_all_floats_are_a_peer_s_mistake(field: str) -> None:
    with pytest.raises(PeerError):
        terms_from_dict({**terms_to_dict(TERMS), field: 10**400})


@pytest.mark.parametrize(
    "epsilon",
    [10**400, -(10**400), "1e400", "nan", True, None, [1.0], {}],
    ids=lambda x: repr(x)[:8],
)
def test_a_claim_of_any_size_is_read_or_is_a_peer_s_mistake(epsilon: Any) -> None:
    said = Introduction(
        site="a", claims=Claims(epsilon=1.0, delta=1e-3, examples=5), token="t", version="0.1.0"
    )
    header = read_header(write_header(said.to_message().header))
    assert Introduction.from_header(header) == said
    header["claims"]["epsilon"] = epsilon
    with suppress(PeerError):
        assert type(Introduction.from_header(header).claims.usable) is bool


@pytest.mark.parametrize("examples", [-1, 1.5, True, "3", None])
def test_a_number_of_records_is_a_whole_number(examples: Any) -> None:
    header = {
        "claims": {"epsilon": 1.0, "delta": 0.1, "examples": examples},
        "site": "a",
        "token": "t",
        "dpfl": "0",
    }
    with pytest.raises(PeerError, match="introduction"):
        Introduction.from_header(header)


def test_letters_travel_and_say_yes_only_with_true() -> None:
    message = Message(header={"ok": True, "x": [1, "é", math.inf]}, payload=bytes(range(256)))
    back = from_record(to_record(message))
    assert (back.header, back.payload) == (message.header, message.payload)
    assert back.accepted
    for said in ("true", 1, None, "yes", [True]):
        assert not Message(header={"ok": said}).accepted
    assert not refusal("no", code=4).accepted
    assert len(refusal("x" * 10_000).reason) == 300


def test_a_reason_is_one_plain_line() -> None:
    """It is printed on the operator's terminal, and written into one sentence."""
    reason = refusal("no\nand \x1b[2J\x1b]0;title\x07 more\r\x00").reason
    assert reason.isprintable()


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_door_unpickles(tmp_path: Path) -> None:
    trace = tmp_path / "touched"
    bomb = pickle.dumps(_Touch(trace))
    for header in (
        bomb.decode("latin-1"),
        json.dumps({"ok": True, "study": bomb.decode("latin-1")}),
    ):
        record = RecordDict({RECORD: ConfigRecord({"header": header, "payload": bomb})})
        with suppress(PeerError):
            from_record(record)
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists()  # the bomb is a real one


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({RECORD: ConfigRecord({"header": "{}"})}),
        RecordDict({RECORD: ConfigRecord({"payload": b""})}),
        RecordDict({RECORD: ConfigRecord({"header": b"{}", "payload": b""})}),
        RecordDict({RECORD: ConfigRecord({"header": "{}", "payload": "text"})}),
        RecordDict({RECORD: ConfigRecord({"header": [1, 2], "payload": b""})}),
        RecordDict({"other": ConfigRecord({"header": "{}", "payload": b""})}),
    ],
)
def test_a_record_that_is_not_ours_is_a_peer_s_mistake(content: RecordDict) -> None:
    with pytest.raises(PeerError, match="both sides"):
        from_record(content)


def test_flower_still_waits_for_the_parts_of_an_answer_as_it_is_told() -> None:
    """A canary: limit_parts changes a default of Flower's that has no setting."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
    from flwr.superlink.grid import http_grid

    def never(object_id: str) -> bytes:
        raise ObjectUnavailableError(object_id)

    defaults = dict(http_grid.pull_objects.__kwdefaults__ or {})
    try:
        limit_parts(0.1)
        began = time.monotonic()
        with pytest.raises(ObjectPullError):
            http_grid.pull_objects(["part"], never)
        assert time.monotonic() - began < 10
    finally:
        limit_parts(defaults["max_time"])


def test_flower_still_has_the_one_private_thing_that_the_local_grid_needs() -> None:
    """A canary: when a new version of Flower moves it, in_process_grid.py has to follow."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    assert (TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id) == (1, 1, 1)
    message = FlowerMessage(content=RecordDict({}), message_type="train", dst_node_id=3, ttl=10.0)
    message.metadata.__dict__["_message_id"] = "name"
    assert message.metadata.message_id == "name"
    reply = FlowerMessage(RecordDict({}), reply_to=message)
    assert reply.metadata.reply_to_message_id == "name"
