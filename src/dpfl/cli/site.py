"""``dpfl site``: a hospital's side of a federation, from nothing to a running site with one file
and two commands.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import epsilon_text, err, out, print_json, table
from dpfl.core.errors import ConfigurationError, FolderError, Interrupted, PeerError
from dpfl.core.files import write_safely
from dpfl.privacy.statement import Statement
from dpfl.runs.deployment import SITE_FILE, SiteFile, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.processes import noted_process

app = typer.Typer(
    no_args_is_help=True, help="A site of a real federation: its data, its budget, its own ledger."
)

Folder = Annotated[Path, typer.Argument(help="The site's folder.", show_default=False)]
AGAIN = 3.0  # seconds between looks for a server that went away
INSECURE = (
    "--insecure: everything travels unencrypted, nobody proves who they are; whoever is on the network can read models and "
    "uploads, and take part as any site"
)


def _site(folder: Path) -> Any:
    try:
        from dpfl.deploy.site import Site
    except ImportError as error:
        raise ConfigurationError(
            "Flower", "is not installed", "run: pip install 'dpfl[flower]'"
        ) from error
    return Site(folder)


@app.command()
def init(
    folder: Folder,
    name: Annotated[str, typer.Option("--id", help="The site's name in studies.")],
    data: Annotated[str, typer.Option(help="CSV or Parquet file with the site's records.")],
    epsilon: Annotated[float, typer.Option(help="The site's budget over all studies.")],
    delta: Annotated[float, typer.Option(help="Well below 1 / records.")],
    label: Annotated[
        str | None, typer.Option(help="Label column (default: the last).", show_default=False)
    ] = None,
    classes: Annotated[int, typer.Option(help="How many classes there are; servers are told.")] = 2,
    server: Annotated[str, typer.Option(help="The server's address.")] = "127.0.0.1:9092",
    unit: Annotated[str, typer.Option(help="record, or client: the whole site.")] = "record",
    per_study: Annotated[
        float | None,
        typer.Option(
            help="The part of epsilon for one study (default: all of it).", show_default=False
        ),
    ] = None,
    filter_: Annotated[
        str,
        typer.Option(
            "--filter",
            help="How studies add up: renyi (pay round by round), allotments or gaussian.",
        ),
    ] = "renyi",
    trust_server: Annotated[
        bool,
        typer.Option(
            "--trust-server", help="A budget against the world only: the server may see everything."
        ),
    ] = False,
) -> None:
    """Make a site: its file, its key, its ledger. Read the file: it decides what the site accepts."""
    from dpfl.deploy.credentials import make_site_key

    if (folder / SITE_FILE).exists():
        raise FolderError(str(folder), "already holds a site", "run it, or name another folder")
    values: dict[str, Any] = {
        "site": {"id": name},
        "data": {
            "file": str(Path(data).absolute()),
            "classes": classes,
            **({"label": label} if label else {}),
        },
        "budget": {
            "epsilon": epsilon,
            "delta": delta,
            "unit": unit,
            "observer": "world" if trust_server else "server",
            "filter": filter_,
            **({"per_study": per_study} if per_study is not None else {}),
        },
        "policy": {"trust_server": trust_server},
        "server": {"address": server},
    }
    file = SiteFile.from_dict(values, "options")
    write_safely(folder / SITE_FILE, file.to_toml().encode())
    try:
        site = _site(folder)
        site.member()  # the data must be readable before anything is promised
        site.prepare()
    except Exception:
        (folder / SITE_FILE).unlink()
        raise
    public = make_site_key(folder / file.server.key)
    records = site.member().shard.examples
    out.print(
        f"Site '{name}': {records} training records, epsilon {epsilon:g} at delta {delta:g} per {unit}"
    )
    for warning in site.warnings():
        err.print(warning, style="yellow", soft_wrap=True)
    err.print(
        f"Its file: {folder / SITE_FILE} (read it: it decides what the site accepts)",
        soft_wrap=True,
    )
    err.print(
        f"Send to the server's operator: {public}; put the ca.crt you get into {folder}",
        soft_wrap=True,
    )
    err.print(f"Then: dpfl site run {folder}", soft_wrap=True)


@app.command()
def run(
    folder: Folder,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no keys. For a rehearsal on one machine.")
    ] = False,
) -> None:
    """Take part: connect to the server and answer it, within policy and budget, until Ctrl-C."""
    site = _site(folder)
    from dpfl.deploy import processes

    site.ledger().close()  # a missing or damaged ledger is refused before anything else
    site.member()
    server = site.file.server
    if insecure:
        err.print(INSECURE, style="yellow")
    processes.check_server(server.address, folder / server.certificate, insecure=insecure)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        with RunFolder(folder).locked():
            _take_part(folder, site, processes, insecure=insecure)
    except KeyboardInterrupt:
        raise Interrupted(
            str(folder), "stopped by you", f"go on with: dpfl site run {folder}"
        ) from None


def _take_part(folder: Path, site: Any, processes: Any, *, insecure: bool) -> None:
    """Until Ctrl-C, or until the server turns the site away."""
    server = site.file.server
    certificate, key = folder / server.certificate, folder / server.key
    while True:
        started = processes.start_supernode(
            folder, server.address, certificate, key, insecure=insecure
        )
        try:
            write_safely(folder / "supernode.pid", str(started.process.pid).encode())
            err.print(
                f"Site '{site.id}' takes part at {server.address}; Ctrl-C ends it, nothing is lost",
                soft_wrap=True,
            )
            while started.process.poll() is None:
                time.sleep(0.5)
            if processes.was_rejected(started) or started.process.returncode not in (0, 1):
                raise processes.ended_why(started)
        finally:
            started.end()
            (folder / "supernode.pid").unlink(missing_ok=True)
        err.print(
            "the server went away; waiting for it to come back (Ctrl-C ends it)", soft_wrap=True
        )
        _wait_for_server(processes, server.address, certificate, insecure)


def _wait_for_server(processes: Any, address: str, certificate: Path, insecure: bool) -> None:
    told = ""
    while True:
        time.sleep(AGAIN)
        try:
            processes.check_server(address, certificate, insecure=insecure)
            return
        except PeerError as error:
            if "cannot be reached" not in str(error) and str(error) != told:
                told = str(error)  # somebody answers, and is not whom we look for
                err.print(told, style="yellow", soft_wrap=True)


@app.command()
def spend(
    folder: Folder,
    page: Annotated[
        Path | None,
        typer.Option(help="Write it as a page for the ethics board (HTML).", show_default=False),
    ] = None,
    json: o.Json = False,
) -> None:
    """Print what the site has spent, over all studies, and against whom."""
    site = _site(folder)
    lines = site.spent()
    ledger = site.ledger()
    try:
        seeded = ledger.seeded_runs()
        if page is not None:
            from dpfl.report.ledger_page import write_ledger_page

            write_ledger_page(
                ledger, page, f"What '{site.id}' has granted and spent", stamps=site.warnings()
            )
    finally:
        ledger.close()
    for warning in site.warnings():
        err.print(warning, style="yellow", soft_wrap=True)
    if seeded:
        err.print(
            "NOT PRIVATE: SEEDED (some of it was a rehearsal whose noise can be subtracted)",
            style="yellow",
        )
    if json:
        print_json([line.to_dict() for line in lines])
        return
    show_spent(lines)
    if page is not None:
        err.print(f"Page: {page}", soft_wrap=True)


def show_spent(lines: Sequence[Statement]) -> None:
    """Print what a site has spent, against everyone it was billed against."""
    found = table("site", "rounds", "epsilon spent", "budget", "delta", "against")
    for line in lines:
        granted = "-" if line.budget is None else epsilon_text(line.budget)
        delta = "-" if line.delta is None else f"{line.delta:g}"
        found.add_row(
            line.account,
            str(line.rounds),
            epsilon_text(line.epsilon),
            granted,
            delta,
            line.observer,
        )
    out.print(found)
    for line in lines[:1]:
        out.print(f"per {line.unit}, {line.adjacency} adjacency, by {line.accountant}; rounded up")


@app.command()
def evaluate(
    folder: Folder,
    run: Annotated[
        str | None, typer.Option(help="A study (default: the latest).", show_default=False)
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model brought by hand.", show_default=False)
    ] = None,
    study: Annotated[Path | None, typer.Option(help="Its study.toml.", show_default=False)] = None,
    json: o.Json = False,
) -> None:
    """Try the model of a study that has ended on the site's own test records. For your own eyes:
    nothing is sent.
    """
    site = _site(folder)
    from dpfl.deploy.outcome import Outcome, outcomes

    if (model is None) != (study is None):
        raise ConfigurationError(
            "options", "--model and --study belong together", "give both, or neither"
        )
    if model is not None and run is not None:
        raise ConfigurationError(
            "--run", "a model was named as well", "give --run, or --model and --study"
        )
    if model is not None and study is not None:
        chosen = Outcome(name=str(model), study=StudyFile.from_file(study), model=model)
    else:
        known = {outcome.name: outcome for outcome in outcomes(folder)}
        if not known:
            raise FolderError(
                str(folder),
                "has no model yet",
                "wait for a study's end, or give --model and --study",
            )
        name = list(known)[-1] if run is None else run
        if name not in known:
            raise ConfigurationError(
                "--run", f"there is no model of '{name}'", f"name one of: {', '.join(known)}"
            )
        chosen = known[name]
    found = chosen.tried(site.id, site.federation())
    if json:
        print_json(found)
        return
    show_tried(found)
    err.print(
        "Measured without noise on records of this site: to pass it on is a release that no ledger counts"
    )


def show_tried(found: Mapping[str, Any]) -> None:
    """Print how good a model is on a site's test records."""
    about = f"{found['run']} ({found['method']})"
    out.print(f"{about}: right on {found['accuracy']:.1%} of {found['test_records']} records")
    out.print(f"always naming the commonest class: {found['commonest_class']:.1%}")


