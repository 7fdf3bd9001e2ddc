"""What a run ends with, typed from the loop to the report: one noun for tables, pages and files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dpfl.core.errors import FolderError
from dpfl.core.types import Adjacency, Observer, Promise, Unit
from dpfl.core.version import __version__
from dpfl.engine.evaluation import Scores
from dpfl.privacy.flags import RaisedFlag
from dpfl.privacy.statement import Statement
from dpfl.rounds.record import RoundRecord

SUMMARY_FORMAT = "dpfl-summary-2"
_OLDER = "dpfl-summary-1"


class ModelTested(StrEnum):
    """Whose accuracy a run reports."""

    COMMON = "the common model, on all clients' test records"
    PERSONAL = "each client's own model, on its own test records"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest, median and largest of a number per client; infinity is written as a word."""

    smallest: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of some values, None if there are none.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(smallest=1.0, median=2.0, largest=3.0)
        """
        known = list(values)
        if not known:
            return None
        return cls(smallest=min(known), median=statistics.median(known), largest=max(known))

    def to_dict(self) -> dict[str, float | str]:
        """Return plain values that JSON can carry."""
        return {k: "infinite" if math.isinf(v) else v for k, v in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spread:
        """Read back."""
        return cls(**{k: math.inf if v == "infinite" else v for k, v in values.items()})


@dataclass(frozen=True, kw_only=True)
class EpsilonSpread:
    """What clients spent, beside their budgets, over all clients of a run.

    ``spent`` and ``budget`` are epsilons; ``budget`` is None where no client has one that these
    epsilons are held against. ``accountants`` name how the epsilons were found.
    """

    spent: Spread
    budget: Spread | None
    accountants: tuple[str, ...]

    @classmethod
    def of(cls, statements: Iterable[Statement]) -> EpsilonSpread | None:
        """Condense statements, None if there are none."""
        lines = list(statements)
        spent = Spread.of(line.epsilon for line in lines)
        if spent is None:
            return None
        budget = Spread.of(line.budget for line in lines if line.budget is not None)
        accountants = tuple(sorted({line.accountant for line in lines}))
        return cls(spent=spent, budget=budget, accountants=accountants)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        told: dict[str, Any] = {"spent": self.spent.to_dict()}
        if self.budget is not None:
            told["budget"] = self.budget.to_dict()
        return told | {"accountant": list(self.accountants)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpsilonSpread | None:
        """Read back; version 0.1 called a budget a grant."""
        if not values.get("spent"):
            return None
        budget = values.get("budget") or values.get("granted")
        return cls(
            spent=Spread.from_dict(values["spent"]),
            budget=Spread.from_dict(budget) if budget else None,
            accountants=tuple(values["accountant"]),
        )


@dataclass(frozen=True, kw_only=True)
class RoundCount:
    """How many rounds were planned and done, and why a run ended early.

    ``ended_early`` is a sentence for people, None where all planned rounds were done.
    """

    planned: int
    done: int
    ended_early: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a run, for the operator.

    ``promise`` says what every epsilon here is about, ``flags`` what limits the guarantee, and
    ``assumptions`` what it rests on. ``scores`` are measured on the clients' test records and are
    not accounted for; ``tested`` says of whose model they are. ``epsilon`` condenses
    ``statements``, one for each client, and is None where nobody is protected;
    ``epsilon_against`` holds the same for every adversary that is charged apart. ``clients_left``
    names clients whose budget ran out before the run ended.
    """

    method: str
    run: str
    promise: Promise
    flags: tuple[RaisedFlag, ...]
    assumptions: tuple[str, ...]
    clients: int
    parameters: int
    rounds: RoundCount
    scores: Scores
    tested: ModelTested
    epsilon: EpsilonSpread | None
    epsilon_against: Mapping[Observer, EpsilonSpread] = field(default_factory=dict)
    clients_left: tuple[str, ...] = ()
    bytes_up: int = 0
    payload_bytes_up: int = 0
    bytes_down: int = 0
    statements: tuple[Statement, ...] = ()
    seconds: float = 0.0
    version: str = __version__

    @property
    def accuracy(self) -> float:
        """Accuracy on test records."""
        return self.scores.accuracy

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written to ``summary.json``."""
        scores = {name: value for name, value in vars(self.scores).items() if value is not None}
        plain = ("method", "run", "clients", "parameters", "bytes_up", "payload_bytes_up")
        return {
            "format": SUMMARY_FORMAT,
            "dpfl": self.version,
            **{name: getattr(self, name) for name in plain},
            "bytes_down": self.bytes_down,
            **self.promise.to_dict(),
            "flags": [raised.to_dict() for raised in self.flags],
            "assumptions": list(self.assumptions),
            "rounds": dict(vars(self.rounds)),
            **scores,
            "tested": str(self.tested),
            "epsilon": self.epsilon.to_dict() if self.epsilon else {},
            "epsilon_by_observer": {str(o): e.to_dict() for o, e in self.epsilon_against.items()},
            "clients_left": list(self.clients_left),
            "statements": [line.to_dict() for line in self.statements],
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "summary") -> Summary:
        """Read back what :meth:`to_dict` wrote, in this version or in 0.1.

        ``where`` names the file in messages. Another format, or a file that lacks something, is
        refused.
        """
        if (found := values.get("format")) not in (SUMMARY_FORMAT, _OLDER):
            raise FolderError(
                where,
                f"is of format '{found}', this dpfl reads '{SUMMARY_FORMAT}'",
                "run the experiment again, or report it with the dpfl that wrote it",
            )
        plain = ("method", "run", "clients", "parameters", "bytes_up", "bytes_down", "seconds")
        scores = {k: values[k] for k in ("accuracy", "loss", "common_accuracy") if k in values}
        against = values.get("epsilon_by_observer", {})
        spreads = {Observer(o): EpsilonSpread.from_dict(told) for o, told in against.items()}
        try:
            return cls(
                **{name: values[name] for name in plain},
                payload_bytes_up=values.get("payload_bytes_up", 0),
                promise=Promise(
                    unit=Unit(values["unit"]),
                    adjacency=Adjacency(values["adjacency"]),
                    observer=Observer(values["observer"]),
                ),
                flags=tuple(map(RaisedFlag.from_dict, values.get("flags", values.get("stamps")))),
                assumptions=tuple(values["assumptions"]),
                rounds=RoundCount(**values["rounds"]),
                scores=Scores(**scores),
                tested=ModelTested(values["tested"]),
                epsilon=EpsilonSpread.from_dict(values["epsilon"]),
                epsilon_against={o: spread for o, spread in spreads.items() if spread},
                clients_left=tuple(values["clients_left"]),
                statements=tuple(map(Statement.from_dict, values["statements"])),
                version=str(values.get("dpfl", "0.1")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FolderError(
                where, f"cannot be read ({error})", "report it with the dpfl that wrote it"
            ) from error


def total_bytes(history: Iterable[RoundRecord]) -> dict[str, Any]:
    """Bytes of all rounds, as the fields of a summary."""
    names, lines = ("bytes_up", "payload_bytes_up", "bytes_down"), list(history)
    return {name: sum(getattr(line, name) for line in lines) for name in names}
