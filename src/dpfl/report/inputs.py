"""What a report is made from: runs, the cases and methods they belong to, and how methods rank.

A :class:`ReportInput` has one case, or one per combination of values in a sweep. A :class:`Case`
has several methods, and a method has a :class:`ReportRun` per seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfl.engine.evaluation import Scores
from dpfl.experiments.ranking import Standing, grouped, standings
from dpfl.experiments.results import CellResult, RunScore
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.result import Summary
from dpfl.runs.training import Training


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """One run, as its folder describes it.

    ``experiment`` is what was run, from a file or from Python, and ``toml`` its text; ``summary``
    is None while the run is running; ``history`` has a record per round that is done; ``timings``
    holds the seconds of each round by stage; ``budgets`` are the clients' epsilons.
    """

    folder: Path
    experiment: Experiment | Training
    toml: str
    summary: Summary | None = None
    history: Sequence[RoundRecord] = ()
    timings: Sequence[Mapping[str, float]] = ()
    budgets: Mapping[str, float] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.experiment.method_name

    @property
    def seed(self) -> int:
        """The seed of everything public in the run."""
        return self.experiment.public_seed_value

    @property
    def rounds(self) -> int:
        """How many rounds were planned."""
        if self.summary is not None:
            return self.summary.rounds.planned
        return self.experiment.rounds or len(self.history)

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.summary is not None

    @property
    def result(self) -> Summary:
        """The summary of a finished run."""
        assert self.summary is not None
        return self.summary

    @property
    def scores(self) -> Scores | None:
        """The newest scores of the run, None before the first test."""
        known = [line.scores for line in self.history if line.scores is not None]
        return self.summary.scores if self.summary else known[-1] if known else None

    @property
    def score(self) -> RunScore:
        """A finished run as comparisons take it: its promise, and whether it protects anybody."""
        return RunScore.of(self.result, seed=self.seed)

    @property
    def flags(self) -> Sequence[RaisedFlag]:
        """What must be said wherever the run is shown.

        While a run is running, only what its experiment tells is known.
        """
        if self.summary is not None:
            return self.summary.flags
        return [RaisedFlag(Flag.SEEDED)] if self.experiment.seeded else []


Methods = Mapping[str, Sequence[ReportRun]]
"""The runs of each method, one per seed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One federation and what was tried on it: the runs of each method, by seed.

    ``values`` are those of the fields in which the cases of a sweep differ.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    methods: Methods

    @property
    def first(self) -> dict[str, ReportRun]:
        """One run per method to look into: that of the first seed."""
        return {label: runs[0] for label, runs in self.methods.items()}

    def rankings(self) -> dict[str, list[Standing]]:
        """Rank the methods among those that promise the same, one ranking per unit.

        Methods that protect nobody are listed under every unit, and never ranked.
        """
        cells = [
            CellResult(label=label, runs=tuple(run.score for run in runs))
            for label, runs in self.methods.items()
        ]
        return grouped(standings(cells))

    def by_unit(self) -> dict[str, Methods]:
        """The runs of the methods of each ranking."""
        return {
            unit: {one.label: self.methods[one.label] for one in lines}
            for unit, lines in self.rankings().items()
        }


@dataclass(frozen=True, kw_only=True)
class ReportInput:
    """Everything a report shows.

    ``title`` heads the page; ``tuning`` is a sentence about how settings were chosen, if they were.
    The cases of a sweep have the same methods.
    """

    title: str
    cases: Sequence[Case]
    tuning: str = ""

    @property
    def runs(self) -> list[ReportRun]:
        """The runs of all cases, methods and seeds."""
        return [run for case in self.cases for runs in case.methods.values() for run in runs]

    @property
    def varied(self) -> list[str]:
        """The fields in which the cases differ."""
        return list(self.cases[0].values)