@app.command()
def status(folder: Folder, json: o.Json = False) -> None:
    """Say whether the site is connected, which studies it has served, and what is left of its
    budget.
    """
    site = _site(folder)
    ledger = site.ledger()
    try:
        studies = ledger.titles()
        rounds = {run: ledger.last_round(run) for run in studies}
    finally:
        ledger.close()
    running = noted_process(folder / "supernode.pid") is not None
    lines = site.spent()
    told = {
        "site": site.id,
        "running": running,
        "studies": [
            {"run": run, "title": title, "last_round": rounds[run]}
            for run, title in studies.items()
        ],
        "spent": [line.to_dict() for line in lines],
    }
    if json:
        print_json(told)
        return
    out.print(f"Site '{site.id}': {'connected' if running else 'not running'}")
    for run, title in studies.items():
        last = rounds[run]
        out.print(
            f"  {title} ({run}): {'no round yet' if last is None else f'last charged round {last + 1}'}"
        )
    for line in lines:
        if line.budget is not None:
            spent = epsilon_text(line.epsilon)
            out.print(
                f"  epsilon {spent} of {line.budget:g} spent against the {line.observer}, per {line.unit}"
            )


def _as_interrupt(*_: Any) -> None:
    """A polite request to end is one to end in order."""
    raise KeyboardInterrupt
