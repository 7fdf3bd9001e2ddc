"""What a server and its sites send each other: a header of plain JSON values, and bytes.

Nothing executable travels. Each header is read once, where it arrives: a site reads a
:class:`~dpfl.deploy.requests.Request`, a server a :class:`Reply` and, from a new site, an
:class:`Introduction`. What cannot be read is a :class:`~dpfl.core.errors.PeerError`.

An answer's header holds ::

    ok      true, or anything else for a refusal
    site    who answers
    reason  of a refusal: one sentence
    code    of a refusal: the exit code of the error behind it
    more    whether the site will take another round
    token   in answers to a hello and to a round: proves that it is the same site
    round   in answers to a round
    head    in answers to a round: the hash of the newest entry of the site's ledger
    claims  in answers to a hello: what the site says of its budget and records
    identity  in answers to a hello: its public key for secure sums
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dpfl.core.checks import check, check_name
from dpfl.core.errors import ConfigurationError, PeerError, PrivacyRefusal
from dpfl.core.files import parsed
from dpfl.core.types import Claims, Plain, Terms

HELLO, TERMS, TRAIN, SUM, END = "hello", "terms", "train", "sum", "end"  # the kinds of requests
LARGEST_HEADER = 1 << 20
LONGEST = 2_000  # characters of a reason, or of a line of a log, in which another's words may be
SAME_VERSION = "use the same version on both sides"
_FINAL = (ConfigurationError.exit_code, PrivacyRefusal.exit_code)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message, in either direction.

    ``header`` holds plain values that JSON can carry. ``payload`` holds the bytes of a download, an
    upload or a model, which have formats of their own.
    """

    header: Mapping[str, Any]
    payload: bytes = b""

    @property
    def accepted(self) -> bool:
        """Whether an answer says yes."""
        return self.header.get("ok") is True

    @property
    def size(self) -> int:
        """How many bytes header and payload have."""
        return len(write_header(self.header).encode()) + len(self.payload)

    @property
    def reason(self) -> str:
        """Why an answer says no, as one short printable line: the words are the peer's own."""
        said = str(self.header.get("reason", "refused without a reason"))
        return " ".join("".join(c if c.isprintable() else " " for c in said).split())[:300]


WENT_WRONG = "something went wrong at the site; its own log says what"


def refusal(reason: str, **more: Any) -> Message:
    """Build an answer that says no; ``more`` goes into its header.

    >>> answer = refusal("its budget does not cover another round", site="north", more=False)
    >>> answer.accepted, answer.reason
    (False, 'its budget does not cover another round')
    """
    return Message(header={"ok": False, "reason": reason[:LONGEST], **more})


def acceptance(site: str, payload: bytes = b"", **more: Any) -> Message:
    """Build an answer of a site that says yes; ``more`` goes into its header.

    >>> acceptance("north", more=True).header
    {'ok': True, 'site': 'north', 'more': True}
    """
    return Message(header={"ok": True, "site": site, **more}, payload=payload)


def write_header(header: Mapping[str, Any]) -> str:
    """Write a header as JSON, in one canonical order.

    >>> write_header({"run": "a", "kind": "hello"})
    '{"kind": "hello", "run": "a"}'
    """
    return json.dumps(header, sort_keys=True, allow_nan=True)


def read_header(text: str) -> Plain:
    """Read a header; what is not a JSON table of at most a million characters is refused.

    >>> read_header("[]")
    Traceback (most recent call last):
    dpfl.core.errors.PeerError: message: is not a table; use the same version on both sides
    """
    check(
        len(text) <= LARGEST_HEADER,
        "message",
        f"has a header of {len(text)} characters",
        "send at most a million",
        PeerError,
    )
    with readable("message"):
        header = parsed(text)
        write_header(header)  # what can be read can be written: it is handed on, and kept
    check(isinstance(header, dict), "message", "is not a table", SAME_VERSION, PeerError)
    return dict(header)


_UNREADABLE = KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turn whatever goes wrong while a header is read into the peer's mistake."""
    try:
        yield
    except _UNREADABLE as error:
        raise PeerError(where, f"cannot be read ({error})", SAME_VERSION) from error


