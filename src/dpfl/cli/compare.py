"""``dpfl compare``: several methods on the same federations, the same seeds, the same first models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import err, print_json
from dpfl.core.errors import ConfigurationError
from dpfl.report.reading import read_results
from dpfl.runs.experiment import for_method
from dpfl.runs.ranking import standings
from dpfl.runs.study import Study
from dpfl.sim.study import run_study


@o.takes_experiment()
def compare(
    given: dict[str, Any],
    file: o.File = None,
    methods: r.Methods = "",
    family: r.Family = None,
    seeds: r.Seeds = "3",
    tuned: Annotated[
        Path | None, typer.Option(help="Results of dpfl tune: every method with its own best settings.")
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
    names = r.chosen_methods(methods, family, values, file, data)
    o.check_settings(values, names)
    for name in names:
        o.build(file, for_method(values, name)).check()
    study = Study.from_dict(
        {
            "title": f"{len(names)} methods compared",
            "base": values,
            "methods": {name: _tuned(tuned, name) for name in names},
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


def _tuned(path: Path | None, method: str) -> dict[str, Any]:
    if path is None:
        return {}
    cells = [cell for cell in read_results(path)["cells"] if cell["method"] == method]
    if not cells:
        raise ConfigurationError("--tuned", f"{path} does not hold '{method}'", "tune it as well, or leave it out")
    return {field.removeprefix("method."): value for field, value in cells[0]["chosen"].items()}
