"""``dpfl server``: the side that offers a study, gathers the sites and trains."""

from __future__ import annotations

import json as json_
import shutil
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import bytes_text, err, out, print_json, progress_bar, table
from dpfl.cli.site import INSECURE
from dpfl.core.errors import ConfigurationError, DpflError, FolderError, Interrupted, PeerError
from dpfl.core.files import write_safely
from dpfl.runs.deployment import LINK_PROCESS, STUDY_FILE, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.processes import noted_process

app = typer.Typer(
    no_args_is_help=True, help="The server of a real federation: a study, its sites, its rounds."
)

Folder = Annotated[Path, typer.Argument(help="The study's folder.", show_default=False)]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS, no keys. For a rehearsal on one machine.")
]


def _processes() -> Any:
    try:
        from dpfl.deploy import processes
    except ImportError as error:
        raise ConfigurationError(
            "Flower", "is not installed", "run: pip install 'dpfl[flower]'"
        ) from error
    return processes


@app.command()
def init(
    folder: Folder,
    file: Annotated[
        Path, typer.Option("--study", help="The study (TOML): what sites are offered.")
    ],
) -> None:
    """Make a study's folder: its file, certificates, and a place for the sites' public keys."""
    from dpfl.deploy.credentials import make_certificates

    processes = _processes()
    study = StudyFile.from_file(file)
    study.strategy()
    study.build_model()
    if (folder / STUDY_FILE).exists():
        raise FolderError(str(folder), "already holds a study", "name another folder")
    write_safely(folder / STUDY_FILE, study.to_toml().encode())
    make_certificates(folder / processes.CERTIFICATES, _names(study))
    (folder / processes.SITES).mkdir(exist_ok=True)
    processes.write_app(folder)
    out.print(
        f"Study '{study.study.name}': {study.method.name}, {study.run.rounds} rounds, {len(study.study.sites)} sites"
    )
    err.print(
        f"Give every site {folder / processes.CERTIFICATES / 'ca.crt'}, and nothing else from there",
        soft_wrap=True,
    )
    err.print(
        f"Put the sites' public keys into {folder / processes.SITES}/NAME.pub", soft_wrap=True
    )
    err.print(f"Then: dpfl server run {folder}", soft_wrap=True)


@app.command()
def renew(folder: Folder) -> None:
    """Make new certificates, valid for a year: under the names in [network]. Every site needs the
    new ca.crt.
    """
    from dpfl.deploy.credentials import make_certificates

    processes = _processes()
    if not (folder / STUDY_FILE).exists():
        raise FolderError(str(folder), "holds no study", "make one with dpfl server init")
    if noted_process(folder / LINK_PROCESS) is not None:
        raise FolderError(
            str(folder), "its server is running", "stop it first: sites would be cut off one by one"
        )
    if (folder / processes.CERTIFICATES).exists():
        shutil.rmtree(folder / processes.CERTIFICATES)
    make_certificates(
        folder / processes.CERTIFICATES, _names(StudyFile.from_file(folder / STUDY_FILE))
    )
    err.print(
        f"Give every site the new {folder / processes.CERTIFICATES / 'ca.crt'}", soft_wrap=True
    )


def _names(study: StudyFile) -> list[str]:
    names = dict.fromkeys([*study.network.names, study.network.host, "127.0.0.1"])
    return [name for name in names if name not in ("0.0.0.0", "::")]  # noqa: S104 - a name to be reached by, not to listen on


def _as_interrupt(*_: Any) -> None:
    """A polite request to end is one to end in order."""
    raise KeyboardInterrupt


@app.command()
def run(folder: Folder, insecure: Insecure = False, quiet: o.Quiet = False) -> None:
    """Gather the sites and train."""
    _refuse_ended(folder)
    if (folder / "enrolment.json").exists():
        raise FolderError(
            str(folder), "holds a study that has begun", f"go on with: dpfl server resume {folder}"
        )
    _serve(folder, insecure, quiet)


@app.command()
def resume(folder: Folder, insecure: Insecure = False, quiet: o.Quiet = False) -> None:
    """Go on with a study that was cut off: same sites, same ledger, from the last round that ended."""
    if not (folder / "enrolment.json").exists():
        raise FolderError(
            str(folder), "holds no study that has begun", f"begin it with: dpfl server run {folder}"
        )
    _refuse_ended(folder)
    _refuse_changed(folder)
    _serve(folder, insecure, quiet)


def _refuse_ended(folder: Path) -> None:
    if RunFolder(folder).summary.exists():
        raise FolderError(
            str(folder), "holds a study that has ended", f"see it with: dpfl server status {folder}"
        )


def _refuse_changed(folder: Path) -> None:
    """What sites have agreed to is what is gone on with."""
    begun = json_.loads((folder / "enrolment.json").read_text()).get("study")
    if begun is not None and begun != StudyFile.from_file(folder / STUDY_FILE).digest():
        raise FolderError(
            str(folder / STUDY_FILE),
            "is not the study that was begun",
            "put back what was changed since",
        )


def _go_on(folder: Path) -> str:
    """The command that goes on from here."""
    return f"dpfl server {'resume' if (folder / 'enrolment.json').exists() else 'run'} {folder}"


