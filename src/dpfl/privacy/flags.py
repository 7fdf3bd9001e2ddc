"""What must be said wherever a result is shown: facts that limit its guarantee, each one worded
once.

A flag follows from how a run was made, never from a string. ``public`` flags follow from the method
and the experiment alone, so a published model may carry them; the others may depend on who took
part, and stay with the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Flag(StrEnum):
    """A fact about a run that everyone who reads its results must know."""

    SEEDED = "seeded"
    UNPROTECTED = "unprotected"
    HYPOTHETICAL = "hypothetical"
    CURATOR = "curator"
    ALONE = "alone"
    FALSE_CLAIMS = "false_claims"
    WEAK_DELTA = "weak_delta"
    UNPUBLISHED = "unpublished"
    UNACCOUNTED = "unaccounted"
    UNACCOUNTED_STOP = "unaccounted_stop"
    STRATIFIED = "stratified"
    ONE_SIDED = "one_sided"
    INFERRED = "inferred"
    TOO_LARGE = "too_large"
    WHOLE_BATCHES = "whole_batches"

    @property
    def public(self) -> bool:
        """Whether a published model may carry it."""
        return self in _PUBLIC or self.reference

    @property
    def reference(self) -> bool:
        """Whether results are shown beside others only: they are not those of a federation that
        keeps its promise.
        """
        return self in (Flag.UNPROTECTED, Flag.HYPOTHETICAL, Flag.CURATOR, Flag.ALONE)

    @property
    def voids_privacy(self) -> bool:
        """Whether the stated epsilons are no guarantee at all, or none for these clients."""
        return self in _VOID

    @property
    def about(self) -> str:
        """The sentence for people; a detail may follow it."""
        return _ABOUT[self]


_PUBLIC = (Flag.SEEDED, Flag.STRATIFIED, Flag.INFERRED, Flag.UNACCOUNTED_STOP)
_VOID = (Flag.SEEDED, Flag.UNPROTECTED, Flag.HYPOTHETICAL, Flag.UNACCOUNTED_STOP)
_ABOUT = {
    Flag.SEEDED: "NOT PRIVATE: SEEDED (anyone who knows the seed can subtract the noise; for "
    "simulations only)",
    Flag.UNPROTECTED: "NOT PRIVATE: this method protects nobody",
    Flag.HYPOTHETICAL: "HYPOTHETICAL: every client was given the largest budget, whatever it asked "
    "for",
    Flag.CURATOR: "TRUSTED CURATOR: one party is given all clients' records as they are; the "
    "epsilons hold against everyone else",
    Flag.ALONE: "ALONE: every client trains by itself, and learns nothing from the others",
    Flag.FALSE_CLAIMS: "FALSE CLAIMS: some clients claim a multiple of their epsilon",
    Flag.WEAK_DELTA: "WEAK: delta is too large for some clients",
    Flag.UNPUBLISHED: "UNPUBLISHED: in some rounds too few uploads arrived, and the model stayed "
    "as it was",
    Flag.UNACCOUNTED: "UNACCOUNTED: scores are measured on the clients' test records, "
    "which only a simulation may see",
    Flag.UNACCOUNTED_STOP: "UNACCOUNTED STOP: when training ended may depend on the clients' "
    "records (test scores, a callback), and no epsilon covers that",
    Flag.STRATIFIED: "STRATIFIED: labels decided who holds a record or which are tested on; "
    "epsilon is as stated only if that choice is public",
    Flag.ONE_SIDED: "ONE-SIDED TEST: the test records lack a kind of record",
    Flag.INFERRED: "INFERRED: the number of classes, or the vocabulary, was counted in the "
    "clients' records; epsilon is as stated only if it is public",
    Flag.TOO_LARGE: "TOO LARGE: some records have a norm beyond 1e15, and count as zero",
    Flag.WHOLE_BATCHES: "WHOLE BATCHES: a batch is larger than what some clients hold; they take "
    "all of their records in every step",
}


IN_TITLE = (Flag.HYPOTHETICAL, Flag.CURATOR)
"""Flags that a ledger remembers by the title of a run, in brackets."""


@dataclass(frozen=True)
class RaisedFlag:
    """A flag and, for the operator, what raised it: clients, counts, numbers.

    >>> print(RaisedFlag(Flag.WEAK_DELTA, "delta is at or above 1 / records for 'north'"))
    WEAK: delta is too large for some clients (delta is at or above 1 / records for 'north')
    """

    flag: Flag
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.flag.about} ({self.detail})" if self.detail else self.flag.about

    def to_dict(self) -> dict[str, str]:
        """Return plain values; the sentence comes along for readers of the file."""
        return {"flag": self.flag.value, "detail": self.detail, "text": str(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RaisedFlag:
        """Read back what :meth:`to_dict` wrote."""
        return cls(Flag(values["flag"]), str(values.get("detail", "")))


def flags_in(title: str) -> tuple[Flag, ...]:
    """The flags that the title of a run in a ledger names.

    >>> flags_in("pooled_dp (curator)")
    (<Flag.CURATOR: 'curator'>,)
    """
    told = title.lower()
    return tuple(f for f in IN_TITLE if f"({f})" in told or told.startswith(f"{f}:"))


def public_note(flags: Iterable[RaisedFlag]) -> str:
    """What a published model says of itself: its public flags.

    >>> public_note([RaisedFlag(Flag.UNPROTECTED), RaisedFlag(Flag.WEAK_DELTA, "'north'")])
    'NOT PRIVATE: this method protects nobody'
    """
    return "; ".join(raised.flag.about for raised in flags if raised.flag.public)
