"""``dpfl site``: a hospital's side of a federation, from nothing to a running site.

``init`` makes a site's folder, ``run`` takes part in studies until Ctrl-C, ``spend`` says what the
site has spent over all of them, ``evaluate`` tries a delivered model on the site's own records.
What a site accepts stands in its own file, and its own ledger decides.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import epsilon_text, err, out, print_json, table
from dpfl.core.errors import Interrupted
from dpfl.privacy.flags import Flag, RaisedFlag
from dpfl.privacy.statement import Statement

if TYPE_CHECKING:
    from dpfl.deploy.outcome import TriedModel

app = typer.Typer(
    no_args_is_help=True, help="A site of a real federation: its data, its budget, its own ledger."
)
Folder = Annotated[Path, typer.Argument(help="The site's folder.", show_default=False)]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS, no keys. For a rehearsal on one machine.")
]


def say(sentence: str) -> None:
    """Print a note for the person at the terminal."""
    err.print(sentence, soft_wrap=True)


def warn(warnings: Iterable[RaisedFlag | str]) -> None:
    """Print what must not be overlooked."""
    for warning in warnings:
        err.print(str(warning), style="yellow", soft_wrap=True)


def warn_insecure(insecure: bool) -> None:
    """Say what --insecure means."""
    if insecure:
        what = "nothing is encrypted and nobody proves who they are"
        who = "anyone on the network can read models and uploads, and take part as any site"
        warn([f"--insecure: {what}; {who}"])


@contextmanager
def interruptible(folder: Path, command: Callable[[], str]) -> Iterator[None]:
    """End in order on Ctrl-C or a request to terminate; ``command`` continues from there."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(str(folder), "stopped by you", f"continue with: {command()}") from None


@app.command()
def init(
    folder: Folder,
    name: Annotated[str, typer.Option("--id", help="The site's name in studies.")],
    data: Annotated[Path, typer.Option(help="CSV or Parquet file with the site's records.")],
    epsilon: Annotated[float, typer.Option(help="The site's budget over all studies.")],
    delta: Annotated[float, typer.Option(help="Well below 1 / records.")],
    label: Annotated[str | None, typer.Option(help="Label column (default: the last).")] = None,
    classes: Annotated[int, typer.Option(help="How many classes there are; servers are told.")] = 2,
    server: Annotated[str, typer.Option(help="The server's address.")] = "127.0.0.1:9092",
    unit: Annotated[str, typer.Option(help="record, or client: the whole site.")] = "record",
    per_study: Annotated[
        float | None, typer.Option(help="Epsilon for one study (default: all).")
    ] = None,
    filter_: Annotated[
        str, typer.Option("--filter", help="How studies add up: renyi, allotments or gaussian.")
    ] = "renyi",
    trust_server: Annotated[
        bool, typer.Option("--trust-server", help="A budget against the world only.")
    ] = False,
) -> None:
    """Make a site: its file, its key, its ledger. Read the file: it decides what is accepted."""
    from dpfl.deploy.credentials import make_site_key
    from dpfl.deploy.records import LoadedSite

    records: dict[str, Any] = {"file": str(data.absolute()), "classes": classes}
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "unit": unit, "filter": filter_}
    budget["observer"] = "world" if trust_server else "server"
    values = {
        "site": {"id": name},
        "data": records if label is None else {**records, "label": label},
        "budget": budget if per_study is None else {**budget, "per_study": per_study},
        "policy": {"trust_server": trust_server},
        "server": {"address": server},
    }
    site = LoadedSite.create(folder, values)
    public = make_site_key(folder / site.file.server.key)
    count, per = site.member().shard.examples, f"epsilon {epsilon:g} at delta {delta:g} per {unit}"
    out.print(f"Site '{name}': {count} training records, {per}")
    warn(site.flags())
    say(f"Its file: {folder / 'site.toml'} (read it: it decides what the site accepts)")
    say(f"Send {public} to the server's operator; put the ca.crt you get into {folder}")
    say(f"Then: dpfl site run {folder}")


