"""``dpfl sweep``: what a field does to accuracy, from one end of a list to the other.

Any field of the experiment may vary, budgets included. The report draws accuracy over it, with
bands over seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfl.cli import compare as r
from dpfl.cli import options as o
from dpfl.cli.console import MOST_COLUMNS, mean_and_spread, out, print_table
from dpfl.cli.values import lists_of, seeds_of
from dpfl.core.checks import check

if TYPE_CHECKING:
    from dpfl.experiments.ranking import Standing
    from dpfl.experiments.results import StudyResult


@o.takes_experiment(o.MANY, o.STORE)
def sweep(asked: o.Asked, over: list[str] | None = o.OVER, seeds: str = o.SEEDS) -> None:
    """Vary fields (budgets.scale, partition.clients, method.k, server.lr, ...): accuracy by value,
    for each method.

    Several --over are crossed. A method that lacks a varied setting runs once.

    For instance: dpfl sweep experiment.toml --methods weiavg,pfa --over budgets.scale=0.5,1,2
    """
    from dpfl.experiments import compare as library
    from dpfl.experiments.study import set_fields

    lists, values = lists_of(over or []), asked.values()
    check(bool(lists), "--over", "was not given", "give for instance --over budgets.scale=0.5,1,2")
    first = set_fields(values, {field: choices[0] for field, choices in lists.items()})
    names, numbers = asked.method_names(first), seeds_of(seeds)
    with r.open_store(asked, "sweep") as store:
        result = library.sweep(values, lists, names, seeds=numbers, store=store)
    r.finish(result, asked, "sweep", show)


def show(result: StudyResult) -> None:
    """Print one table per unit; the best of each promise is marked.

    Methods stand side by side where there are few, else below each other.
    """
    from dpfl.experiments.ranking import grouped, standings

    cases = [(case, standings(result.of_case(case))) for case in result.cases]
    fields, first = r.field_names(cases[0][0]), cases[0][1]
    for unit, mine in grouped(first).items():
        labels = [one.label for one in mine]
        wide = len(labels) <= MOST_COLUMNS
        rows = []
        for case, ranked in cases:
            shown = {one.label: _accuracy(one) for one in ranked}
            values = [r.value_text(value) for value in case.values()]
            if wide:
                rows.append([*values, *(shown[label] for label in labels)])
                continue
            for label in labels:
                rows.append([*values, label, shown[label]])
                values = [""] * len(values)  # they stand in the first of its lines
        headings = labels if wide else ["method", "accuracy %"]
        title = f"Protecting a {unit}: accuracy %"
        print_table([*fields, *headings], rows, title=title, left=len(fields) + (not wide))
        spread = f"mean ± standard deviation over {len(first[0].runs)} seed(s)"
        out.print(f"{spread}; * best of those that promise the same\n")


def _accuracy(one: Standing) -> str:
    """The accuracy of a method; the best is marked."""
    return mean_and_spread(one.accuracies) + ("*" if one.best else "")
