"""The report: one self-contained HTML file, the same page for a finished run, a comparison, and a
run that goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dpfl.core.files import write_safely
from dpfl.report import sections
from dpfl.report.charts import (
    Chart,
    accuracy_by_round,
    chosen,
    cost_charts,
    outcome_charts,
    privacy_charts,
)
from dpfl.report.details import detail_charts
from dpfl.report.interactive import plotly_script, specification
from dpfl.report.public import public_parts
from dpfl.report.reading import Case, Material, ReadRun


@dataclass(frozen=True, kw_only=True)
class Page:
    """Parts in order, as HTML, and the figures that belong into them."""

    title: str
    parts: dict[str, str]
    charts: Sequence[Chart]
    finished: bool = True

    def figures(self) -> dict[str, Any]:
        """What is drawn, by name."""
        return {chart.name: specification(chart) for chart in self.charts}


def full_page(material: Material) -> Page:
    """The operator's page: everything."""
    outcome, privacy, cost = (
        outcome_charts(material),
        privacy_charts(material),
        cost_charts(material),
    )
    inside = detail_charts(material)
    case = material.cases[0]
    runs = chosen(case)
    parts = {
        "summary": sections.summary_part(material),
        "accounts": sections.accounts_part(material, privacy),
        "outcome": sections.outcome_part(outcome),
        **({"details": sections.details_part(inside)} if inside else {}),
        "cost": sections.cost_part(cost),
        "guarantees": sections.guarantees_part({label: run.summary for label, run in runs.items()}),
        "experiment": sections.experiment_part(
            {label: run.toml for label, run in runs.items()}, "dpfl run experiment.toml"
        ),
    }
    charts = [*privacy, *outcome, *(chart for own in inside.values() for chart in own), *cost]
    return Page(title=material.title, parts=parts, charts=charts)


def public_page(material: Material) -> Page:
    """The version that holds nothing an observer against whom sampling amplifies may not see: no
    figures at all.
    """
    return Page(title="What this training guarantees", parts=public_parts(material), charts=[])


def going_on_page(run: ReadRun) -> Page:
    """The page of a run that has not come to its end."""
    case = Case(methods={run.method: [run]})
    material = Material(title=f"{run.method}: going on", cases=[case])
    outcome, cost, inside = accuracy_by_round(case), cost_charts(material), detail_charts(material)
    parts = {
        "summary": sections.progress_part(run),
        "outcome": sections.outcome_part(outcome),
        **({"details": sections.details_part(inside)} if inside else {}),
        "cost": sections.cost_part(cost),
        "experiment": sections.experiment_part({run.method: run.toml}, "dpfl run experiment.toml"),
    }
    charts = [*outcome, *(chart for own in inside.values() for chart in own), *cost]
    return Page(title=material.title, parts=parts, charts=charts, finished=False)


def render(page: Page, *, live: str = "", version: str = "") -> str:
    """The whole file. Nothing is fetched from anywhere, but news from its own server where the page
    is live.
    """
    body = "".join(
        f'<section data-part="{name}">{part}</section>' for name, part in page.parts.items()
    )
    script = plotly_script() if page.charts or live else "window.Plotly = { react() {} };"
    asked = f' data-live="{live}" data-version="{version}"' if live and not page.finished else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{sections.text(page.title)} - dpfl</title><link rel="icon" href="data:,">'
        f"<style>{_asset('page.css')}</style></head><body{asked}><main>"
        f"<header><h1>{sections.text(page.title)}</h1><p>Differentially private federated learning with dpfl</p></header>"
        f'<div id="parts">{body}</div>'
        "<footer>Made by dpfl. This file is complete: it needs no network.</footer></main>"
        f'<script type="application/json" id="figures">{_json(page.figures())}</script>'
        f"<script>{script}</script><script>{_asset('page.js')}</script></body></html>\n"
    )


def write_report(material: Material, path: Path, *, public: bool = False) -> Path:
    """Write the page."""
    page = public_page(material) if public else full_page(material)
    write_safely(path, render(page).encode())
    return path


def all_charts(material: Material) -> list[Chart]:
    """Every figure of the full page, for files."""
    return list(full_page(material).charts)


def _asset(name: str) -> str:
    return resources.files("dpfl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(value).replace("<", "\\u003c")
