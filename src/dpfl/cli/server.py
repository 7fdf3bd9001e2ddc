"""``dpfl server``: the side that offers a study, gathers the sites and trains.

``init`` makes a folder with certificates from a study file, ``run`` serves the study to its last
round, ``resume`` goes on after a crash, ``status`` says how far it is. The server knows no budget
and sees no record; whatever a site sends is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpfl.cli import options as o
from dpfl.cli.console import bytes_text, out, print_json, progress_bar, table
from dpfl.cli.site import Insecure, interruptible, say, warn, warn_insecure
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import StudyFile
from dpfl.runs.result import total_bytes

if TYPE_CHECKING:
    from dpfl.deploy.summary import DeploymentSummary, StudyStatus

app = typer.Typer(
    no_args_is_help=True, help="The server of a real federation: a study, its sites, its rounds."
)
Folder = Annotated[Path, typer.Argument(help="The study's folder.", show_default=False)]
File = Annotated[Path, typer.Option("--study", help="The study (TOML): what sites are offered.")]


@app.command()
def init(folder: Folder, file: File) -> None:
    """Make a study's folder: its file, certificates, and a place for the sites' public keys."""
    from dpfl.deploy.serving import make_study

    study = StudyFile.from_file(file)
    make_study(folder, study)
    size = f"{study.run.rounds} rounds, {len(study.study.sites)} sites"
    out.print(f"Study '{study.study.name}': {study.method.name}, {size}")
    say(f"Give every site {folder}/certificates/ca.crt, and nothing else from there")
    say(f"Put the sites' public keys into {folder}/sites/NAME.pub")
    say(f"Then: dpfl server run {folder}")


@app.command()
def renew(folder: Folder) -> None:
    """Make new certificates, valid for a year, under the names in [network]."""
    from dpfl.deploy.serving import renew_certificates

    renew_certificates(folder)
    say(f"Give every site the new {folder}/certificates/ca.crt")


@app.command()
def run(folder: Folder, insecure: Insecure = False, quiet: o.Quiet = False) -> None:
    """Gather the sites and train."""
    _serve(folder, insecure, quiet, resume=False)


@app.command()
def resume(folder: Folder, insecure: Insecure = False, quiet: o.Quiet = False) -> None:
    """Continue a study that was cut off: same sites, same ledger, after the last finished round."""
    _serve(folder, insecure, quiet, resume=True)


def _serve(folder: Path, insecure: bool, quiet: bool, *, resume: bool) -> None:
    from dpfl.deploy.serving import check_startable, resume_command, serve

    check_startable(folder, resume=resume)
    study = StudyFile.in_folder(folder)
    warn_insecure(insecure)
    with interruptible(folder, lambda: resume_command(folder)), progress_bar() as bar:
        bar.disable = bar.disable or quiet
        task = bar.add_task(study.study.name, total=study.run.rounds, note="waiting for sites")

        def show(rounds: Sequence[RoundRecord]) -> None:
            for last in rounds[-1:]:
                note = f"{len(last.arrived)} of {len(last.cohort)} sites answered"
                bar.update(task, completed=last.round + 1, note=note)

        serve(folder, say, show, insecure=insecure)
    _show(folder)


@app.command()
def status(folder: Folder, json: o.Json = False) -> None:
    """Say how far the study is, who takes part, and what went wrong."""
    from dpfl.deploy.summary import StudyStatus

    if json:
        print_json(StudyStatus.of(folder).to_dict())
    else:
        _show(folder)


def _show(folder: Path) -> None:
    """Print the study's outcome, or how far it is."""
    from dpfl.deploy.summary import StudyStatus

    now = StudyStatus.of(folder)
    out.print(_facts(now))
    if now.summary is not None:
        _show_summary(now.summary)
        say(f"Model: {folder}/model.safetensors")


def _facts(now: StudyStatus) -> object:
    study, facts = now.study, table("", "", left=2)
    facts.add_row("study", f"{study.study.name} ({study.method.name})")
    facts.add_row("rounds", f"{len(now.rounds)} of {study.run.rounds}")
    for site in study.study.sites:
        missed, took = now.missed(site), f"took part in {now.took_part(site)} round(s)"
        for round_, reason in missed[-1:]:
            took += f"; missed {len(missed)} (round {round_ + 1}: {reason[:110]})"
        facts.add_row(site, took)
    lost = [str(record.round + 1) for record in now.rounds if record.lost]
    if lost:
        facts.add_row("lost rounds", ", ".join(lost))
    total = total_bytes(now.rounds)
    up, down = bytes_text(total["bytes_up"]), bytes_text(total["bytes_down"])
    facts.add_row("bytes up / down", f"{up} / {down}")
    return facts


def _show_summary(summary: DeploymentSummary) -> None:
    warn(summary.flags)
    for site, reason in summary.refusals.items():
        out.print(f"{site}: {reason}")
    for site, reason in summary.undelivered.items():
        out.print(f"The model was not delivered to {site}: {reason}")
    if summary.rounds.ended_early:
        out.print(f"Ended early, {summary.rounds.ended_early}")
    out.print("What each site has spent is in its own ledger: dpfl site spend")