def _serve(folder: Path, insecure: bool, quiet: bool) -> None:
    processes = _processes()
    if not (folder / STUDY_FILE).exists():
        raise FolderError(str(folder), "holds no study", "make one with dpfl server init")
    study = StudyFile.from_file(folder / STUDY_FILE)
    if insecure:
        err.print(INSECURE, style="yellow")
    (folder / "failed.txt").unlink(missing_ok=True)
    processes.write_app(folder)
    signal.signal(signal.SIGTERM, _as_interrupt)
    link = processes.start_superlink(
        folder, study.network.host, study.network.port, insecure=insecure
    )
    write_safely(folder / LINK_PROCESS, str(link.inner.process.pid).encode())
    try:
        processes.write_connection(folder, link.port, insecure=insecure)
        (folder / "nodes.json").unlink(missing_ok=True)
        if not insecure:
            nodes, refused = processes.register_sites(folder)
            write_safely(folder / "nodes.json", json_.dumps(nodes).encode())
            for site, reason in refused.items():
                err.print(
                    f"key of '{site}' was not registered: {reason}", style="yellow", soft_wrap=True
                )
        # Not before the keys are known: a site that comes back early would be turned away for good.
        link.start_proxy(folder, study.network.host, study.network.port, insecure=insecure)
        run_id = processes.start_run(folder)
        err.print(
            f"Listening on {study.network.host}:{study.network.port}; waiting for {', '.join(study.study.sites)}"
        )
        _follow(folder, study, link, processes, run_id, quiet)
    except KeyboardInterrupt:
        raise Interrupted(str(folder), "stopped by you", f"go on with: {_go_on(folder)}") from None
    finally:
        link.end()
        (folder / LINK_PROCESS).unlink(missing_ok=True)
    show(folder)


def _follow(
    folder: Path, study: StudyFile, link: Any, processes: Any, run_id: str, quiet: bool
) -> None:
    """Wait for the end of the run, showing its rounds."""
    place = RunFolder(folder)
    asked = time.monotonic()
    with progress_bar() as bar:
        bar.disable = bar.disable or quiet
        shown = bar.add_task(study.study.name, total=study.run.rounds, note="waiting for sites")
        while not place.summary.exists():
            time.sleep(0.5)
            lines = place.read_lines(place.rounds)
            if lines:
                last = lines[-1]
                note = f"{len(last.get('arrived', []))} of {len(last.get('cohort', []))} sites answered"
                bar.update(shown, completed=last["round"] + 1, note=note)
            if (folder / "failed.txt").exists():
                code, sentence = (folder / "failed.txt").read_text().strip().split("\n", 1)
                raise _named(int(code), sentence)
            dead = link.dead()
            if dead is not None:
                said = f"ended ({dead.log_tail()[-200:]})"
                raise PeerError(dead.log.stem, said, f"go on with: {_go_on(folder)}")
            if time.monotonic() - asked > 60:  # a process of its own each time
                asked = time.monotonic()
                if processes.run_status(folder, run_id).startswith("finished:fail"):
                    raise PeerError(
                        "Flower",
                        "says that the run has failed",
                        f"see {link.inner.log}, then: {_go_on(folder)}",
                    )


def _named(code: int, sentence: str) -> DpflError:
    """The error that the server app met, with its own exit code."""
    where, _, rest = sentence.partition(": ")
    problem, _, remedy = rest.rpartition("; ")
    error = PeerError(where, problem or rest, remedy or "see the log")
    error.exit_code = code
    return error


@app.command()
def status(folder: Folder, json: o.Json = False) -> None:
    """Say how far the study is, who takes part, and what went wrong."""
    if not (folder / STUDY_FILE).exists():
        raise FolderError(str(folder), "holds no study", "make one with dpfl server init")
    place = RunFolder(folder)
    if json:
        lines = place.read_lines(place.rounds)
        summary = json_.loads(place.summary.read_text()) if place.summary.exists() else None
        study = StudyFile.from_file(folder / STUDY_FILE)
        print_json(
            {
                "study": study.study.name,
                "method": study.method.name,
                "running": noted_process(folder / LINK_PROCESS) is not None,
                "rounds": {"planned": study.run.rounds, "done": len(lines)},
                "last": lines[-1] if lines else None,
                "summary": summary,
            }
        )
        return
    show(folder)


def show(folder: Path) -> None:
    """Print the study's outcome, or how far it is."""
    study, place = StudyFile.from_file(folder / STUDY_FILE), RunFolder(folder)
    lines = place.read_lines(place.rounds)
    facts = table("", "", left=2)
    facts.add_row("study", f"{study.study.name} ({study.method.name})")
    facts.add_row("rounds", f"{len(lines)} of {study.run.rounds}")
    missed: dict[str, list[str]] = {}
    for line in lines:
        for site, reason in line.get("missing", {}).items():
            missed.setdefault(site, []).append(f"round {line['round'] + 1}: {reason}")
    for site in study.study.sites:
        own = missed.get(site, [])
        took = sum(site in line.get("arrived", []) for line in lines)
        facts.add_row(
            site,
            f"took part in {took} round(s)"
            + (f"; missed {len(own)} ({own[-1][:120]})" if own else ""),
        )
    lost = [line["round"] + 1 for line in lines if "lost" in line]
    if lost:
        facts.add_row("lost rounds", ", ".join(map(str, lost)))
    facts.add_row(
        "bytes up / down",
        " / ".join(bytes_text(sum(r.get(k, 0) for r in lines)) for k in ("bytes_up", "bytes_down")),
    )
    out.print(facts)
    if place.summary.exists():
        summary = json_.loads(place.summary.read_text())
        for stamp in summary["stamps"]:
            err.print(stamp, style="yellow")
        for site, reason in summary["refusals"].items():
            out.print(f"{site}: {reason}")
        for site, reason in summary.get("undelivered", {}).items():
            out.print(f"The model was not delivered to {site}: {reason}")
        if summary["rounds"]["ended_early"]:
            out.print(f"Ended early, {summary['rounds']['ended_early']}")
        out.print("What each site has spent is in its own ledger: dpfl site spend")
        err.print(f"Model: {place.model}")
