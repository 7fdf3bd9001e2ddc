"""The public page: what may be shown to everyone, also where sampling amplifies against everyone.

Left out, whatever the method: names, participation, per-client values, accuracy and loss (measured
on private records, not noised), bytes and seconds (they tell who took part), the number of clients
where its change is what is hidden, and the seed (whoever knows it can subtract the noise of a
seeded run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from dpfl.privacy.accountant import shown
from dpfl.report import sections, words
from dpfl.report.charts import chosen
from dpfl.report.reading import Material, ReadRun

_STAMPS = {
    "WEAK": "WEAK: delta is too large for some clients",
    "FALSE CLAIMS": "FALSE CLAIMS: some clients claim a multiple of their epsilon (a simulation)",
}


def public_parts(material: Material) -> dict[str, str]:
    """The parts of the public page."""
    runs = chosen(material.cases[0])
    return {
        "summary": _summary(runs),
        "guarantees": sections.guarantees_part({label: run.summary for label, run in runs.items()}),
        "experiment": sections.experiment_part(
            {
                label: tomli_w.dumps(public_experiment(run.experiment))
                for label, run in runs.items()
            },
            "dpfl run experiment.toml, with data, budgets and a seed of your own",
        ),
    }


def _summary(runs: Mapping[str, ReadRun]) -> str:
    body = "<h2>In short</h2>"
    for label, run in runs.items():
        told = run.summary
        stamps = [
            stamp
            for stamp in told["stamps"]
            if not stamp.startswith(("UNACCOUNTED", "UNPUBLISHED"))
        ]
        for stamp in stamps:
            named = next(
                (text for start, text in _STAMPS.items() if stamp.startswith(start)), stamp
            )
            body += f'<div class="stamp">{sections.text(named)}</div>'
        body += f"<h3>{sections.text(label)}</h3>" + sections.paragraph(words.promise(told))
        largest = told["epsilon"].get("spent", {}).get("largest")
        if told["observer"] != "nobody" and isinstance(largest, int | float):
            delta = max(
                (line["delta"] for line in told["statements"] if line["delta"]), default=None
            )
            body += sections.paragraph(
                f"The privacy loss of any {told['unit']} is at most epsilon {shown(largest)}"
                + (f" at delta {delta:g}" if delta else "")
                + f", {told['adjacency']} adjacency, against the {told['observer']}."
            )
            body += sections.paragraph(words.meaning(told, float(largest), delta))
    if len(runs) > 1:
        body += sections.paragraph(
            "Each run is billed alone: publishing more than one of them on the same data adds up."
        )
    return body + sections.paragraph(
        "Who took part, what single sites granted and spent, accuracy, and everything of single rounds are left out on "
        "purpose: some of it is not covered by the guarantee."
    )


def public_experiment(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment without names, paths, budgets of single clients, numbers of clients, and the
    seed.
    """
    data = experiment["data"]
    budgets = experiment.get("budgets", {})
    hidden_count = {"clients", "records", "smallest"}
    hidden = {"seed", "liars", "workers"}
    if isinstance(experiment["run"].get("cohort"), int):
        hidden.add(
            "cohort"
        )  # with the sampling rate, which epsilon and noise tell, it would tell how many there are
    run = {name: value for name, value in experiment["run"].items() if name not in hidden}
    plain = {
        name: value
        for name, value in experiment["method"].items()
        if isinstance(value, int | float | str)
    }
    method = {name: value for name, value in plain.items() if name != "gain_seed"}
    if isinstance(experiment["method"].get("public"), list):
        method["public"] = "withheld"
    return {
        "data": {"name": data["name"]} if "name" in data else {"folder": "withheld"},
        "partition": {
            k: v for k, v in experiment.get("partition", {}).items() if k not in hidden_count
        },
        "budgets": {"epsilon": "withheld"}
        | ({"delta": budgets["delta"]} if isinstance(budgets.get("delta"), float) else {}),
        "model": experiment["model"],
        "method": method,
        "run": run,
    }
