"""``dpfl tune``: the same search for every method, never on test records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import err, out, print_json, table
from dpfl.core.errors import ConfigurationError
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.experiments.run_study import tune_study
from dpfl.experiments.study import Study, set_fields
from dpfl.methods import find
from dpfl.runs.experiment import for_method

RATES = [0.03, 0.1, 0.3, 1.0]
CLIPS = [0.3, 1.0, 3.0]
TUNING_SEED = 1000


@o.takes_experiment()
def tune(
    given: dict[str, Any],
    file: o.File = None,
    methods: r.Methods = "",
    family: r.Family = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting and the values to try (default: lr, clip and the method's own knob).",
            metavar="FIELD=VALUE,...",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        str, typer.Option(help="grid, or halving: half of them stop early, twice.")
    ] = "grid",
    tune_on: Annotated[
        str | None,
        typer.Option(help="A public or proxy data set (or folder) to tune on.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per candidate.", min=1)] = 1,
    data: o.Data = None,
    workers: r.Workers = 2,
    folder: r.Out = None,
    kept: r.Kept = r.KEPT,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Choose every method's settings by the same search, on records that are neither trained nor
    tested on.
    """
    if search not in ("grid", "halving"):
        raise ConfigurationError("--search", f"'{search}'", "choose grid or halving")
    lists = r.lists_of(over or [])
    for field in lists:
        if not field.startswith("method."):
            raise ConfigurationError(
                "--over",
                f"'{field}' is no setting of a method",
                "tune method.lr, method.clip, ...; sweep the rest",
            )
    grid = lists or {"method.lr": RATES, "method.clip": CLIPS}
    values = o.experiment_values(file, given)
    first = set_fields(values, {field: choices[0] for field, choices in grid.items()})
    names = r.chosen_methods(
        methods, family, _with_knobs(first, methods, family, lists), file, data
    )
    o.check_settings({"method": {field.removeprefix("method."): 0 for field in lists}}, names)
    proxy = o.data_values(tune_on, values.get("data", {}).get("label")) if tune_on else None
    if proxy is not None and _same_data(proxy, values.get("data", {})):
        raise ConfigurationError(
            "--tune-on",
            "names the federation's own records",
            "name other data: public ones, or a proxy; or leave it out",
        )
    own = {name: knob for name in names if not lists and (knob := _knob(name, first, file, data))}
    for name in names:
        o.build(
            file,
            for_method(set_fields(first, {f: c[0] for f, c in own.get(name, {}).items()}), name),
        )
    study = Study.from_dict(
        {
            "title": f"{len(names)} methods tuned by {search}",
            "base": values,
            "methods": {name: {} for name in names},
            "seeds": [0],
            "tune": {
                "over": grid,
                "own": own,
                "search": search,
                "seeds": [TUNING_SEED + number for number in range(seeds)],
                **({"on": proxy} if proxy else {}),
            },
        },
        str(file) if file else "options",
    )
    results = r.run_shown(tune_study, study, kept, data, workers, quiet)
    place = r.keep(results, r.new_folder(folder, "tune"), kept)
    written = {
        cell["label"]: _write(study, cell, place, values.get("run", {}).get("seed", 0))
        for cell in results["cells"]
    }
    if json:
        print_json({"folder": str(place), **results})
        return
    show(results, search)
    out.print(results["tuning"])
    err.print(f"Ready to run: {', '.join(str(path) for path in written.values())}", soft_wrap=True)
    err.print(f"Compare with these settings: dpfl compare ... --tuned {place}", soft_wrap=True)


def _same_data(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if "folder" in one and "folder" in other:
        return Path(one["folder"]).resolve() == Path(other["folder"]).resolve()
    return one.get("name") is not None and one.get("name") == other.get("name")


def _knob(
    name: str, values: dict[str, Any], file: Path | None, data: Path | None
) -> dict[str, list[Any]]:
    """What a method alone has, unless the user has fixed it."""
    search = {k: v for k, v in find(name).search.items() if k not in values.get("method", {})}
    if not search:
        return {}
    setting, choices = next(iter(search.items()))
    if setting != "dimension":
        return {f"method.{setting}": list(choices)}
    experiment = o.build(file, for_method(set_fields(values, {"method.dimension": 1}), name))
    parameters = Layout.of_module(experiment.build_model(experiment.federation(data))).size
    return {
        f"method.{setting}": sorted({max(1, round(float(share) * parameters)) for share in choices})
    }


def _with_knobs(
    values: dict[str, Any], methods: str, family: str | None, lists: dict[str, list[Any]]
) -> dict[str, Any]:
    """A family may hold methods whose knob has no default: it will be searched, so any value tells
    whether they fit.
    """
    if lists or (family is None and methods.strip() != "all"):
        return values
    return set_fields(
        values, {} if "dimension" in values.get("method", {}) else {"method.dimension": 1}
    )


def _write(study: Study, cell: dict[str, Any], folder: Path, seed: int) -> Path:
    """One complete experiment file a method, with what was chosen."""
    experiment = study.experiment(cell["case"], cell["label"], cell["chosen"], seed)
    path = folder / f"{cell['label']}.toml"
    write_safely(path, experiment.to_toml().encode())
    return path


def show(results: dict[str, Any], search: Literal["grid", "halving"] | str) -> None:
    """Print what won, and over how much."""
    lines = table(
        "method", "chosen", "validation %", "worst %", "tried", left=2, title=results["title"]
    )
    for cell in results["cells"]:
        tried = [one["validation_accuracy"] for one in cell["tried"]]
        chosen = ", ".join(
            f"{field.removeprefix('method.')} = {value}" for field, value in cell["chosen"].items()
        )
        best = [
            one["validation_accuracy"] for one in cell["tried"] if one["values"] == cell["chosen"]
        ]
        lines.add_row(
            cell["label"],
            chosen or "-",
            f"{100 * best[0]:.1f}" if best else "-",
            f"{100 * min(tried):.1f}" if tried else "-",
            str(len(tried)),
        )
    out.print(lines)
    if search == "halving":
        out.print(
            "halving: candidates that were dropped were judged after a quarter or half of their rounds"
        )
