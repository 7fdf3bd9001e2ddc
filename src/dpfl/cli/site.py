"""``dpfl site``: a hospital's side of a federation, from nothing to a running site.

``init`` makes a site's folder, ``run`` takes part in studies until Ctrl-C, ``spend`` says what the
site has spent over all of them, ``evaluate`` tries a delivered model on the site's own records,
``withdraw`` takes a person or a row out of all studies.
What a site accepts stands in its own file, and its own ledger decides.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import dpfl.report as pages
from dpfl.cli import console as c, options as o
from dpfl.core.errors import DpflError

if TYPE_CHECKING:
    from dpfl.deploy.outcome import TriedModel
    from dpfl.deploy.site_status import SiteStatus
    from dpfl.engine.finish_scores import FinishScores
    from dpfl.privacy.statement import Statement

app = o.group("A site of a real federation: its data, its budget, its own ledger.")
FOLDER = o.arg("The site's folder.")
INSECURE = o.flag("--insecure", "No TLS, no keys. For a rehearsal on one machine.")


def warn_insecure(insecure: bool) -> None:
    """Say what --insecure means."""
    if insecure:
        what = "nothing is encrypted and nobody proves who they are"
        who = "anyone on the network can read models and uploads, and take part as any site"
        c.warn([f"--insecure: {what}; {who}"])


def until_stopped(folder: Path, command: Callable[[], str]) -> AbstractContextManager[None]:
    """End in order on Ctrl-C or a request to terminate; ``command`` continues from there.

    Service managers stop a process by SIGTERM, which is handled like Ctrl-C from here on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return c.interruptible(folder, lambda: f"continue with: {command()}")


@app.command()
def init(
    folder: Path = FOLDER,
    name: str = o.opt("The site's name in studies.", ..., "--id"),
    data: Path = o.opt("CSV or Parquet file with the site's records.", ...),
    schema: Path | None = o.opt("What its columns hold (TOML); copied into the folder."),
    epsilon: float = o.opt("The site's budget over all studies.", ...),
    delta: float = o.opt("Well below 1 / records.", ...),
    label: str | None = o.opt("Label column (default: the last)."),
    task: str | None = o.opt(
        "What studies learn: classification (the default), binary or regression."
    ),
    classes: int | None = o.opt("How many classes there are; servers are told (default: 2)."),
    server: str = o.opt("The server's address.", "127.0.0.1:9092"),
    unit: str | None = o.opt("record, client (the whole site), or the schema's word for a person."),
    per_study: float | None = o.opt("Epsilon for one study (default: all)."),
    filter_: str = o.opt("How studies add up: renyi, allotments or gaussian.", "renyi", "--filter"),
    trust_server: bool = o.flag("--trust-server", "A budget against the world only."),
    another_budget: bool = o.flag("--another-budget", "The records have a site already."),
) -> None:
    """Make a site: its file, its key, its ledger. Read the file: it decides what is accepted."""
    from dpfl.deploy.credentials import make_site_key
    from dpfl.deploy.records import LoadedSite, declare_targets, declare_unit
    from dpfl.rounds.members import data_flags

    targets = declare_targets(task, classes, schema=schema is not None)
    budget = {"epsilon": epsilon, "delta": delta, "per_study": per_study}
    unit = unit or declare_unit(schema)
    observer = "world" if trust_server else "server"
    records = data.absolute()
    if records.is_relative_to(folder.absolute()):  # so that they can be moved together
        records = records.relative_to(folder.absolute())
    values = {
        "site": {"id": name},
        "data": {"file": str(records), "label": label} | targets,
        "budget": {**budget, "unit": unit, "filter": filter_, "observer": observer},
        "policy": {"trust_server": trust_server},
        "server": {"address": server},
    }
    site = LoadedSite.create(folder, values, schema, another_budget=another_budget)
    public = make_site_key(folder / site.file.server.key)
    count = f"{site.member().shard.examples} training {site.unit}s"
    per = f"epsilon {epsilon:g} at delta {delta:g} per {unit}"
    c.out.print(f"Site '{name}': {count}, {site.targets_text}, {per}")
    c.warn([*site.flags(), *data_flags({name: site.member()})])
    if not site.mark.exists():
        c.warn([f"{site.mark} cannot be written: a second site on these records is not noticed"])
    c.note(f"Its file: {folder / 'site.toml'} (read it: it decides what the site accepts)")
    c.note(f"Send {public} to the server's operator; put the ca.crt you get into {folder}")
    c.note(f"Then: dpfl site run {folder}")


@app.command()
def run(folder: Path = FOLDER, insecure: bool = INSECURE) -> None:
    """Take part: connect to the server and answer it, within policy and budget, until Ctrl-C."""
    from dpfl.deploy.participation import take_part

    warn_insecure(insecure)
    with until_stopped(folder, lambda: f"dpfl site run {folder}"):
        take_part(folder, c.note, insecure=insecure)


@app.command()
def identity(folder: Path = FOLDER, json: bool = o.JSON) -> None:
    """Print the key that other sites pin, to take part in secure sums with this one."""
    from dpfl.deploy.site_folder import SiteFolder

    site = SiteFolder(folder)
    key = site.identity_key
    line = f'"{site.id}" = "{key}"'  # of a file, so it is not broken
    c.answer(json, {"site": site.id, "identity": key}, c.print_line, line)
    c.note("Others put this line into [secure_sum.members] of their site.toml")
    c.note("They must have it from you, not from the server: read it out to them")


