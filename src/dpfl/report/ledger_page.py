"""The privacy report of a ledger for an ethics board: budgets, what was spent, and by which
studies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.ledger_reader import LedgerRun
from dpfl.privacy.statement import statements
from dpfl.report import tables, words
from dpfl.report.meaning import largest_of, meaning_of
from dpfl.report.rendering import Page, write_page
from dpfl.report.tables import Notice

FEW = 4
"""Statements that are written out as sentences; more are a table only."""


def write_ledger_page(
    ledger: Ledger,
    path: Path,
    title: str,
    delta: float | None = None,
    warnings: Sequence[str] = (),
) -> Path:
    """Write the report of a ledger, all of one moment, and return its path.

    ``delta`` states every epsilon at this delta instead of the budgets'; ``warnings`` are sentences
    that the ledger does not know of.
    """
    with ledger.snapshot():
        page = ledger_page(ledger, title, delta, warnings)
    return write_page(page, path)


def ledger_page(
    ledger: Ledger, title: str, delta: float | None = None, warnings: Sequence[str] = ()
) -> Page:
    """Who is protected from whom, the budgets, what is spent, and by which studies."""
    lines, studies = statements(ledger, delta), ledger.studies()
    accounts = list(dict.fromkeys(line.account for line in lines))
    few = len(lines) <= FEW
    explained = lines if few else [line for line in [largest_of(lines)] if line]
    found = [meaning for line in explained if (meaning := meaning_of(line, ledger))]
    meanings = [
        (meaning, tables.group_table(meaning, str(number)), meaning.charts(str(number)))
        for number, meaning in enumerate(found, start=1)
    ]
    plans = [(own, plan) for own in accounts for plan in ledger.plans(own)] if few else []
    values = {
        "flags": [Notice(warning, True) for warning in warnings] + _notices(studies),
        "accounts": accounts,
        "written_out": [(words.account(line), tables.account_tiles(line)) for line in lines]
        if few
        else [],
        "lead": f"{len(accounts)} accounts, {words.count(len(studies), 'study', 'studies')}.",
        "meanings": meanings,
        "account_table": tables.account_table(lines),
        "study_table": tables.study_table(studies),
        "plan_table": tables.plan_table(plans) if plans else None,
        "filter": words.FILTERS[ledger.filter],
        "chain": words.chain(ledger.head()),
    }
    charts = [chart for _, _, own in meanings for chart in own]
    return Page(title=title, template="ledger", values=values, charts=charts)


def _notices(studies: Sequence[LedgerRun]) -> list[Notice]:
    """Flags that studies raise, each with the study."""
    raised = [
        RaisedFlag(Flag.SEEDED, f"a rehearsal: {one.title}, {one.run}")
        for one in studies
        if one.seeded
    ]
    raised += [
        RaisedFlag(Flag.HYPOTHETICAL, one.run) for one in studies if "HYPOTHETICAL" in one.title
    ]
    return [Notice.of(one) for one in raised]
