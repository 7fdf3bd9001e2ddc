"""What a study ends with: cells of one method in one case, each with a score per seed.

``results.json`` keeps the format of version 0.1; files of that version can be read, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from dpfl.core.checks import check
from dpfl.core.errors import FolderError, read_problem
from dpfl.core.files import parsed, write_safely
from dpfl.core.html import text_of
from dpfl.core.types import Observer, Plain, Promise
from dpfl.experiments.study import Values, distinct
from dpfl.experiments.trial import Trial as Trial
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.runs.folder import RESULTS_FORMAT
from dpfl.runs.result import EpsilonSpread, RoundCount, Summary, promise_in
from dpfl.runs.validation import check_types
from dpfl.tasks import MetricWords

_TABLES = "dpfl.experiments.tables"  # which imports this module


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """One run of a study: its seed, its score, and what it cost.

    Beside what a :class:`~dpfl.runs.result.Summary` says (``promise``, ``loss``, ``tested``,
    ``flags``, ``rounds``, ``bytes_up``, ``bytes_down``, ``epsilon``, ``epsilon_against``) it has
    the name of its ``folder``. ``value`` is the ranking metric, named by ``metric``, of which more
    is better if ``higher_is_better``. ``clients_left`` counts the clients whose budget
    ran out early. ``curve`` is the value by round. ``metrics`` holds, for each name that the
    study asks for, a few condensed numbers; ``noise_over_least`` is one of them: the variance of
    the noise in the aggregate over the least that any weights could leave (simulation only).
    """

    seed: int
    value: float
    promise: Promise
    metric: str = "accuracy"
    higher_is_better: bool = True
    loss: float = 0.0
    folder: str = ""
    tested: str = ""
    flags: tuple[RaisedFlag, ...] = ()
    clients: int = 0
    clients_left: int = 0
    rounds: RoundCount | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    epsilon: EpsilonSpread | None = None
    epsilon_against: Mapping[Observer, EpsilonSpread] = field(default_factory=dict)
    curve: tuple[float, ...] = ()
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, summary: Summary, *, seed: int, **more: Any) -> RunScore:
        """Condense the summary of a run; ``more`` are fields that a summary does not have."""
        names = [one.name for one in fields(cls) if hasattr(summary, one.name)]
        same = {name: getattr(summary, name) for name in names}
        same |= {name: getattr(summary.scores, name) for name in _OF_SCORES}
        same |= {"tested": str(summary.tested), "clients_left": len(summary.clients_left)}
        return cls(seed=seed, **same, **more)

    @property
    def words(self) -> MetricWords:
        """How its score is shown."""
        return MetricWords(self.metric)

    @property
    def accuracy(self) -> float:
        """The value of a run that is scored by accuracy; NaN for another metric."""
        return self.value if self.metric == "accuracy" else math.nan

    @property
    def protects(self) -> bool:
        """Whether anybody is protected."""
        return self.promise.observer is not Observer.NOBODY

    @property
    def reference(self) -> bool:
        """Whether a run is shown beside others only: it protects nobody, raises budgets, trusts a
        curator, or shares nothing.
        """
        return not self.protects or any(raised.flag.reference for raised in self.flags)

    @property
    def hypothetical(self) -> bool:
        """Whether budgets were raised."""
        return any(raised.flag is Flag.HYPOTHETICAL for raised in self.flags)

    def to_dict(self) -> Plain:
        """Return plain values, as they are written to ``results.json``."""
        plain = ("seed", "folder", "loss", "clients", "clients_left", "bytes_up")
        scored: Plain = {self.metric: self.value}
        if self.metric != "accuracy":
            scored |= {"metric": self.metric, "higher_is_better": self.higher_is_better}
        spent = self.epsilon.to_dict() if self.epsilon else {}
        return {
            **{name: getattr(self, name) for name in (*plain, "bytes_down", "tested")},
            **scored,
            "curve": list(self.curve),
            "rounds": asdict(self.rounds) if self.rounds else None,
            "flags": [raised.to_dict() for raised in self.flags],
            "epsilon_by_observer": {str(o): e.to_dict() for o, e in self.epsilon_against.items()},
            "epsilon": spent | self.promise.to_dict(),
            **{name: dict(numbers) for name, numbers in self.metrics.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunScore:
        """Read back what :meth:`to_dict` wrote, in this version or in 0.1."""
        left = values.get("clients_left", 0)
        against = {
            Observer(observer): EpsilonSpread.from_dict({"accountant": (), **told})
            for observer, told in values.get("epsilon_by_observer", {}).items()
        }
        read: Plain = {
            "value": values[values.get("metric", "accuracy")],
            "promise": promise_in(values["epsilon"]),
            "flags": tuple(map(RaisedFlag.from_dict, values.get("flags", ()))),
            "clients_left": left if isinstance(left, int) else len(left),
            "rounds": RoundCount(**values["rounds"]) if values.get("rounds") else None,
            "epsilon": EpsilonSpread.from_dict({"accountant": (), **values["epsilon"]}),
            "epsilon_against": {observer: spread for observer, spread in against.items() if spread},
            "curve": tuple(values.get("curve", ())),
            "metrics": {k: v for k, v in values.items() if isinstance(v, Mapping) and "mean" in v},
        }
        return cls(**_known(cls, values) | read)


_OF_SCORES = ("metric", "value", "higher_is_better", "loss")


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One method in one case.

    ``label`` is what the method goes by. ``chosen`` are the settings that a search chose for it
    among those it ``tried``; ``runs`` are in the order of seeds, and empty after a search.
    """

    case: Values = field(default_factory=dict)
    label: str
    method: str = ""
    chosen: Values = field(default_factory=dict)
    tried: tuple[Trial, ...] = ()
    runs: tuple[RunScore, ...] = ()

    def to_dict(self) -> Plain:
        """Return plain values."""
        told = {"tried": [one.to_dict() for one in self.tried]}
        return {**vars(self), **told, "runs": [run.to_dict() for run in self.runs]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellResult:
        """Read back what :meth:`to_dict` wrote, in this version or in 0.1."""
        tried = tuple(map(Trial.from_dict, values.get("tried", ())))
        runs = tuple(map(RunScore.from_dict, values["runs"]))
        return cls(**_known(cls, values) | {"tried": tried, "runs": runs})


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """The results of a comparison, a sweep, a search or a study.

    ``title`` heads it, and ``cells`` hold the runs. ``study`` is the file that repeats it;
    ``tuning`` says on whose records settings were chosen; ``versions`` and ``machine`` where it was
    computed; ``kept`` is the folder of its runs, where it was written down.

    ::

        result = StudyResult.read("runs/compare-1")
        print(result.cells[0].label, result.cells[0].runs[0].accuracy)
    """

    title: str
    study: Mapping[str, Any] = field(default_factory=dict)
    tuning: str = ""
    kept: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    cells: tuple[CellResult, ...]

    @property
    def cases(self) -> list[Values]:
        """What was varied, one combination of values per case."""
        return distinct(cell.case for cell in self.cells)

    def of_case(self, case: Values) -> list[CellResult]:
        """The methods of one case."""
        return [cell for cell in self.cells if cell.case == case]

    def to_pandas(self) -> Any:
        """Return a pandas frame with one row per run: case, method, seed, scores and epsilons."""
        return import_module(_TABLES).frame_of_study(self)

    def __str__(self) -> str:
        """The tables that a notebook shows, as text."""
        return text_of(self._repr_html_())

    def _repr_html_(self) -> str:
        return str(import_module(_TABLES).html_of_study(self))

    def settings(self) -> dict[str, Plain]:
        """The settings that a search chose, by method."""
        return {
            cell.method: {name.removeprefix("method."): own for name, own in cell.chosen.items()}
            for cell in self.cells
        }

    def to_dict(self) -> Plain:
        """Return plain values, as they are written to ``results.json``."""
        told = {k: own for k, own in vars(self).items() if own or k not in ("tuning", "kept")}
        cells = [cell.to_dict() for cell in self.cells]
        return {"format": RESULTS_FORMAT, **told, "cells": cells}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StudyResult:
        """Read ``values`` that :meth:`to_dict` wrote, in this version or in 0.1."""
        cells = tuple(map(CellResult.from_dict, values["cells"]))
        return cls(**_known(cls, values) | {"cells": cells})

    def write(self, path: Path) -> None:
        """Write a results file to ``path``."""
        write_safely(path, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path | str, remedy: str = "name the folder of a comparison") -> StudyResult:
        """Read a results file (``path``, or in that folder); ``remedy`` is advice without one."""
        place = Path(path)
        if place.is_dir():
            place /= "results.json"
        try:
            values = parsed(place.read_text())
            check(
                isinstance(values, dict) and values.get("format") == RESULTS_FORMAT,
                str(place),
                "holds no results of a study",
                remedy,
                FolderError,
            )
            found = cls.from_dict(values)
            check_types(found)
            return found
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise FolderError(
                str(place), f"cannot be read ({read_problem(error)})", remedy
            ) from error


def _known(kind: type[Any], values: Mapping[str, Any]) -> Plain:
    """Those of the values that are fields of a dataclass."""
    return {one.name: values[one.name] for one in fields(kind) if one.name in values}
