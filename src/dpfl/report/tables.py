"""Notices, tables and tiles as values: what a reader sees, and the exact number behind it."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dpfl.privacy.accountant import shown
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.ledger_reader import LedgerRun, PricedPlan
from dpfl.privacy.statement import Statement
from dpfl.report import words
from dpfl.report.meaning import GROUPS, Meaning
from dpfl.report.reading import Rank, Ranking, ReportInput, ReportRun


@dataclass(frozen=True)
class Notice:
    """A flag on top of a page; a grave one says that epsilons must not be taken at their word."""

    text: str
    grave: bool

    @classmethod
    def of(cls, raised: RaisedFlag) -> Notice:
        """Show a raised flag."""
        return cls(str(raised), raised.flag.voids_privacy or raised.flag is Flag.FALSE_CLAIMS)


@dataclass(frozen=True)
class Cell:
    """A text for people; ``value`` is the exact number, for sorting and for machines."""

    text: str
    value: object = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A sortable table. The first ``names`` columns hold words, the others numbers.

    ``kinds`` marks rows: "best", "reference" or nothing.
    """

    name: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    names: int = 1
    kinds: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A number worth a glance; ``fact`` names it for machines."""

    fact: str
    value: object
    text: str
    label: str


def epsilon(value: float | None) -> Cell:
    """An epsilon, rounded up; a dash where there is none."""
    if value is None:
        return Cell("-")
    return Cell(shown(value), value if math.isfinite(value) else "infinite")


def delta(value: float | None) -> Cell:
    """A delta; a dash where there is none."""
    return Cell("-" if value is None else f"{value:g}")


def whole(value: int | None) -> Cell:
    """A whole number; a dash where there is none."""
    return Cell("-") if value is None else Cell(str(value), value)


# -- runs ------------------------------------------------------------------------------------------


def run_tiles(run: ReportRun) -> list[Tile]:
    """The numbers of a finished run that are worth a glance."""
    told, left = run.result, len(run.result.clients_left)
    percent, sent = f"{100 * told.accuracy:.1f} %", words.size(told.bytes_up)
    tiles = [_tile("accuracy", Cell(percent, told.accuracy), "test accuracy (simulation only)")]
    if told.epsilon is not None:
        spent, budget = told.epsilon.spent, told.epsilon.budget
        tiles.append(_tile("spent-median", epsilon(spent.median), "epsilon spent, median of sites"))
        if budget is not None:
            label = "epsilon of the budget, median of sites"
            tiles.append(_tile("budget-median", epsilon(budget.median), label))
        label = "epsilon spent, largest of any site"
        tiles.append(_tile("spent-largest", epsilon(spent.largest), label))
    out = Cell(f"{left} of {told.clients}", left)
    return [
        *tiles,
        _tile("clients-left", out, "sites whose budget ran out"),
        _tile("bytes-up", Cell(sent, told.bytes_up), "sent by all sites"),
    ]


def running_tiles(run: ReportRun) -> list[Tile]:
    """How far a run that is still running has come."""
    done, up = len(run.history), sum(line.bytes_up for line in run.history)
    tiles = [_tile("rounds-done", Cell(f"{done} of {run.rounds}", done), "rounds done")]
    scores = [line.scores for line in run.history if line.scores is not None]
    if scores:
        percent = f"{100 * scores[-1].accuracy:.1f} %"
        label = "test accuracy so far (simulation only)"
        tiles.append(_tile("accuracy", Cell(percent, scores[-1].accuracy), label))
    tiles.append(_tile("bytes-up", Cell(words.size(up), up), "sent by all sites"))
    if run.timings:
        pace = statistics.mean(line["seconds"] for line in run.timings[-10:])
        left = pace * (run.rounds - done)
        tiles.append(_tile("seconds-left", Cell(f"about {words.duration(left)}", left), "left"))
    return tiles


def _tile(fact: str, cell: Cell, label: str) -> Tile:
    return Tile(fact=fact, value=cell.value, text=cell.text, label=label)


def ranking_table(ranking: Ranking) -> Table:
    """The methods that protect one unit; only those that promise the same are ranked."""
    promises = sorted({one.runs[0].promise for one in ranking.ranks if one.runs[0].protects})
    meant = [f"Epsilon: {promise}; means over seeds." for promise in promises]
    return Table(
        name=f"standings-{ranking.unit}",
        title=f"Protecting a {ranking.unit}",
        headings=(
            "method", "accuracy, %", "gap to best", "p", "against", "epsilon, median",
            "epsilon, largest", "left", "up",
        ),
        rows=[_rank_row(one) for one in ranking.ranks],
        kinds=[
            "reference" if one.runs[0].reference else "best" if one.best else ""
            for one in ranking.ranks
        ],
        notes=[*meant, *(f"{remark}." for remark in ranking.remarks)],
    )  # fmt: skip


def _rank_row(rank: Rank) -> list[Cell]:
    first, accuracies = rank.runs[0], rank.accuracies
    mean, results = statistics.mean(accuracies), [run.result for run in rank.runs]
    spread = f" ± {100 * statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
    spent = [result.epsilon.spent for result in results if result.epsilon]
    left = statistics.mean(len(result.clients_left) for result in results)
    up = statistics.mean(result.bytes_up for result in results)
    return [
        Cell(rank.label),
        Cell(f"{100 * mean:.1f}{spread}", mean),
        _gap(rank),
        Cell("-") if rank.p_value is None else Cell(f"{rank.p_value:.2g}", rank.p_value),
        Cell("nobody" if first.reference else str(first.promise.observer)),
        epsilon(statistics.mean(one.median for one in spent) if spent else None),
        epsilon(statistics.mean(one.largest for one in spent) if spent else None),
        Cell(f"{left:g}/{first.result.clients}"),
        Cell(words.size(up), up),
    ]


def _gap(rank: Rank) -> Cell:
    if rank.runs[0].reference:
        return Cell("reference")
    if rank.best:
        return Cell("best")
    alone = rank.gap is None or (rank.p_value is None and rank.gap == 0)
    return Cell("-") if alone or rank.gap is None else Cell(f"{100 * rank.gap:.1f}", rank.gap)


def sweep_tables(shown_: ReportInput) -> list[Table]:
    """Accuracy by case and method, one table per unit."""
    by_case = [{r.unit: r for r in case.rankings()} for case in shown_.cases]
    tables = []
    for unit, first in by_case[0].items():
        rows = []
        for case, rankings in zip(shown_.cases, by_case, strict=True):
            ranks = {one.label: one for one in rankings[unit].ranks}
            means = [(ranks[one.label], statistics.mean(ranks[one.label].accuracies))
                     for one in first.ranks]  # fmt: skip
            cells = [
                Cell(f"{100 * mean:.1f}{'*' if one.best else ''}", mean) for one, mean in means
            ]
            rows.append([*(Cell(str(value)) for value in case.values.values()), *cells])
        tables.append(
            Table(
                name=f"sweep-{unit}",
                title=f"Protecting a {unit}: accuracy, %",
                headings=[*shown_.varied, *(one.label for one in first.ranks)],
                rows=rows,
                names=len(shown_.varied),
            )
        )
    return tables


def site_table(label: str, run: ReportRun) -> Table:
    """What every site of a run may spend and has spent."""
    return Table(
        name=f"accounts-{label}",
        headings=("site", "rounds", "epsilon spent", "budget", "delta", "accountant"),
        rows=[
            [Cell(line.account), whole(line.rounds), epsilon(line.epsilon), epsilon(line.budget),
             delta(line.delta), Cell(line.accountant)]
            for line in run.result.statements
        ],
        notes=[f"{words.promise_of(run.result)} Seed {run.seed}; rounded up."],
    )  # fmt: skip


def group_table(meaning: Meaning, name: str) -> Table:
    """Epsilon for a person with several records, or whose data are at several sites."""
    unit, known = meaning.promise.unit, [(size, meaning.for_group(size)) for size in GROUPS]
    rows = [
        [Cell(str(size), size), epsilon(value) if math.isfinite(value) else Cell("no guarantee")]
        for size, value in known
    ]
    note = f"At delta {meaning.point.delta:g}, by group privacy; rounded up."
    heading = f"{unit}s of one person"
    return Table(name=f"groups-{name}", headings=(heading, "epsilon"), rows=rows, notes=[note])


# -- ledgers ---------------------------------------------------------------------------------------


def account_tiles(line: Statement) -> list[Tile]:
    """The budget of an account and what is spent of it; nothing where no budget bounds it."""
    if line.budget is None or not math.isfinite(line.epsilon):
        return []
    share = line.epsilon / line.budget
    return [
        _tile("budget", epsilon(line.budget), "epsilon of the budget"),
        _tile("spent", epsilon(line.epsilon), "epsilon spent so far"),
        _tile("share", Cell(f"{math.ceil(100 * share)} %", share), "of the budget"),
    ]


def account_table(lines: Sequence[Statement]) -> Table:
    """Every account against every adversary."""
    return Table(
        name="accounts",
        headings=(
            "account", "epsilon spent", "budget", "delta", "rounds", "unit", "against",
            "adjacency", "accountant",
        ),
        rows=[
            [Cell(line.account), epsilon(line.epsilon), epsilon(line.budget), delta(line.delta),
             whole(line.rounds), Cell(line.unit), Cell(line.observer), Cell(line.adjacency),
             Cell(line.accountant)]
            for line in lines
        ],
    )  # fmt: skip


def study_table(studies: Sequence[LedgerRun]) -> Table:
    """Every study that a ledger knows."""
    return Table(
        name="studies",
        headings=("study", "run", "first charge", "last charge", "last round charged"),
        rows=[
            [Cell(one.title), Cell(one.run), _day(one.first), _day(one.last),
             whole(None if one.last_round is None else one.last_round + 1)]
            for one in studies
        ],
        names=4,
    )  # fmt: skip


def plan_table(plans: Sequence[tuple[str, PricedPlan]]) -> Table:
    """Every plan of some accounts, and its price."""
    return Table(
        name="plans",
        title="Plans and their prices",
        headings=(
            "account", "run", "against", "rounds planned", "rounds charged", "epsilon", "delta",
        ),
        rows=[
            [Cell(account), Cell(plan.run), Cell(str(plan.observer)), whole(plan.releases),
             whole(plan.used), epsilon(plan.epsilon), delta(plan.priced_at)]
            for account, plan in plans
        ],
        names=3,
    )  # fmt: skip


def _day(at: float | None) -> Cell:
    if at is None:
        return Cell("-")
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return Cell(moment.strftime("%Y-%m-%d %H:%M UTC"))
