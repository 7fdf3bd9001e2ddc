"""``dpfl study``: a table of a paper, from one file: tuned by one rule, several seeds, recorded."""

from __future__ import annotations

import json as json_
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import err, mean_and_spread, out, print_json, table
from dpfl.core.files import write_safely
from dpfl.experiments.run_study import run_study
from dpfl.experiments.study import Study
from dpfl.report.reading import read_results


def study(
    file: Annotated[Path, typer.Argument(help="Study file (TOML).", show_default=False)],
    data: o.Data = None,
    workers: Annotated[int, typer.Option(help="Runs at a time, one process each.", min=1)] = 2,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the runs; what is there is not run again."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the results beside the study file.")
    ] = False,
    show_recorded: Annotated[
        bool, typer.Option("--show", help="Run nothing; show the recorded results.")
    ] = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Run a study: tune every method by the same rule, then the final seeds; or show what was
    recorded.
    """
    asked = Study.from_file(file)
    recorded = file.with_suffix(".json")
    if show_recorded:
        results = read_results(recorded, "run the study with --record first")
    else:
        base = folder or Path("runs") / f"study-{file.stem}"
        results = r.run_shown(run_study, asked, base, data, workers, quiet)
        if record:
            write_safely(recorded, (json_.dumps(results, indent=1) + "\n").encode())
            err.print(f"Recorded: {recorded}")
    if json:
        print_json(results)
    else:
        show(results)


def show(results: dict[str, Any]) -> None:
    """Print a line per method and case: mean and spread of the final accuracy, the tuned values,
    the noise left.
    """
    cells = results["cells"]
    varied = list(cells[0]["case"])
    noisy = any("noise_over_least" in run for cell in cells for run in cell["runs"])
    columns = [*(field.rpartition(".")[2] for field in varied), "method", "accuracy %", "tuned"]
    lines = table(
        *columns,
        *(["noise / least"] if noisy else []),
        title=results["title"],
        left=len(varied) + 1,
    )
    for cell in cells:
        runs = cell["runs"]
        tuned = ", ".join(
            f"{value:g}" if isinstance(value, float) else str(value)
            for value in cell["chosen"].values()
        )
        ratios = [run["noise_over_least"]["mean"] for run in runs if "noise_over_least" in run]
        lines.add_row(
            *(_text(cell["case"][field]) for field in varied),
            cell["label"],
            mean_and_spread([run["accuracy"] for run in runs]),
            tuned or "-",
            *([f"{statistics.mean(ratios):.3g}" if ratios else "-"] if noisy else []),
        )
    out.print(lines)
    seeds = len(cells[0]["runs"])
    for meaning in sorted({_meaning(run["epsilon"]) for cell in cells for run in cell["runs"]}):
        out.print(meaning)
    out.print(
        f"accuracy: final model, test records, mean ± standard deviation over {seeds} seed(s)"
    )
    if noisy:
        out.print(
            "noise / least: DP noise variance in the aggregate over the least any weights could leave, mean of rounds"
        )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} x {factor:g}" for name, factor in value.items()) or "-"
    return str(value)


def _meaning(epsilon: dict[str, Any]) -> str:
    if epsilon["observer"] == "nobody":
        return "no epsilon: fedavg protects nobody"
    return f"epsilon: per {epsilon['unit']}, {epsilon['adjacency']} adjacency, against the {epsilon['observer']}"
