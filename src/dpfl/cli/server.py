"""``dpfl server``: the side that offers a study, gathers the sites and trains.

``init`` makes a folder with certificates from a study file, ``run`` serves the study to its last
round, ``resume`` goes on after a crash, ``deliver`` brings the model to sites that did not get it,
``status`` says how far it is. The server knows no budget and sees no record; whatever a site sends
is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl.cli import console as c, options as o
from dpfl.cli.site import INSECURE, until_stopped, warn_insecure

if TYPE_CHECKING:
    from dpfl.deploy.serving import Verb
    from dpfl.deploy.summary import DeploymentSummary, StudyStatus
    from dpfl.rounds.record import RoundRecord

app = o.group("The server of a real federation: a study, its sites, its rounds.")
FOLDER = o.arg("The study's folder.")


@app.command()
def init(
    folder: Path = FOLDER,
    file: Path = o.opt("The study (TOML): what sites are offered.", ..., "--study"),
) -> None:
    """Make a study's folder: its file, certificates, and a place for the sites' public keys."""
    from dpfl.deploy.serving import make_study
    from dpfl.runs.deployment import StudyFile

    study = StudyFile.from_file(file)
    make_study(folder, study)
    size = f"{study.rounds_text}, {len(study.study.sites)} sites"
    c.out.print(f"Study '{study.study.name}': {study.method_text}, {size}")
    c.note(f"Give every site {folder}/certificates/ca.crt, and nothing else from there")
    c.note(f"Put the sites' public keys into {folder}/sites/NAME.pub")
    c.note(f"Then: dpfl server run {folder}")


@app.command()
def renew(folder: Path = FOLDER) -> None:
    """Make new certificates, valid for a year, under the names in [network]."""
    from dpfl.deploy.serving import renew_certificates

    renew_certificates(folder)
    c.note(f"Give every site the new {folder}/certificates/ca.crt")


@app.command()
def run(folder: Path = FOLDER, insecure: bool = INSECURE, quiet: bool = o.QUIET) -> None:
    """Gather the sites and train."""
    _serve(folder, insecure, quiet, "run")


@app.command()
def resume(folder: Path = FOLDER, insecure: bool = INSECURE, quiet: bool = o.QUIET) -> None:
    """Continue a study that was cut off: same sites, same ledger, after the last finished round."""
    _serve(folder, insecure, quiet, "resume")


@app.command()
def deliver(folder: Path = FOLDER, insecure: bool = INSECURE, quiet: bool = o.QUIET) -> None:
    """Deliver the model of a study that has ended to the sites that did not get it."""
    _serve(folder, insecure, quiet, "deliver")


def _serve(folder: Path, insecure: bool, quiet: bool, verb: Verb) -> None:
    from dpfl.deploy.messages import round_name
    from dpfl.deploy.serving import resume_command, serve
    from dpfl.deploy.summary import StudyStatus
    from dpfl.runs.deployment import StudyFile
    from dpfl.runs.experiment import MOST_PLANNED
    from dpfl.runs.folder import RunFolder

    study = StudyFile.in_folder(folder)
    warn_insecure(insecure)
    bar = c.progress_bar(
        study.study.name, "waiting for sites", study.run.rounds or MOST_PLANNED, quiet
    )
    with until_stopped(folder, lambda: resume_command(folder)), bar as update:
        shown = len(RunFolder(folder).read_rounds())

        def progress(rounds: Sequence[RoundRecord]) -> None:
            nonlocal shown
            for last in rounds[shown:]:
                answered = f"{len(last.arrived)} of {len(last.cohort)} sites answered"
                if last.measured is not None:
                    answered = f"{last.measured} (noise), {answered}"
                update(completed=sum(one.round >= 0 for one in rounds), note=answered)
                if not quiet and not c.err.is_terminal:  # where no bar is shown
                    name = "Measurement" if last.measured else round_name(last.round).capitalize()
                    c.note(f"{name}: {last.lost or answered}")
            shown = len(rounds)

        serve(folder, verb, c.note, progress, insecure=insecure)
    _show(folder, StudyStatus.of(folder))


@app.command()
def status(folder: Path = FOLDER, json: bool = o.JSON) -> None:
    """Say how far the study is, who takes part, and what went wrong."""
    from dpfl.deploy.summary import StudyStatus

    now = StudyStatus.of(folder)
    c.answer(json, now.to_dict(), _show, folder, now)


def _show(folder: Path, now: StudyStatus) -> None:
    """Print the study's outcome, or how far it is."""
    from dpfl.deploy.messages import round_name
    from dpfl.runs.result import total_bytes

    study = now.study
    summary = now.summary
    total = total_bytes(now.rounds)
    facts = [
        ("study", f"{study.study.name} ({study.method.name})"),
        ("task", study.learned_text),
        ("server", now.server),
        ("rounds", f"{now.done} of {now.planned or 'as many as are planned'}"),
    ]
    for own in now.measured[-1:]:
        said = f"{own['value']:.4g} ± {own['standard_error']:.2g} (noise), after round"
        facts.append((str(own["metric"]), f"{said} {own['after']}"))
    for site in study.study.sites:
        missed = now.missed(site)
        took = f"took part in {now.took_part(site)} round(s)"
        for round_, reason in missed[-1:]:
            took += f"; missed {len(missed)} ({round_name(round_)}: {reason})"
        if now.running and site in now.progress.sites:
            took = f"{now.progress.sites[site]}; {took}"
        facts.append((site, took))
    if now.running and now.progress.next:
        facts.append(("now", now.progress.next))
    if lost := [str(record.round + 1) for record in now.rounds if record.lost]:
        facts.append(("lost rounds", ", ".join(lost)))
    if now.seconds is not None:
        times = f"{now.seconds.median:.1f} s in the median, {now.seconds.largest:.1f} s at most"
        facts.append(("an answer takes", times))
    traffic = f"{c.size(total['bytes_up'])} / {c.size(total['bytes_down'])}"
    c.print_table(("", ""), [*facts, ("bytes up / down", traffic)], left=2)
    if summary is not None:
        _show_summary(folder, summary)


def _show_summary(folder: Path, summary: DeploymentSummary) -> None:
    """Print what came of a study that has ended."""
    c.warn(summary.flags)
    c.print_lines(*(f"{site}: {reason}" for site, reason in summary.refusals.items()))
    for site, reason in summary.undelivered.items():
        c.out.print(f"The model was not delivered to {site}: {reason}")
    if summary.undelivered:
        c.note(f"Deliver it when they are there: dpfl server deliver {folder}")
    if summary.rounds.ended_early:
        c.out.print(f"Ended early, {summary.rounds.ended_early}")
    c.out.print("What each site has spent is in its own ledger: dpfl site spend")
    c.note(f"Model: {folder}/model.safetensors")
