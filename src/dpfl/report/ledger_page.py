"""The page of a ledger: what was granted and spent over all studies, for a board, from the ledger alone."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

from dpfl.core.files import write_safely
from dpfl.privacy.accountant import shown
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.readings import Studied
from dpfl.privacy.statement import Statement, statements
from dpfl.report import sections, words
from dpfl.report.page import Page, render

FEW = 4  # statements that are told in sentences; more are a table only


def write_ledger_page(
    ledger: Ledger, path: Path, title: str, delta: float | None = None, stamps: Sequence[str] = ()
) -> Path:
    """Write the page; ``stamps`` are what whoever asks knows beyond the ledger."""
    page = ledger_page(statements(ledger, delta), ledger.studies(), title, stamps)
    write_safely(path, render(page).encode())
    return path


def ledger_page(lines: Sequence[Statement], studies: Sequence[Studied], title: str, stamps: Sequence[str] = ()) -> Page:
    """Who is protected from whom, what was granted, what is spent, and by which studies."""
    parts = {
        "summary": _summary(lines, studies, stamps),
        "accounts": _accounts(lines),
        "studies": _studies(studies),
        "guarantees": "<h2>What is guaranteed, and what is not</h2>"
        + sections.bullet_list(words.LEDGER_GUARANTEES)
        + "<h3>Not covered</h3>"
        + sections.bullet_list(words.LEDGER_LIMITS),
    }
    return Page(title=title, parts=parts, charts=[])


def _summary(lines: Sequence[Statement], studies: Sequence[Studied], known: Sequence[str]) -> str:
    stamps = [*known, *(f"NOT PRIVATE: SEEDED (a rehearsal: {one.title}, {one.run})" for one in studies if one.seeded)]
    stamps += [f"HYPOTHETICAL: grants beside {one.run} were raised" for one in studies if "HYPOTHETICAL" in one.title]
    body = "<h2>In short</h2>" + "".join(f'<div class="stamp">{sections.text(stamp)}</div>' for stamp in stamps)
    if not lines:
        return body + sections.paragraph(
            "Nothing was granted here, and nothing was charged. What a site has spent is in the site's own ledger."
        )
    if len(lines) > FEW:
        accounts = len({line.account for line in lines})
        return body + sections.paragraph(f"{accounts} accounts, {_count(len(studies), 'study', 'studies')}.")
    for line in lines:
        body += _told(line, studies)
    return body


def _told(line: Statement, studies: Sequence[Studied]) -> str:
    told = line.to_dict()
    took = [one for one in studies if one.last_round is not None]
    against = f"against {words.OBSERVER[line.observer]}"
    rounds = f"in {_count(line.rounds, 'round', 'rounds')} of {_count(len(took), 'study', 'studies')}"
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
    whom = "each single record" if line.unit == "record" else "its whole contribution"
    if line.granted is None:
        sentence = f"Nothing was granted{at} {against}. '{line.account}' {spent}{at if line.rounds else ''}."
    else:
        sentence = (
            f"'{line.account}' granted epsilon {shown(line.granted)}{at} to protect {whom} {against}, over all studies "
            f"together. It {spent}."
        )
    body = sections.paragraph(sentence)
    if line.granted is not None and math.isfinite(line.epsilon):
        share = line.epsilon / line.granted
        tiles = [
            sections.tile("granted", told["granted"], shown(line.granted), "epsilon granted"),
            sections.tile("spent", told["epsilon"], shown(line.epsilon), "epsilon spent so far"),
            sections.tile("share", share, f"{math.ceil(100 * share)} %", "of the grant"),
        ]
        body += f'<div class="tiles">{"".join(tiles)}</div><progress max="1" value="{min(share, 1):.4f}"></progress>'
    if line.rounds and math.isfinite(line.epsilon):
        body += sections.paragraph(words.meaning(told, line.epsilon, line.delta))
    return body


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _accounts(lines: Sequence[Statement]) -> str:
    rows = []
    for line in lines:
        told = line.to_dict()
        epsilon = "infinite" if math.isinf(line.epsilon) else shown(line.epsilon)
        granted = "-" if line.granted is None else (shown(line.granted), line.granted)
        delta = "-" if line.delta is None else f"{line.delta:g}"
        meaning = (line.unit, line.observer, line.adjacency, line.accountant)
        rows.append(
            [line.account, (epsilon, told["epsilon"]), granted, delta, (str(line.rounds), line.rounds), *meaning]
        )
    headings = ("account", "epsilon spent", "granted", "delta", "rounds", "unit", "against", "adjacency", "accountant")
    return "<h2>Every account</h2>" + sections.table(headings, rows, name="accounts")


def _studies(studies: Sequence[Studied]) -> str:
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


def _day(at: float | None) -> str:
    return "-" if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