@app.command()
def spend(
    folder: Path = FOLDER,
    page: Path | None = o.opt("Write a report for the ethics board (HTML)."),
    json: bool = o.JSON,
) -> None:
    """Print what the site has spent over all studies, against each adversary."""
    from dpfl.deploy.records import LoadedSite
    from dpfl.deploy.withdrawal import board_notes
    from dpfl.privacy.flags import Flag, RaisedFlag

    site = LoadedSite(folder)
    lines = site.spent()
    flags = site.flags()
    with closing(site.checked_ledger()) as ledger:
        if page is not None:
            title = f"Budget and spending of '{site.id}'"
            warnings = [*map(str, flags), *board_notes(site, ledger)]
            pages.write_ledger_page(ledger, page, title, warnings=warnings)
        if ledger.seeded_runs():
            flags.append(RaisedFlag(Flag.SEEDED, "some of it was a rehearsal"))
    c.warn(flags)
    c.answer(json, [line.to_dict() for line in lines], show_spent, lines, site.summed())
    c.note_files({"Page": page} if page else {})


def show_spent(lines: Sequence[Statement], summed: Sequence[str] = ()) -> None:
    """Print what a site has spent, against each adversary; ``summed`` are titles of studies whose
    server has others beside it.
    """
    headings = ("site", "rounds", "epsilon spent", "budget", "delta", "against")
    c.print_table(headings, [[*line.cells, line.observer] for line in lines])
    for one in lines[:1]:
        c.out.print(f"per {one.unit}, {one.adjacency} adjacency, by {one.accountant}; rounded up")
    c.print_lines(*summed)


@app.command()
def evaluate(
    folder: Path = FOLDER,
    run: str | None = o.opt("A study (default: the latest)."),
    model: Path | None = o.opt("Folder of a model brought by other means, with its study.toml."),
    metric: str | None = o.opt("Another metric than the study's."),
    json: bool = o.JSON,
) -> None:
    """Try the model of a study on the site's own test records. Nothing is sent.

    Where the model has a personal finish, a model of the site's own records alone, the study's
    model and both are compared.
    """
    from dpfl.deploy.finish import finish_of
    from dpfl.deploy.outcome import find_outcome
    from dpfl.deploy.records import LoadedSite

    site = LoadedSite(folder)
    outcome = find_outcome(folder, run, model)
    found = outcome.tried(site.id, site.federation(), metric)
    finish = finish_of(outcome, site, metric)
    told = {} if finish is None else {"finish": finish.to_dict()}
    c.answer(json, {**found.to_dict(), **told}, show_tried, found, finish)
    c.note("Measured without noise on own records: sharing it is a release that no ledger counts")


def show_tried(found: TriedModel, finish: FinishScores | None = None) -> None:
    """Print how good a model is on a site's test records, and what its personal finish is."""
    scores = found.scores
    words = found.scores.words
    told = f"{words.words} {words.show(scores.value)} on {found.test_records} records"
    c.out.print(f"{found.run} ({found.method}): {told}")
    if found.constant is not None:
        alone = f"{words.words} {words.show(found.constant)}"
        c.out.print(f"the same prediction for every record: {alone}")
    if others := scores.other_metrics():
        c.out.print(f"also: {others}")
    if finish is not None:
        c.out.print(finish.sentence)


@app.command()
def withdraw(
    folder: Path = FOLDER,
    person: str | None = o.opt("The id of the person who leaves."),
    line: int | None = o.opt("A line of the file as it stands, where units are rows."),
    yes: bool = o.flag("--yes", "Do not ask."),
) -> None:
    """Withdraw one unit from all studies, for good: a person, or a row where rows are units.

    Studies that have begun go on with a blank in its place; the next one counts without it.
    """
    from dpfl.deploy import withdrawal as w
    from dpfl.deploy.records import LoadedSite

    site = LoadedSite(folder)
    try:
        w.remove_traces(site)  # of a command that was killed
    except DpflError as error:
        c.note(str(error))
    planned = w.plan_withdrawal(site, person, line)
    c.out.print(f"Site '{site.id}' withdraws {planned.what}", markup=False)
    for run, title in planned.studies.items():
        c.out.print(f"  left blank from now on in {title} ({run})", markup=False)
    for run, title in planned.stopped.items():
        why = "already stopped, as its records changed (put them back first, if it is to go on)"
        c.out.print(f"  {why}: {title} ({run})", markup=False)
    c.note("What was released and charged before, and models elsewhere, stay as they are")
    question = "This cannot be undone. Withdraw it (--yes skips this question)?"
    if not (yes or typer.confirm(question)):
        c.note("Nothing was withdrawn")
        return
    w.withdraw(site, planned)
    c.out.print("Withdrawn. What the file holds of it may be deleted now")


@app.command()
def status(folder: Path = FOLDER, json: bool = o.JSON) -> None:
    """Say whether the site is running, which studies it has served, and what it has spent."""
    from dpfl.deploy.site_folder import SiteFolder
    from dpfl.deploy.site_status import SiteStatus

    now = SiteStatus.of(SiteFolder(folder))
    c.answer(json, now.to_dict(), _show, now)


def _show(now: SiteStatus) -> None:
    """Print the status of a site."""
    c.out.print(f"Site '{now.site}': {'running' if now.running else 'not running'}")
    if now.says:
        c.out.print(f"  {now.says}")
    for run, (title, last) in now.studies.items():
        done = "no round yet" if last is None else f"last charged round {last + 1}"
        c.out.print(f"  {title} ({run}): {done}")
        if run in now.finished:
            c.out.print(f"    {now.finished[run]}")
    for line in now.spent:
        if line.budget is not None:
            spent = f"epsilon {c.epsilon_text(line.epsilon)} of {line.budget:g} spent"
            c.out.print(f"  {spent} against the {line.observer}, per {line.unit}")
