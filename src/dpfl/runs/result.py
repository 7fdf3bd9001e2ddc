"""What a run ends with, typed from the loop to the report: one noun for tables, pages and files."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypedDict

from pydantic import TypeAdapter, ValidationError

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, read_problem
from dpfl.core.types import Adjacency, Observer, Plain, Promise, Unit
from dpfl.core.version import __version__
from dpfl.engine.evaluation import Scores
from dpfl.engine.finish_scores import FinishScores
from dpfl.privacy.accountant import shown
from dpfl.privacy.flags import RaisedFlag
from dpfl.privacy.statement import Statement
from dpfl.rounds.record import RoundRecord
from dpfl.runs.validation import check_types, first_problem

SUMMARY_FORMAT = "dpfl-summary-2"


class ModelTested(StrEnum):
    """Whose scores a run reports."""

    COMMON = "the common model, on all clients' test records"
    PERSONAL = "each client's own model, on its own test records"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest, median and largest of a number per client; infinity is written as a word."""

    smallest: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
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
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote; the word "infinite" becomes infinity."""
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
    def of(cls, statements: Sequence[Statement]) -> Self | None:
        """Condense statements, None if there are none."""
        spent = Spread.of(line.epsilon for line in statements)
        if spent is None:
            return None
        budget = Spread.of(line.budget for line in statements if line.budget is not None)
        accountants = tuple(sorted({line.accountant for line in statements}))
        return cls(spent=spent, budget=budget, accountants=accountants)

    @property
    def words(self) -> str:
        """The epsilons that were spent, rounded up."""
        spent = " / ".join(shown(value) for value in vars(self.spent).values())
        return f"{spent} (smallest / median / largest)"

    def to_dict(self) -> Plain:
        """Return plain values."""
        parts = {"spent": self.spent, "budget": self.budget}
        told = {name: own.to_dict() for name, own in parts.items() if own is not None}
        return {**told, "accountant": list(self.accountants)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | None:
        """Read back; version 0.1 called a budget a grant."""
        if not values.get("spent"):
            return None
        spent = Spread.from_dict(values["spent"])
        told = values.get("budget", values.get("granted"))
        budget = Spread.from_dict(told) if told else None
        return cls(spent=spent, budget=budget, accountants=tuple(values["accountant"]))


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
    not accounted for; ``tested`` says of whose model they are. ``finish`` is what clients get on
    their own test records alone, from the common model and from both, by client (simulation only,
    and not accounted for). ``epsilon`` condenses ``statements``, one for each client, and is None
    where nobody is protected; ``epsilon_against`` holds the same for every adversary that is
    charged apart. ``clients_left`` names clients whose budget ran out before the run ended.
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
    epsilon_against: Mapping[Observer, EpsilonSpread]
    clients_left: tuple[str, ...]
    bytes_up: int
    payload_bytes_up: int = 0
    bytes_down: int
    statements: tuple[Statement, ...]
    seconds: float
    finish: Mapping[str, FinishScores] = field(default_factory=dict)
    version: str = __version__

    @property
    def accuracy(self) -> float:
        """Accuracy on test records; NaN for a task that has none."""
        return self.scores.accuracy

    @property
    def value(self) -> float:
        """The task's ranking metric on test records (``scores.metric`` names it)."""
        return self.scores.value

    def to_dict(self) -> Plain:
        """Return plain values, as they are written to ``summary.json``."""
        plain = "method run clients parameters bytes_up payload_bytes_up bytes_down"
        finish = {client: own.to_dict() for client, own in self.finish.items()}
        return {
            "format": SUMMARY_FORMAT,
            "dpfl": self.version,
            **{name: getattr(self, name) for name in plain.split()},
            **self.promise.to_dict(),
            "flags": [raised.to_dict() for raised in self.flags],
            "assumptions": list(self.assumptions),
            "rounds": dict(vars(self.rounds)),
            **self.scores.to_dict(),
            "tested": str(self.tested),
            **({"finish": finish} if finish else {}),
            "epsilon": self.epsilon.to_dict() if self.epsilon else {},
            "epsilon_by_observer": {str(o): e.to_dict() for o, e in self.epsilon_against.items()},
            "clients_left": list(self.clients_left),
            "statements": [line.to_dict() for line in self.statements],
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "summary") -> "Summary":
        """Read back what :meth:`to_dict` wrote.

        ``where`` names the file in messages. Another format, or a file that lacks something, is
        refused.
        """
        found = values.get("format")
        check(
            found == SUMMARY_FORMAT,
            where,
            f"is of format '{found}', this dpfl reads '{SUMMARY_FORMAT}'",
            "run the experiment again, or report it with the dpfl that wrote it",
            FolderError,
        )
        try:
            against = values["epsilon_by_observer"]
            spreads = ((o, EpsilonSpread.from_dict(told)) for o, told in against.items())
            finish = dict(values.get("finish", {})).items()  # earlier versions have none
            own = {
                "version": values["dpfl"],
                "promise": values,
                "scores": Scores.from_dict(values),
                "finish": {client: FinishScores.from_dict(told) for client, told in finish},
                "flags": [*map(RaisedFlag.from_dict, values["flags"])],
                "epsilon": EpsilonSpread.from_dict(values["epsilon"]),
                "epsilon_against": {o: spread for o, spread in spreads if spread is not None},
                "statements": [*map(Statement.from_dict, values["statements"])],
            }
            found = _SUMMARY.validate_python({**values, **own})
            check_types(found)
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = _reason(error, values)
            raise FolderError(
                where, f"cannot be read ({reason})", "report it with the dpfl that wrote it"
            ) from error


def promise_in(values: Mapping[str, Any]) -> Promise:
    """The promise among plain values, such as those of an epsilon or a statement."""
    kinds = {"unit": Unit, "adjacency": Adjacency, "observer": Observer}
    told: Plain = {name: kind(values[name]) for name, kind in kinds.items()}
    return Promise(**told, colluders=values.get("colluders", math.inf))


def _reason(error: Exception, values: Mapping[str, Any]) -> str:
    """Why a summary cannot be read."""
    if isinstance(error, ValidationError):
        problem = first_problem(error, values)
        told = f"{problem.given} instead of {problem.wanted or 'what belongs there'}"
        told = "is missing" if problem.kind == "missing" else told
        return f"{'.'.join(problem.path)}: {told}"
    return read_problem(error)


class Traffic(TypedDict):
    """Bytes of all rounds, as the fields of a summary."""

    bytes_up: int
    payload_bytes_up: int
    bytes_down: int


def total_bytes(history: Sequence[RoundRecord]) -> Traffic:
    """Add up the bytes of all rounds."""
    return Traffic(
        bytes_up=sum(line.bytes_up for line in history),
        payload_bytes_up=sum(line.payload_bytes_up for line in history),
        bytes_down=sum(line.bytes_down for line in history),
    )


_SUMMARY = TypeAdapter(Summary)
