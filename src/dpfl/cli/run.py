"""``dpfl run``: one experiment, in a folder, that survives being killed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import (
    bytes_text,
    epsilon_text,
    err,
    out,
    print_json,
    progress_bar,
    table,
    three_text,
)
from dpfl.cli.watch import Port
from dpfl.core.errors import ConfigurationError, FolderError, Interrupted
from dpfl.report.live import LiveServer
from dpfl.report.page import write_report
from dpfl.report.reading import of_folders
from dpfl.rounds.record import RoundRecord
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder, free_name
from dpfl.runs.loggers import logging_to
from dpfl.sim.train import run_experiment

MOST_LINES = 24
LAST_LOOK = 2.5  # seconds; a page that asks once a second gets the end


@o.takes_experiment(**o.ONE_METHOD)
def run(
    given: dict[str, Any],
    file: o.File = None,
    data: o.Data = None,
    system_noise: Annotated[
        bool,
        typer.Option(
            "--system-noise", help="Draw noise from the operating system: not repeatable."
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; they never change a result.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder (default: a new one in runs/).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with an interrupted run.", metavar="FOLDER")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the report on 127.0.0.1 while the run goes on.")
    ] = False,
    port: Port = 0,
    log: Annotated[
        str | None,
        typer.Option(help="Log to tensorboard or mlflow, if installed.", show_default=False),
    ] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train one model with one method, and say what every client spent."""
    if resume is not None:
        if file is not None or any(value is not None for value in given.values()):
            raise ConfigurationError(
                "--resume",
                "an experiment was given as well",
                "a resumed run takes it from its own folder",
            )
        if not (resume / "experiment.toml").exists():
            raise FolderError(str(resume), "holds no run", "name the folder of an interrupted run")
        folder, experiment = resume, Experiment.from_file(resume / "experiment.toml")
    else:
        given |= {"system_noise": system_noise, "workers": workers}
        experiment = o.build(file, o.experiment_values(file, given))
        source = experiment.data.name or Path(experiment.data.folder or "own").name
        folder = folder or free_name(Path("runs"), f"{experiment.method.name}-{source}")
    with ExitStack() as stack:
        if live:
            server = stack.enter_context(LiveServer(folder, port))
            err.print(f"Live view: {server.address}", soft_wrap=True)
        logger = stack.enter_context(logging_to(log, folder, experiment, err.print))
        bar = stack.enter_context(progress_bar())
        bar.disable = bar.disable or quiet
        task = bar.add_task(
            experiment.method.name, total=experiment.run.rounds, note="planning noise"
        )

        def report(done: int, total: int, record: RoundRecord) -> None:
            line = record.to_dict()
            bar.update(
                task,
                completed=done,
                note=f"accuracy {100 * line['accuracy']:.1f} %" if "accuracy" in line else "",
            )
            if logger is not None:
                logger.round(done, line)

        try:
            result = run_experiment(
                experiment,
                folder,
                resume=resume is not None,
                data_folder=data,
                workers=workers,
                progress=report,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                str(folder),
                "stopped by you; what was charged stays charged",
                f"go on with: dpfl run --resume {folder}",
            ) from None
        if logger is not None:
            logger.end(result.summary.to_dict())
        write_report(of_folders([folder]), folder / "report.html")
        if live:
            time.sleep(LAST_LOOK)
    if json:
        print_json({"folder": str(folder), **result.summary.to_dict()})
    else:
        show(folder, result.summary.to_dict())


def show(folder: Path, summary: dict[str, Any]) -> None:
    """Print what came out, the flags first."""
    for stamp in (flag["text"] for flag in summary["flags"]):
        err.print(stamp, style="yellow")
    facts = table("", "", left=2)
    rounds = summary["rounds"]
    facts.add_row("method", summary["method"])
    facts.add_row("test accuracy", f"{100 * summary['accuracy']:.1f} % ({summary['tested']})")
    facts.add_row(
        "rounds",
        f"{rounds['done']} of {rounds['planned']}"
        + (f" ({rounds['ended_early']})" if rounds["ended_early"] else ""),
    )
    left = summary["clients_left"]
    named = f" ({', '.join(left[:5])}{', ...' if len(left) > 5 else ''})" if left else ""
    facts.add_row("budget ran out", f"{len(left)} of {summary['clients']} clients{named}")
    facts.add_row(
        "bytes up / down",
        f"{bytes_text(summary['bytes_up'])} / {bytes_text(summary['bytes_down'])}",
    )
    epsilon = summary["epsilon"]
    for name in ("spent", "budget"):
        facts.add_row(
            f"epsilon {name}",
            " / ".join(three_text(epsilon.get(name))) + "  (smallest / median / largest)",
        )
    for observer, spread in summary["epsilon_by_observer"].items():
        facts.add_row(f"... against the {observer}", " / ".join(three_text(spread.get("spent"))))
    out.print(facts)
    show_statements(summary["statements"])
    err.print(f"Results: {folder}")
    err.print(f"Report: {folder / 'report.html'}")


def show_statements(lines: list[dict[str, Any]]) -> None:
    """Print one line per account, in one table for each thing that an epsilon means."""
    if not lines:
        return
    for meaning in dict.fromkeys(map(_meaning, lines)):
        own = [line for line in lines if _meaning(line) == meaning]
        spent = table("account", "rounds", "epsilon spent", "budget", "delta")
        for line in own[:MOST_LINES]:
            granted = "-" if line["budget"] is None else epsilon_text(line["budget"])
            delta = "-" if line["delta"] is None else f"{line['delta']:g}"
            spent.add_row(
                line["account"], str(line["rounds"]), epsilon_text(line["epsilon"]), granted, delta
            )
        out.print()
        out.print(spent)
        if len(own) > MOST_LINES:
            out.print(f"... and {len(own) - MOST_LINES} more: see summary.json, or use --json")
        out.print(f"Every epsilon: {meaning}; rounded up.")
        if any(
            line.get("filter", "allotments") != "allotments" and line["budget"] is not None
            for line in own
        ):
            out.print(
                "Studies pay as they go: spent is what is used so far, and the budget is what is guaranteed."
            )


def _meaning(line: dict[str, Any]) -> str:
    return f"per {line['unit']}, {line['adjacency']} adjacency, against the {line['observer']}, by {line['accountant']}"


__all__ = ["RunFolder", "run", "show", "show_statements"]