def integer(value: Any, least: int | None = 0, most: float = math.inf) -> int:
    """Return a whole number; a bool, a float or a text is not one."""
    good = isinstance(value, int) and not isinstance(value, bool) and value <= most
    if not good or (least is not None and value < least):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def text(value: Any) -> str:
    """Return a text; anything else is not one."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def name_of(value: Any) -> str:
    """Return the name of a run or a site; what is too long or cannot be printed is not one."""
    return check_name("message", text(value), PeerError)


def round_name(number: int) -> str:
    """Name a round as people count it; releases before the first round, and measurements, have
    negative numbers.

    >>> round_name(0), round_name(-1)
    ('round 1', 'a release of statistics')
    """
    return f"round {number + 1}" if number >= 0 else "a release of statistics"


# -- terms -----------------------------------------------------------------------------------------


def terms_to_dict(terms: Terms) -> Plain:
    """Return plain values."""
    return asdict(terms)


def terms_from_dict(values: Any) -> Terms:
    """Read terms, checking every type: the noise of a site is planned from these numbers.

    Whether the numbers fit the study is checked by the site; here they only have to be numbers.
    """
    with readable("terms"):
        noise = values["noise_multiplier"]
        counts = ("rounds", "population", "participations", "parameters", "records")
        numbers = ("expected_cohort", "smallest_epsilon", "largest_epsilon", "denominator")
        found: Plain = {k: integer(values[k]) for k in (*counts, "batch", "measured")}
        found |= {name: float(values[name]) for name in numbers}
        return Terms(
            **found,
            noise_multiplier=None if noise is None else float(noise),
            public=tuple(map(name_of, values["public"])),
            releases=tuple((float(part), integer(size)) for part, size in values["releases"]),
            release_noise=tuple(float(noise) for noise in values["release_noise"]),
            weights=tuple((name_of(client), float(part)) for client, part in values["weights"]),
            recipe=tuple((text(name), float(value)) for name, value in values["recipe"]),
        )


# -- what a site answers ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came of a request, as the server reads it.

    ``problem`` says why there is no result, and is empty if there is one.
    ``answered`` is False where nothing arrived, or nothing that could be read.
    ``more`` says whether the site will take another round.
    ``token`` is what the answer proves its origin with, None where it proves nothing.
    ``message`` is the answer itself, ``seconds`` how long it took to come.
    """

    problem: str
    answered: bool = True
    more: bool = True
    token: str | None = None
    message: Message = Message(header={})
    seconds: float = 0.0

    @classmethod
    def of(cls, message: Message) -> Reply:
        """Read an answer. A refusal by policy or budget is final; other failures may pass."""
        said = message.header
        more = said.get("more", message.accepted or said.get("code") not in _FINAL)
        return cls(
            problem="" if message.accepted else message.reason or "refused without a reason",
            more=bool(more),
            token=str(said["token"]) if "token" in said else None,
            message=message,
        )

    @classmethod
    def none(cls, problem: str) -> Reply:
        """No answer, and why."""
        return cls(problem=problem, answered=False)


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a site says of itself when it enrols. All of it is a declaration, nothing a fact.

    ``token`` proves to this run's server that later answers come from the same site. ``identity``
    is the public key that other sites know it by, where the study has a secure sum.
    """

    site: str
    claims: Claims
    token: str
    version: str = ""
    identity: str = ""

    def to_message(self) -> Message:
        """Write the introduction."""
        said: Plain = {"claims": asdict(self.claims), "token": self.token, "dpfl": self.version}
        if self.identity:
            said["identity"] = self.identity
        return Message(header={"ok": True, "site": self.site, **said})

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Introduction:
        """Read an introduction."""
        with readable("introduction"):
            said = header["claims"]
            claims = Claims(
                epsilon=float(said["epsilon"]),
                delta=float(said["delta"]),
                examples=integer(said["examples"]),
                accountant="renyi" if said.get("accountant") == "renyi" else None,
                test_examples=integer(said.get("test_examples", 0), most=1 << 53),
            )
            return cls(
                site=name_of(header["site"]),
                claims=claims,
                token=str(header["token"]),
                version=str(header["dpfl"]),
                identity=str(header.get("identity", "")),
            )
