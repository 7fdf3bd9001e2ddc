"""``dpfl run``: one experiment, in a folder, that survives being killed.

Flags come first, then the result, then what every client spent. Ctrl-C and ``kill -9`` lose
nothing that was charged: ``--resume`` goes on, with the same bits where the run is seeded. A run
that nobody can afford, or that a method refuses, ends with exit code 4 before any folder is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import dpfl.report as pages
from dpfl.cli import console as c, options as o
from dpfl.core.checks import check
from dpfl.core.errors import FolderError

if TYPE_CHECKING:
    from dpfl.privacy.statement import Statement
    from dpfl.rounds.record import RoundRecord
    from dpfl.runs.experiment import Experiment
    from dpfl.runs.result import Summary


@o.takes_experiment()
def run(
    asked: o.Asked,
    system_noise: bool = o.flag("--system-noise", "Draw noise from the system: not repeatable."),
    folder: Path | None = o.opt("Folder (default: a new one in runs/).", None, "--out"),
    resume: Path | None = o.opt("Go on with an interrupted run.", metavar="FOLDER"),
    log: str | None = o.opt("Log to tensorboard or mlflow, if installed."),
    quiet: bool = o.QUIET,
) -> None:
    """Train one model with one method, and say what every client spent.

    The folder holds the experiment, the ledger, every round, the model and a report. A run that was
    interrupted goes on with --resume: what was charged stays charged, and nothing is charged twice.

    For instance: dpfl run --dataset digits --clients 10 --budgets mixgauss1 --delta 1e-3 --clip 1
    --method weiavg
    """
    from dpfl.runs.loggers import logging_to
    from dpfl.sim.train import run_experiment

    if system_noise:
        asked.given["set"] = [*(asked.given["set"] or ()), "run.noise=system"]
    folder, experiment = _interrupted(asked, resume) if resume else _new(asked, folder)
    again = f"what was charged stays charged; go on with: dpfl run --resume {folder}"
    bar = c.progress_bar(experiment.method.name, "planning", experiment.rounds, quiet)
    with logging_to(log, folder, experiment, c.note) as logger, bar as update:

        def progress(done: int, total: int, record: RoundRecord) -> None:
            scores = record.scores
            note = f"{scores.words.words} {scores.words.show(scores.value)}" if scores else ""
            update(completed=done, note=note)
            if logger is not None:
                logger.round(done, record)

        with c.interruptible(folder, lambda: again):
            result = run_experiment(
                experiment,
                folder,
                resume=resume is not None,
                data_folder=asked.data,
                workers=asked.given["workers"],
                progress=progress,
            )
        if logger is not None:
            logger.end(result.summary)
        pages.write_report(pages.of_folders([folder]), folder / "report.html")
    told = {"folder": str(folder), **result.summary.to_dict()}
    c.answer(asked.json, told, show, folder, result.summary)


def _new(asked: o.Asked, folder: Path | None) -> tuple[Path, Experiment]:
    """A new run: where it goes, and a warning if noise will drown its signal."""
    from dpfl.experiments.describe import noise_forecast
    from dpfl.runs.folder import free_name

    experiment = asked.experiment()
    warning = noise_forecast(experiment, asked.data).warning
    c.warn([f"WARNING: {warning}"] if warning else [])
    source = experiment.data.name or Path(experiment.data.folder or "own").name
    return folder or free_name(Path("runs"), f"{experiment.method.name}-{source}"), experiment


def _interrupted(asked: o.Asked, folder: Path) -> tuple[Path, Experiment]:
    """A run that goes on: it takes the experiment from its own folder."""
    from dpfl.runs.experiment import Experiment

    described = {name for name, own in asked.given.items() if own is not None} - {"workers"}
    remedy = "a resumed run takes it from its own folder"
    check(not (asked.file or described), "--resume", "an experiment was given as well", remedy)
    path = folder / "experiment.toml"
    remedy = "name the folder of an interrupted run"
    if (folder / "training.json").exists():
        remedy = "it was begun from Python: go on with dpfl.train(..., resume=True)"
    check(path.exists(), str(folder), "holds no run", remedy, FolderError)
    return folder, Experiment.from_file(path)


def show(folder: Path, summary: Summary) -> None:
    """Print the result of a run, its flags first."""
    from dpfl.report.words import finish_in_words

    c.warn(summary.flags)
    rounds = summary.rounds
    left = summary.clients_left
    epsilon = summary.epsilon
    scores = summary.scores
    early = f" ({rounds.ended_early})" if rounds.ended_early else ""
    named = f" ({', '.join(left[:5])}{', ...' if len(left) > 5 else ''})" if left else ""
    facts = {
        "method": summary.method,
        f"test {scores.words.words}": f"{scores.words.show(scores.value)} ({summary.tested})",
        "... over clients": scores.over_clients(),
        "other metrics": scores.other_metrics(),
        "personal finish": finish_in_words(summary.finish, summary.clients),
        "rounds": f"{rounds.done} of {rounds.planned}{early}",
        "budget ran out": f"{len(left)} of {summary.clients} clients{named}",
        "bytes up / down": f"{c.size(summary.bytes_up)} / {c.size(summary.bytes_down)}",
    }
    for name in ("spent", "budget"):
        spread = c.format_spread(getattr(epsilon, name, None))
        facts[f"epsilon {name}"] = f"{' / '.join(spread)}  (smallest / median / largest)"
    for observer, one in summary.epsilon_against.items():
        facts[f"... against the {observer}"] = " / ".join(c.format_spread(one.spent))
    c.print_facts({name: fact for name, fact in facts.items() if fact})
    show_statements(summary.statements, {summary.promise.observer: summary.promise.adversary})
    c.note_files({"Results": folder, "Report": folder / "report.html"})


def show_statements(lines: Sequence[Statement], words: Mapping[str, str] | None = None) -> None:
    """Print one line per account, in one table for each thing that an epsilon means.

    ``words`` name adversaries more closely than a ledger does.
    """
    meanings: dict[str, list[Statement]] = {}
    for line in lines:
        adversary = (words or {}).get(line.observer, line.observer)
        meaning = f"per {line.unit}, {line.adjacency} adjacency, against the {adversary}, by "
        meanings.setdefault(meaning + line.accountant, []).append(line)
    for meaning, own in meanings.items():
        c.out.print()
        headings = ("account", "rounds", "epsilon spent", "budget", "delta")
        c.print_table(headings, [line.cells for line in own[: c.MOST_LINES]])
        if len(own) > c.MOST_LINES:
            c.out.print(f"... and {len(own) - c.MOST_LINES} more: see summary.json, or use --json")
        c.out.print(f"Every epsilon: {meaning}; rounded up.")
        if any(line.filter != "allotments" and line.budget is not None for line in own):
            used = "spent is what is used so far, and the budget is what is guaranteed."
            c.out.print(f"Studies pay as they go: {used}")
