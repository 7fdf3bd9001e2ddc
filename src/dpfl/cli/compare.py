"""``dpfl compare``: several methods on the same federations, the same seeds, the same first models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import err, print_json
from dpfl.core.errors import ConfigurationError
from dpfl.experiments.ranking import standings
from dpfl.experiments.run_study import run_study
from dpfl.experiments.study import Study
from dpfl.report.reading import read_results
from dpfl.runs.experiment import for_method
from dpfl.sim.train import rehearse


@o.takes_experiment()
def compare(
    given: dict[str, Any],
    file: o.File = None,
    methods: r.Methods = "",
    family: r.Family = None,
    seeds: r.Seeds = "3",
    tuned: Annotated[
        Path | None,
        typer.Option(help="Results of dpfl tune: every method with its own best settings."),
    ] = None,
    data: o.Data = None,
    workers: r.Workers = 2,
    folder: r.Out = None,
    kept: r.Kept = r.KEPT,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare methods honestly: paired seeds, one table per privacy unit, spread beside every mean."""
    values = o.experiment_values(file, given)
    chosen = _tuned(tuned)
    names = r.chosen_methods(methods, family, values, file, data, chosen)
    o.check_settings(values, names)
    for name in names:
        if tuned is not None and name not in chosen:
            raise ConfigurationError(
                "--tuned", f"{tuned} does not hold '{name}'", "tune it as well, or leave it out"
            )
        rehearse(
            o.build(file, for_method(r.with_settings(values, chosen.get(name, {})), name)), data
        )
    study = Study.from_dict(
        {
            "title": f"{len(names)} methods compared",
            "base": values,
            "methods": {name: chosen.get(name, {}) for name in names},
            "seeds": r.seeds_of(seeds),
        },
        str(file) if file else "options",
    )
    results = r.run_shown(run_study, study, kept, data, workers, quiet)
    place = r.keep(results, r.new_folder(folder, "compare"), kept)
    if json:
        print_json({"folder": str(place), **results})
        return
    r.show_standings(standings(results["cells"]))
    err.print(f"Results: {place}")
    err.print(f"Report: {place / 'report.html'}")


def _tuned(path: Path | None) -> dict[str, dict[str, Any]]:
    """What was chosen, by method."""
    if path is None:
        return {}
    results = read_results(path, "name the folder of a dpfl tune")
    if "tuning" not in results:
        raise ConfigurationError(
            "--tuned", f"{path} holds no search", "name the folder of a dpfl tune"
        )
    return {
        cell["method"]: {
            field.removeprefix("method."): value for field, value in cell["chosen"].items()
        }
        for cell in results["cells"]
    }
