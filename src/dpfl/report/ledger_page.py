"""The privacy report of a ledger for an ethics board: budgets, what was spent, and by which
studies.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.files import write_safely
from dpfl.privacy.accountant import shown
from dpfl.privacy.chain import Head
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.ledger_reader import LedgerRun, PricedPlan
from dpfl.privacy.statement import Statement, statements
from dpfl.report import sections, words
from dpfl.report.page import Page, render

FEW = 4  # statements that are written out as sentences; more are a table only

_FILTERS = {
    "allotments": "Each study is priced as a whole when it is planned, and the prices add up. A study that "
    "stops early gets nothing back.",
    "renyi": "Each round is paid for when it takes place, under a Renyi filter with orders fixed beforehand.",
    "gaussian": "Each round is paid for when it takes place, under the exact filter for Gaussian noise "
    "without sampling.",
}


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """Everything the page shows, read from the ledger at one moment."""

    title: str
    lines: Sequence[Statement]
    studies: Sequence[LedgerRun]
    plans: Sequence[tuple[str, PricedPlan]]
    filter: str
    head: Head
    stamps: Sequence[str] = ()


def write_ledger_page(
    ledger: Ledger, path: Path, title: str, delta: float | None = None, stamps: Sequence[str] = ()
) -> Path:
    """Write the page, all of one moment; ``stamps`` are warnings that the ledger does not know of."""
    with ledger.snapshot():
        lines = statements(ledger, delta)
        accounts = list(dict.fromkeys(line.account for line in lines))
        few = accounts if len(lines) <= FEW else []
        report = LedgerReport(
            title=title,
            lines=lines,
            studies=ledger.studies(),
            plans=[(account, plan) for account in few for plan in ledger.plans(account)],
            filter=ledger.filter,
            head=ledger.head(),
            stamps=stamps,
        )
    write_safely(path, render(ledger_page(report)).encode())
    return path


def ledger_page(report: LedgerReport) -> Page:
    """Who is protected from whom, the budgets, what is spent, and by which studies."""
    parts = {
        "summary": _summary(report),
        "accounts": _accounts(report.lines),
        "studies": _studies(report.studies) + _plans(report),
        "integrity": _integrity(report),
        "guarantees": "<h2>Guarantees and assumptions</h2>"
        + sections.bullet_list(words.LEDGER_GUARANTEES)
        + "<h3>Not covered</h3>"
        + sections.bullet_list(words.LEDGER_LIMITS),
    }
    return Page(title=report.title, parts=parts, charts=[])


def _summary(report: LedgerReport) -> str:
    lines, studies = report.lines, report.studies
    seeded = [
        f"NOT PRIVATE: SEEDED (a rehearsal: {one.title}, {one.run})"
        for one in studies
        if one.seeded
    ]
    raised = [
        f"HYPOTHETICAL: budgets beside {one.run} were raised"
        for one in studies
        if "HYPOTHETICAL" in one.title
    ]
    stamps = [*report.stamps, *seeded, *raised]
    body = "<h2>Summary</h2>" + "".join(
        f'<div class="stamp">{sections.text(stamp)}</div>' for stamp in stamps
    )
    if not lines:
        return body + sections.paragraph(
            "No budget was set here, and nothing was charged. What a site has spent is in its own ledger."
        )
    if len(lines) > FEW:
        accounts = len({line.account for line in lines})
        return body + sections.paragraph(
            f"{accounts} accounts, {_count(len(studies), 'study', 'studies')}."
        )
    for line in lines:
        body += _in_words(line)
    return body


def _in_words(line: Statement) -> str:
    values = line.to_dict()
    against = f"against {words.OBSERVER[line.observer]}"
    rounds = (
        f"in {_count(line.rounds, 'round', 'rounds')} of {_count(line.studies, 'study', 'studies')}"
    )
    if line.rounds == 0 and line.epsilon == 0:
        spent = "has spent nothing yet"
    elif line.rounds == 0:  # a plan counts as a whole once it is committed
        aside = f"has set aside epsilon {shown(line.epsilon)}, rounded up, for what is planned"
        spent = f"{aside}, and released nothing yet"
    elif math.isinf(line.epsilon):
        spent = f"has no protection left {against}: what it sent {rounds} bounds nothing"
    else:
        spent = f"has spent epsilon {shown(line.epsilon)}, rounded up, {rounds}"
    at = "" if line.delta is None else f" at delta {line.delta:g}"
    whom = "each record" if line.unit == "record" else "its whole contribution"
    if line.budget is None:
        sentence = (
            f"No budget is set{at} {against}. '{line.account}' {spent}{at if line.studies else ''}."
        )
    else:
        sentence = (
            f"'{line.account}' has a budget of epsilon {shown(line.budget)}{at} that protects {whom} "
            f"{against}, over all studies together. It {spent}."
        )
    if line.guarantee > line.epsilon and line.rounds:
        sentence += (
            " Studies pay round by round and may stop by looking at what came out, so what is guaranteed is the budget: "
            f"epsilon {shown(line.guarantee)}. What is spent so far decides what is still admitted."
        )
    body = sections.paragraph(sentence)
    if line.budget is not None and math.isfinite(line.epsilon):
        share = line.epsilon / line.budget
        tiles = [
            sections.tile("budget", values["budget"], shown(line.budget), "epsilon of the budget"),
            sections.tile("spent", values["epsilon"], shown(line.epsilon), "epsilon spent so far"),
            sections.tile("share", share, f"{math.ceil(100 * share)} %", "of the budget"),
        ]
        body += f'<div class="tiles">{"".join(tiles)}</div>'
        body += f'<progress max="1" value="{min(share, 1):.4f}"></progress>'
    if line.studies and math.isfinite(line.epsilon):
        body += sections.paragraph(words.meaning(values, line.epsilon, line.delta))
    return body


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _accounts(lines: Sequence[Statement]) -> str:
    rows = []
    for line in lines:
        values = line.to_dict()
        granted = "-" if line.budget is None else (shown(line.budget), line.budget)
        delta = "-" if line.delta is None else f"{line.delta:g}"
        meaning = (line.unit, line.observer, line.adjacency, line.accountant)
        spent = (shown(line.epsilon), values["epsilon"])
        rows.append(
            [line.account, spent, granted, delta, (str(line.rounds), line.rounds), *meaning]
        )
    headings = (
        "account",
        "epsilon spent",
        "budget",
        "delta",
        "rounds",
        "unit",
        "against",
        "adjacency",
        "accountant",
    )
    return "<h2>Every account</h2>" + sections.table(headings, rows, name="accounts")


def _studies(studies: Sequence[LedgerRun]) -> str:
    rows = [
        [
            one.title,
            one.run,
            _day(one.first),
            _day(one.last),
            "-" if one.last_round is None else (str(one.last_round + 1), one.last_round + 1),
        ]
        for one in studies
    ]
    headings = ("study", "run", "first charge", "last charge", "last round charged")
    return "<h2>Studies</h2>" + sections.table(headings, rows, name="studies", words_first=4)


def _plans(report: LedgerReport) -> str:
    if not report.plans:
        return ""
    rows = [
        [
            account,
            plan.run,
            str(plan.observer),
            (str(plan.releases), plan.releases),
            (str(plan.used), plan.used),
            (shown(plan.epsilon), plan.epsilon),
            "-" if plan.priced_at is None else f"{plan.priced_at:g}",
        ]
        for account, plan in report.plans
    ]
    headings = ("account", "run", "against", "rounds planned", "rounds charged", "epsilon", "delta")
    return "<h3>Plans and their prices</h3>" + sections.table(
        headings, rows, name="plans", words_first=3
    )


def _integrity(report: LedgerReport) -> str:
    head = (
        f"This report was made from a ledger of {_count(report.head.number, 'entry', 'entries')}. They "
        "form a hash chain, which was checked when the ledger was opened. The hash of the newest entry is "
        f"{report.head.digest}. Keep this page: dpfl ledger verify FILE --head HASH tells whether a later "
        "copy of the ledger still contains that entry."
    )
    return (
        "<h2>Ledger</h2>" + sections.paragraph(_FILTERS[report.filter]) + sections.paragraph(head)
    )


def _day(at: float | None) -> str:
    return (
        "-"
        if at is None
        else datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    )
