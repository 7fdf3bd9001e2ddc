"""``dpfl methods | datasets | budgets | models``: what there is, a line each.

Methods come from dpfl and from every installed package that declares some. ``--json`` prints the
same for programs, and ``methods --markdown`` the table that the documentation contains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dpfl.cli import options as o
from dpfl.cli.console import out, print_json, table
from dpfl.core.errors import unknown_name

if TYPE_CHECKING:
    from dpfl.strategy.method import Method

PAGE = """\
# Methods

This table is written by `dpfl methods --markdown`. Methods of one family are worth comparing;
[choosing a method](choosing-a-method.md) says which to try first.

"""


def methods(
    family: Annotated[str | None, o.opt("Only one family.")] = None,
    markdown: Annotated[bool, o.opt("Print the table of the documentation.", "--markdown")] = False,
    json: o.Json = False,
) -> None:
    """List the methods, with the family they are compared in and what they need."""
    from dpfl.methods import METHODS, families

    if family is not None and family not in families():
        raise unknown_name("--family", "family", family, families())
    names = METHODS if family is None else families()[family]
    found = [METHODS[name] for name in names]
    if markdown:
        typer.echo(methods_page(found), nl=False)
    elif json:
        keys = ("about", "family", "needs")
        print_json({one.name: {key: getattr(one, key) for key in keys} for one in found})
    else:
        lines = table("method", "what it is", "family", "needs", left=4)
        for one in found:
            lines.add_row(one.name, one.about, one.family, one.needs or "-")
        out.print(lines)


def methods_page(methods: list[Method]) -> str:
    """Return the page of the documentation that lists the methods."""
    rows = [f"| `{m.name}` | {m.about} | {m.family} | {m.needs or '-'} |" for m in methods]
    head = ["| method | what it is | family | needs |", "|---|---|---|---|"]
    return PAGE + "\n".join([*head, *rows]) + "\n"


def _answer(json: bool, tables: dict[str, dict[str, str]]) -> None:
    """Write the first table as JSON, or print all of them."""
    if json:
        print_json(next(iter(tables.values())))
        return
    for kind, rows in tables.items():
        listing = table(kind, "what it is", left=2)
        for name, text in rows.items():
            listing.add_row(name, text)
        out.print(listing)
        out.print()


def datasets(json: o.Json = False) -> None:
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
    _answer(json, {"data set": {**rows, "FOLDER": own}, "partition": laws})


def budgets(json: o.Json = False) -> None:
    """List the distributions of epsilon, and the ways to spend a budget."""
    from dpfl.privacy.budgets import DISTRIBUTIONS, SPENDINGS

    rows = {name: f"{law}  [{law.source}]" for name, law in DISTRIBUTIONS.items()}
    rows |= {"NUMBER": "the same for all", "LIST": "one for each client: 0.5,1,3"}
    rows["FILE"] = "id,epsilon[,delta] as .csv, or .json"
    _answer(json, {"budgets": rows, "spending": dict(SPENDINGS)})


def models(json: o.Json = False) -> None:
    """List the models."""
    from dpfl.models import MODELS, TEXT_MODELS, about

    _answer(json, {"model": {name: about(name) for name in sorted(MODELS | TEXT_MODELS)}})
