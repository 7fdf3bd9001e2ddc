"""``dpfl sweep``: what a field does to accuracy, from one end of a list to the other."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpfl.cli import options as o
from dpfl.cli import results as r
from dpfl.cli.console import err, mean_and_spread, out, print_json, table
from dpfl.core.errors import ConfigurationError
from dpfl.experiments.ranking import Standing, grouped, standings
from dpfl.experiments.run_study import run_study
from dpfl.experiments.study import Study, set_fields
from dpfl.runs.experiment import for_method
from dpfl.sim.train import rehearse

MOST_COLUMNS = 3  # methods beside each other in a terminal of 80 columns


@o.takes_experiment()
def sweep(
    given: dict[str, Any],
    file: o.File = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A field of the experiment and its values.",
            metavar="FIELD=VALUE,...",
            show_default=False,
        ),
    ] = None,
    methods: r.Methods = "",
    family: r.Family = None,
    seeds: r.Seeds = "3",
    data: o.Data = None,
    workers: r.Workers = 2,
    folder: r.Out = None,
    kept: r.Kept = r.KEPT,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Vary one field (budgets.scale, partition.clients, method.k, ...): a curve per method, with
    bands over seeds.
    """
    lists = r.lists_of(over or [])
    if not lists:
        raise ConfigurationError(
            "--over", "was not given", "give for instance --over budgets.scale=0.5,1,2,4"
        )
    values = o.experiment_values(file, given)
    first = {field: choices[0] for field, choices in lists.items()}
    names = r.chosen_methods(methods, family, set_fields(values, first), file, data)
    o.check_settings(set_fields(values, first), names)
    for name in names:
        o.build(file, for_method(set_fields(values, first), name))
    study = Study.from_dict(
        {
            "title": f"accuracy over {', '.join(lists)}",
            "base": values,
            "vary": lists,
            "methods": {name: {} for name in names},
            "seeds": r.seeds_of(seeds),
        },
        str(file) if file else "options",
    )
    for case in study.cases():
        for name in names:
            rehearse(study.experiment(case, name, {}, study.seeds[0]), data)
    results = r.run_shown(run_study, study, kept, data, workers, quiet)
    place = r.keep(results, r.new_folder(folder, "sweep"), kept)
    if json:
        print_json({"folder": str(place), **results})
        return
    show(study, results)
    err.print(f"Results: {place}")
    err.print(f"Report: {place / 'report.html'}")


def show(study: Study, results: dict[str, Any]) -> None:
    """Print one table a unit: a line per value, a column per method; the best of each promise is
    marked.
    """
    cases = study.cases()
    by_case = [
        standings([cell for cell in results["cells"] if cell["case"] == case]) for case in cases
    ]
    for unit, mine in grouped(by_case[0]).items():
        labels = [one.label for one in mine]
        if len(labels) > MOST_COLUMNS:
            _show_long(study, unit, labels, list(zip(cases, by_case, strict=True)))
            continue
        lines = table(
            *(field.rpartition(".")[2] for field in study.vary),
            *labels,
            title=f"Protecting a {unit}: accuracy %",
            left=len(study.vary),
        )
        for case, ranked in zip(cases, by_case, strict=True):
            found = {one.label: one for one in ranked}
            cells = [
                mean_and_spread(found[label].accuracies) + ("*" if found[label].best else "")
                for label in labels
            ]
            lines.add_row(*(str(value) for value in case.values()), *cells)
        out.print(lines)
        _say_how(study)


def _show_long(
    study: Study, unit: str, labels: list[str], ranked: list[tuple[dict[str, Any], list[Standing]]]
) -> None:
    """A line per value and method, where the methods do not fit beside each other."""
    names = [field.rpartition(".")[2] for field in study.vary]
    lines = table(*names, "method", "accuracy %", title=f"Protecting a {unit}", left=len(names) + 1)
    for case, standing in ranked:
        found = {one.label: one for one in standing}
        for number, label in enumerate(labels):
            told = [str(value) for value in case.values()] if number == 0 else [""] * len(names)
            lines.add_row(
                *told,
                label,
                mean_and_spread(found[label].accuracies) + ("*" if found[label].best else ""),
            )
    out.print(lines)
    _say_how(study)


def _say_how(study: Study) -> None:
    out.print(
        f"mean ± standard deviation over {len(study.seeds)} seed(s); * best of those that promise the same"
    )
    out.print()
