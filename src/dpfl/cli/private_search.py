"""``dpfl tune --accounted``: a search that has a privacy cost of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl.cli import console as c, options as o
from dpfl.cli.values import Values, check_complete
from dpfl.core.checks import check
from dpfl.privacy.accountant import shown

if TYPE_CHECKING:
    from dpfl.experiments.search_result import SearchResult

STAYS_HERE = (
    "For the server alone, in operator.json: {}. Publishing the number of runs, or anything of the "
    "others, would void the epsilon of the search."
)
AGAIN = (
    "The model of the best run is covered by this epsilon; {} trains another one with the same "
    "settings, which costs its own epsilon in addition."
)


def tune_privately(
    asked: o.Asked,
    values: Values,
    lists: dict[str, list[Any]],
    mean: float,
    metric: dict[str, Any],
    most_epsilon: float | None,
) -> None:
    """Search one method; write what may be published, and what stays with the server, apart."""
    from safetensors.torch import save_model

    from dpfl.core.files import write_safely
    from dpfl.experiments import compare as library
    from dpfl.experiments.private_search import private_search
    from dpfl.plugs.accounted_metric import AccountedMetric
    from dpfl.privacy.selection import RandomRuns
    from dpfl.runs.folder import free_name

    names, _ = asked.candidates()
    check(
        len(names) == 1,
        "--accounted",
        f"{len(names)} methods were given; searches of several methods add up",
        "name one with --methods",
    )
    check(
        metric["share"] is not None,
        "--score-share",
        "was not given",
        "give for instance --score-share 0.1: a tenth of every budget",
    )
    (name,) = names
    own = library.own_searches(values, names, asked.data)
    over = lists or {**library.GRID, **own.get(name, {})}
    first = {key.removeprefix("method."): choices[0] for key, choices in over.items()}
    check_complete({**values, "method": {**values.get("method", {}), **first}}, name)
    folder = asked.folder or free_name(Path("runs"), "tune")
    result = private_search(
        values,
        name,
        over,
        runs=RandomRuns(mean=mean),
        metric=AccountedMetric(**metric),
        most_epsilon=most_epsilon,
        data_folder=asked.data,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, told in (("search.json", result), ("operator.json", result.operator)):
        write_safely(folder / file, json.dumps(told.to_dict(), indent=2).encode())
    c.answer(asked.json, result.to_dict(), _show, result)
    c.note(STAYS_HERE.format(result.operator))
    if result.model is not None and result.experiment is not None:
        save_model(result.model, str(folder / "model.safetensors"))
        again = folder / f"{name}.toml"
        write_safely(again, result.experiment.to_toml().encode())
        c.note(AGAIN.format(f"dpfl run {again}"))


def _show(result: SearchResult) -> None:
    """Print what was chosen, and what that costs each client."""
    c.out.print(str(result))
    rows = [
        [client, shown(own.epsilon), f"{own.delta:g}"] for client, own in result.epsilon.items()
    ]
    c.print_table(("client", "epsilon of the search", "delta"), rows, left=1)
