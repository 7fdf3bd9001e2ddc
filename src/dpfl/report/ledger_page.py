"""The privacy report of a ledger for an ethics board: budgets, what was spent, and by which
studies.

Every number is derived from the events in the ledger when the page is written. A site's report
covers all studies that it took part in; that of a simulated run covers every client of the run::

    ledger = Ledger.open("ledger.sqlite", read_only=True)
    write_ledger_page(ledger, Path("board.html"), "Privacy report of North Hospital")
"""

from collections.abc import Sequence
from pathlib import Path

from dpfl.core.promise import SUMMED
from dpfl.privacy.flags import Flag, RaisedFlag, flags_in
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.ledger_reader import LedgerRun
from dpfl.privacy.statement import statements
from dpfl.report.meaning import largest_of, meaning_of
from dpfl.report.rendering import Page, write_page

FEW = 4
"""Statements that are written out as sentences; more are a table only."""


def write_ledger_page(
    ledger: Ledger,
    path: Path,
    title: str,
    delta: float | None = None,
    warnings: Sequence[str] = (),
) -> Path:
    """Write the report of a ``ledger``, all of one moment, to ``path``, and return it.

    ``title`` heads it. It says who is protected from whom, the budgets, what is spent, and by which
    studies. ``delta`` states every epsilon at this delta instead of the budgets'; ``warnings`` are
    sentences that the ledger does not know of. Few statements are written out and explained one by
    one; of many, only the largest epsilon is explained.
    """
    with ledger.snapshot():
        lines = statements(ledger, delta)
        studies = ledger.studies()
        accounts = list(dict.fromkeys(line.account for line in lines))
        few = len(lines) <= FEW
        largest = largest_of(lines)
        explained = lines if few or largest is None else [largest]
        found = [meaning_of(line, str(n), ledger) for n, line in enumerate(explained, start=1)]
        meanings = [meaning for meaning in found if meaning is not None]
        values = {
            "flags": [(raised, "") for raised in _flags(studies)],
            "warnings": warnings,
            "few": few,
            "lines": lines,
            "accounts": len(accounts),
            "studies": studies,
            "summed": any(SUMMED in one.title for one in studies),
            "plans": [(own, plan) for own in accounts for plan in ledger.plans(own)] if few else [],
            "meanings": meanings,
            "filter": ledger.filter,
            "head": ledger.head(),
        }
    charts = [chart for meaning in meanings for chart in meaning.charts]
    return write_page(Page(title=title, template="ledger", values=values, charts=charts), path)


def _flags(studies: Sequence[LedgerRun]) -> list[RaisedFlag]:
    """Flags that studies raise, each with the study."""
    seeded = [
        (Flag.SEEDED, f"a rehearsal: {one.title}, {one.run}") for one in studies if one.seeded
    ]
    raised = [(flag, one.run) for one in studies for flag in flags_in(one.title)]
    return [RaisedFlag(flag, detail) for flag, detail in (*seeded, *raised)]
