"""What server and sites say to each other: a header of plain values, and bytes. No pickle, nothing
executable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dpfl.core.errors import PeerError
from dpfl.core.types import Claims, Terms

HELLO, TERMS, TRAIN, END = "hello", "terms", "train", "end"
LARGEST_HEADER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message, either way."""

    header: Mapping[str, Any]
    payload: bytes = b""

    @property
    def accepted(self) -> bool:
        """Whether an answer says yes."""
        return self.header.get("ok") is True

    @property
    def reason(self) -> str:
        """Why an answer says no; a peer's words are cut short."""
        said = str(self.header.get("reason", "said no without a reason"))
        return " ".join("".join(c if c.isprintable() else " " for c in said).split())[:300]


def refusal(reason: str, **more: Any) -> Message:
    """An answer that says no."""
    return Message(header={"ok": False, "reason": reason, **more})


def write_header(header: Mapping[str, Any]) -> str:
    """As JSON."""
    return json.dumps(header, sort_keys=True, allow_nan=True)


def read_header(text: str) -> dict[str, Any]:
    """From JSON; whatever else it is, it is refused."""
    if len(text) > LARGEST_HEADER:
        raise PeerError(
            "message", f"has a header of {len(text)} characters", "send at most a million"
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(
            "message", f"cannot be read ({error})", "use the same version on both sides"
        ) from error
    if not isinstance(header, dict):
        raise PeerError("message", "is no table", "use the same version on both sides")
    return header


def terms_to_dict(terms: Terms) -> dict[str, Any]:
    """Plain values."""
    return asdict(terms)


def terms_from_dict(values: Any) -> Terms:
    """Read back, checking every kind: a server's word decides how noise is planned."""
    try:
        return Terms(
            rounds=_whole(values["rounds"]),
            population=_whole(values["population"]),
            expected_cohort=float(values["expected_cohort"]),
            participations=_whole(values["participations"]),
            smallest_epsilon=float(values["smallest_epsilon"]),
            largest_epsilon=float(values["largest_epsilon"]),
            parameters=_whole(values["parameters"]),
            noise_multiplier=None
            if values["noise_multiplier"] is None
            else float(values["noise_multiplier"]),
            public=tuple(str(client) for client in values["public"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PeerError(
            "terms", f"cannot be read ({error})", "use the same version on both sides"
        ) from error


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a site says of itself when it enrols; declarations, every one of them."""

    site: str
    claims: Claims
    token: str
    version: str = field(default="")

    def to_header(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ok": True,
            "site": self.site,
            "claims": asdict(self.claims),
            "token": self.token,
            "dpfl": self.version,
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Introduction:
        """Read back."""
        try:
            said = header["claims"]
            claims = Claims(
                epsilon=float(said["epsilon"]),
                delta=float(said["delta"]),
                examples=_whole(said["examples"]),
                accountant="renyi" if said.get("accountant") == "renyi" else None,
            )
            return cls(
                site=str(header["site"]),
                claims=claims,
                token=str(header["token"]),
                version=str(header["dpfl"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise PeerError(
                "introduction", f"cannot be read ({error})", "use the same version on both sides"
            ) from error