@app.command()
def run(folder: Folder, insecure: Insecure = False) -> None:
    """Take part: connect to the server and answer it, within policy and budget, until Ctrl-C."""
    from dpfl.deploy.participation import take_part

    warn_insecure(insecure)
    with interruptible(folder, lambda: f"dpfl site run {folder}"):
        take_part(folder, say, insecure=insecure)


@app.command()
def spend(
    folder: Folder,
    page: Annotated[
        Path | None, typer.Option(help="Write a report for the ethics board (HTML).")
    ] = None,
    json: o.Json = False,
) -> None:
    """Print what the site has spent over all studies, against each adversary."""
    from dpfl.deploy.records import LoadedSite

    site = LoadedSite(folder)
    lines, flags = site.spent(), site.flags()
    with closing(site.ledger()) as ledger:
        seeded = ledger.seeded_runs()
        if page is not None:
            from dpfl.report.ledger_page import write_ledger_page

            title = f"Budget and spending of '{site.id}'"
            write_ledger_page(ledger, page, title, warnings=[str(flag) for flag in flags])
    warn([*flags, *([RaisedFlag(Flag.SEEDED, "some of it was a rehearsal")] if seeded else [])])
    if json:
        print_json([line.to_dict() for line in lines])
        return
    show_spent(lines)
    if page is not None:
        say(f"Page: {page}")


def show_spent(lines: Sequence[Statement]) -> None:
    """Print what a site has spent, against each adversary."""
    found = table("site", "rounds", "epsilon spent", "budget", "delta", "against")
    for line in lines:
        budget = "-" if line.budget is None else epsilon_text(line.budget)
        delta = "-" if line.delta is None else f"{line.delta:g}"
        spent, rounds = epsilon_text(line.epsilon), str(line.rounds)
        found.add_row(line.account, rounds, spent, budget, delta, line.observer)
    out.print(found)
    for line in lines[:1]:
        out.print(f"per {line.unit}, {line.adjacency} adjacency, by {line.accountant}; rounded up")


@app.command()
def evaluate(
    folder: Folder,
    run: Annotated[str | None, typer.Option(help="A study (default: the latest).")] = None,
    model: Annotated[Path | None, typer.Option(help="A model brought by other means.")] = None,
    study: Annotated[Path | None, typer.Option(help="Its study.toml.")] = None,
    json: o.Json = False,
) -> None:
    """Try the model of a study on the site's own test records. Nothing is sent."""
    from dpfl.deploy.outcome import find_outcome
    from dpfl.deploy.records import LoadedSite

    site = LoadedSite(folder)
    found = find_outcome(folder, run, model, study).tried(site.id, site.federation())
    if json:
        print_json(found.to_dict())
        return
    show_tried(found)
    say("Measured without noise on own records: sharing it is a release that no ledger counts")


def show_tried(found: TriedModel) -> None:
    """Print how good a model is on a site's test records."""
    right = f"right on {found.scores.accuracy:.1%} of {found.test_records} records"
    out.print(f"{found.run} ({found.method}): {right}")
    out.print(f"always naming the most common class: {found.commonest_class:.1%}")


@app.command()
def status(folder: Folder, json: o.Json = False) -> None:
    """Say whether the site is connected, which studies it has served, and what it has spent."""
    from dpfl.deploy.site_folder import SiteFolder, SiteStatus

    now = SiteStatus.of(SiteFolder(folder))
    if json:
        print_json(now.to_dict())
        return
    out.print(f"Site '{now.site}': {'connected' if now.running else 'not running'}")
    for run, (title, last) in now.studies.items():
        done = "no round yet" if last is None else f"last charged round {last + 1}"
        out.print(f"  {title} ({run}): {done}")
    for line in now.spent:
        if line.budget is not None:
            spent = f"epsilon {epsilon_text(line.epsilon)} of {line.budget:g} spent"
            out.print(f"  {spent} against the {line.observer}, per {line.unit}")
