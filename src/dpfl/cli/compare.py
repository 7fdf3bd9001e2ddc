"""``dpfl compare``: several methods on the same federations, the same seeds, the same first models."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli.console import bytes_text, err, mean_and_spread, out, print_json, progress_bar, table, three_text
from dpfl.core.errors import ConfigurationError, Interrupted
from dpfl.runs.experiment import for_method
from dpfl.runs.folder import free_name
from dpfl.sim.compare import Task, run_all


@o.takes_experiment()
def compare(
    given: dict[str, Any],
    file: o.File = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
    seeds: Annotated[str, typer.Option(help="How many seeds, or a list such as 0,1,2.")] = "3",
    data: o.Data = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, one process each.", min=1)] = 2,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder; one that holds part of it is completed.")
    ] = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare methods honestly: paired seeds, one table per privacy unit, spread beside every mean."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise ConfigurationError("--methods", "names no method", "give for instance --methods fedavg_dp,weiavg")
    values = o.experiment_values(file, given)
    o.check_settings(values, names)
    numbers = _seeds(seeds)
    base = folder or free_name(Path("runs"), "compare")
    tasks = []
    for name in names:
        for seed in numbers:
            own = for_method(values, name)
            own["run"] = {**own.get("run", {}), "seed": seed}
            tasks.append(Task(experiment=o.build(file, own), folder=base / f"{name}-seed{seed}", data_folder=data))
    for task in tasks:
        task.experiment.check()
    with progress_bar() as bar:
        bar.disable = bar.disable or quiet
        shown = bar.add_task(
            f"{len(names)} methods x {len(numbers)} seeds", total=sum(t.rounds for t in tasks), note=""
        )
        try:
            summaries = run_all(tasks, workers, lambda done: bar.update(shown, completed=done))
        except KeyboardInterrupt:
            raise Interrupted(
                str(base), "stopped by you", f"complete it by repeating the command with --out {base}"
            ) from None
    by_method = {name: [s for s in summaries if s["method"] == name] for name in names}
    if json:
        print_json({"folder": str(base), "seeds": numbers, "methods": by_method})
        return
    show(by_method, numbers)
    err.print(f"Results: {base}")


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            "--seeds", f"'{text}' is no number and no list of numbers", "give 3, or 0,1,2"
        ) from None
    seeds = list(range(numbers[0])) if "," not in text else numbers
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigurationError("--seeds", f"'{text}' names no seed, or one twice", "give 3, or 0,1,2")
    return seeds


def show(by_method: dict[str, list[dict[str, Any]]], seeds: list[int]) -> None:
    """Print outcome and privacy, one pair of tables per unit; methods of different units are never ranked together."""
    units = sorted({runs[0]["unit"] for runs in by_method.values()})
    for unit in units:
        mine = {name: runs for name, runs in by_method.items() if runs[0]["unit"] == unit}
        outcome = table(
            "method",
            "accuracy %",
            "left",
            "up",
            "down",
            "seconds",
            title=f"Protecting a {unit}: outcome over {len(seeds)} seed(s)",
        )
        for name, runs in mine.items():
            outcome.add_row(
                name,
                mean_and_spread([r["accuracy"] for r in runs]),
                f"{statistics.mean(len(r['clients_left']) for r in runs):g}/{runs[0]['clients']}",
                bytes_text(statistics.mean(r["bytes_up"] for r in runs)),
                bytes_text(statistics.mean(r["bytes_down"] for r in runs)),
                f"{statistics.mean(r['seconds'] for r in runs):.1f}",
            )
        headings = ("spent: min", "median", "max", "granted: min", "median", "max")
        privacy = table("method", *headings, title="Epsilon over clients (averaged over seeds)")
        for name, runs in mine.items():
            privacy.add_row(
                name,
                *_averaged([r["epsilon"].get("spent") for r in runs]),
                *_averaged([r["epsilon"].get("granted") for r in runs]),
            )
        out.print(outcome)
        out.print()
        out.print(privacy)
        protected = [runs[0] for runs in mine.values() if runs[0]["observer"] != "nobody"]
        for meaning in sorted({_meaning(r) for r in protected}):
            out.print(meaning)
        out.print(
            "accuracy: mean ± standard deviation on all clients' test records; left: clients whose budget ran out early"
        )
        out.print("Each run is billed alone: publishing more than one of them on the same data adds up.")
    stamps = sorted(
        {
            stamp
            for runs in by_method.values()
            for r in runs
            for stamp in r["stamps"]
            if stamp.startswith(("NOT", "HYPO"))
        }
    )
    for stamp in stamps:
        who = [name for name, runs in by_method.items() if stamp in runs[0]["stamps"]]
        err.print(f"{stamp} [{', '.join(who)}]", style="yellow", markup=False)


def _averaged(spreads: list[dict[str, Any] | None]) -> list[str]:
    present = [spread for spread in spreads if spread]
    if not present:
        return three_text(None)
    keys = ("smallest", "median", "largest")
    if any(spread[key] == "infinite" for spread in present for key in keys):
        return ["infinite"] * 3
    return three_text({key: statistics.mean(spread[key] for spread in present) for key in keys})


def _meaning(summary: dict[str, Any]) -> str:
    accountants = ", ".join(summary["epsilon"]["accountant"])
    whom = f"per {summary['unit']}, {summary['adjacency']} adjacency, against the {summary['observer']}"
    return f"epsilon: {whom}, by {accountants}; rounded up"
