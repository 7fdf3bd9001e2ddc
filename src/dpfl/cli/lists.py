"""``dpfl methods | datasets | budgets | models | features | tasks``: what there is, a line each.

Methods come from dpfl and from every installed package that declares some. ``--json`` prints the
same for programs, and ``methods --markdown`` the table that the documentation contains.
"""

import typer

from dpfl.cli import console as c, options as o

PAGE = """\
# Methods

This table is written by `dpfl methods --markdown`. Methods of one family are worth comparing;
[choosing a method](choosing-a-method.md) says which to try first.

| method | what it is | family | needs |
|---|---|---|---|"""


def methods(
    family: str | None = o.opt("Only one family."),
    markdown: bool = o.flag("--markdown", "Print the table of the documentation."),
    json: bool = o.JSON,
) -> None:
    """List the methods, with the family they are compared in and what they need."""
    from dpfl.methods import METHODS

    found = [METHODS[name] for name in (METHODS if family is None else o.methods_of(family))]
    rows = [(one.name, one.about, one.family, one.needs or "-") for one in found]
    if markdown:
        lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
        typer.echo("\n".join([PAGE, *lines]))
        return
    keys = ("about", "family", "needs")
    headings = ("method", "what it is", "family", "needs")
    told = {one.name: {key: getattr(one, key) for key in keys} for one in found}
    c.answer(json, told, lambda: c.print_table(headings, rows, left=4))


def _show(tables: dict[str, dict[str, str]]) -> None:
    """Print tables of names and what they are."""
    for kind, rows in tables.items():
        c.print_table((kind, "what it is"), rows.items(), left=2)
        c.out.print()


def datasets(json: bool = o.JSON) -> None:
    """List the data sets, and the ways to share them out."""
    from dpfl.data.partition import PARTITIONS
    from dpfl.datasets.named import DATASETS

    rows = {
        name: source.about + ("" if source.embedded else "; from --data or DPFL_DATA")
        for name, source in DATASETS.items()
    }
    own = "your own: one CSV or Parquet file per client, numbers, the label last (or --label)"
    laws = {"natural": "the silos a data set comes with"}
    laws |= {name: text for name, (_, text) in PARTITIONS.items()}
    rows["FOLDER"] = own
    c.answer(json, rows, _show, {"data set": rows, "partition": laws})


def budgets(json: bool = o.JSON) -> None:
    """List the distributions of epsilon, and the ways to spend a budget."""
    from dpfl.privacy.budgets import DISTRIBUTIONS, SPENDINGS

    rows = {name: f"{law}  [{law.source}]" for name, law in DISTRIBUTIONS.items()}
    rows |= {"NUMBER": "the same for all", "LIST": "one for each client: 0.5,1,3"}
    rows["FILE"] = "id,epsilon[,delta] as .csv, or .json"
    c.answer(json, rows, _show, {"budgets": rows, "spending": SPENDINGS})


def models(json: bool = o.JSON) -> None:
    """List the models that ship with dpfl, for numbers, images and text."""
    from dpfl.models import LINEAR_HEAD, MODELS, TEXT_MODELS, about

    rows = {name: about(name) for name in sorted([*MODELS, *TEXT_MODELS, LINEAR_HEAD])}
    c.answer(json, rows, _show, {"model": rows})


def features(json: bool = o.JSON) -> None:
    """List the public features that models can be built on ([model] features)."""
    from dpfl.models.features import FEATURES, about

    rows = {name: about(name) for name in FEATURES}
    rows["auto"] = "the map that fits the records and the budgets"
    c.answer(json, rows, _show, {"features": rows})


def tasks(json: bool = o.JSON) -> None:
    """List the tasks: what can be learned, and the metrics of each."""
    import inspect

    from dpfl.tasks import TASKS

    rows = {}
    for name, task in TASKS.items():
        about = (inspect.getdoc(task) or "").splitlines()[0].rstrip(".")
        rows[name] = f"{about}; ranked by {task.metric}; metrics: {', '.join(task.metrics)}"
    c.answer(json, rows, _show, {"task": rows})
