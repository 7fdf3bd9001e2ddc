"""``dpfl methods | datasets | budgets | models``: what there is, a line each."""

from __future__ import annotations

from dpfl.cli import options as o
from dpfl.cli.console import out, print_json, table
from dpfl.data.partition import PARTITIONS
from dpfl.datasets.named import DATASETS
from dpfl.methods import METHODS
from dpfl.models import MODELS, TEXT_MODELS
from dpfl.models import about as about_model
from dpfl.privacy.budgets import DISTRIBUTIONS, SPENDINGS


def _print(kind: str, rows: dict[str, str], json: bool) -> None:
    if json:
        print_json(rows)
        return
    listing = table(kind, "what it is", left=2)
    for name, text in rows.items():
        listing.add_row(name, text)
    out.print(listing)


def methods(json: o.Json = False) -> None:
    """List the methods."""
    _print("method", {name: one.about for name, one in METHODS.items()}, json)


def datasets(json: o.Json = False) -> None:
    """List the data sets, and the ways to share them out."""
    rows = {
        name: source.about + ("" if source.embedded else "; from --data or DPFL_DATA")
        for name, source in DATASETS.items()
    }
    rows["FOLDER"] = (
        "your own: one CSV or Parquet file per client, numbers, the label last (or --label)"
    )
    _print("data set", rows, json)
    if not json:
        out.print()
        laws = {
            "natural": "the silos a data set comes with",
            **{name: text for name, (_, text) in PARTITIONS.items()},
        }
        _print("partition", laws, json)


def budgets(json: o.Json = False) -> None:
    """List the distributions of epsilon, and the ways to spend a budget."""
    rows = {name: f"{law}  [{law.source}]" for name, law in DISTRIBUTIONS.items()}
    rows |= {
        "NUMBER": "the same for all",
        "LIST": "one for each client: 0.5,1,3",
        "FILE": "id,epsilon[,delta] as .csv, or .json",
    }
    _print("budgets", rows, json)
    if not json:
        out.print()
        _print("spending", SPENDINGS, json)


def models(json: o.Json = False) -> None:
    """List the models."""
    _print("model", {name: about_model(name) for name in sorted(MODELS | TEXT_MODELS)}, json)
