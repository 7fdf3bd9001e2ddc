"""Runs that are made once, pages about them, and a real browser that keeps a record of everything
it meets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.plugs.base import FigureKind, FigureSpec
from dpfl.report.page import write_report
from dpfl.report.reading import of_folders
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment
from dpfl.strategy import Strategy
from tests.conftest import require

BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 8},
    "budgets": {"epsilon": [0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0, 8.0], "delta": 1e-3},
    "method": {"name": "weiavg", "lr": 0.3, "clip": 1.0, "batch_size": 8, "local_steps": 3},
    "run": {"rounds": 5},
}
METHODS: dict[str, dict[str, Any]] = {
    "weiavg": {},
    "fedavg": {"method": {"name": "fedavg", "lr": 0.3, "batch_size": 8, "local_steps": 3}},
    "robust_hdp": {"method": {"name": "robust_hdp"}},
    "pfa": {"method": {"name": "pfa"}},
    "fedceo": {
        "budgets": {"epsilon": 18.0, "delta": 1e-4},
        "method": {"name": "fedceo", "interval": 2, "noise_multiplier": 4.0},
    },
    "dp_fed_ls": {"method": {"name": "dp_fed_ls"}, "run": {"cohort": 0.5, "rounds": 4}},
}


SPECS: dict[str, list[tuple[str, FigureSpec]]] = {
    "robust_hdp": [
        (
            "weights",
            FigureSpec(
                name="noise-estimates",
                title="estimated and true noise",
                kind=FigureKind.AGAINST_TRUE_NOISE,
                metrics={"estimated_noise": "clients"},
                x_label="true noise variance",
                y_label="estimated",
                caption="Only ratios between clients matter.",
            ),
        )
    ],
    "pfa": [
        (
            "clean",
            FigureSpec(
                name="subspace",
                title="energy inside the public subspace",
                kind=FigureKind.BY_ROUND,
                metrics={"private_energy_kept": "private", "public_energy_kept": "public"},
                y_label="share of the squared norm",
                caption="What a projection keeps.",
                log_y=True,
            ),
        ),
        (
            "clean",
            FigureSpec(
                name="public-spectrum",
                title="spectrum of the public updates",
                kind=FigureKind.SPECTRUM,
                metrics={"/spectrum": "spectrum"},
                x_label="direction",
                y_label="singular value",
                caption="Tensor by tensor.",
                log_y=True,
            ),
        ),
    ],
    "fedceo": [
        (
            "clean",
            FigureSpec(
                name="spectrum",
                title="spectrum and threshold",
                kind=FigureKind.SPECTRUM,
                metrics={"/singular_values": "spectrum"},
                x_label="direction",
                y_label="singular value",
                caption="What is below the dashed line is taken away.",
                threshold="/threshold",
            ),
        ),
        (
            "clean",
            FigureSpec(
                name="smoothness",
                title="roughness",
                kind=FigureKind.CLIENT_MAP,
                metrics={"smoothness_map_before": "before", "smoothness_map_after": "after"},
                x_label="client",
                y_label="class",
                caption="Small is smooth.",
            ),
        ),
    ],
    "dp_fed_ls": [
        (
            "noise",
            FigureSpec(
                name="central-noise",
                title="noise and update",
                kind=FigureKind.BY_ROUND,
                metrics={"norm": "noise", "norm_after": "after", "update_norm": "update"},
                y_label="norm",
                caption="Where the update is no longer than the noise, little is learned.",
                log_y=True,
            ),
        )
    ],
}
"""One declared figure of every kind, of metrics that these methods report."""


@pytest.fixture(scope="session", autouse=True)
def _declared() -> Iterator[None]:
    """Methods declare these figures, whatever their components declare themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "figures", lambda strategy: SPECS.get(strategy.name, []))
        yield


def experiment_of(**changes: Any) -> Experiment:
    """The base with sections merged; a method of another kind brings its own settings."""
    values = {name: dict(section) for name, section in BASE.items()}
    for section, fields in changes.items():
        fresh = section == "method" and fields.get("name") == "fedavg"
        values[section] = dict(fields) if fresh else {**values.get(section, {}), **fields}
    return Experiment.from_dict(values)


def summary_of(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return told


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def copied(folder: Path, place: Path) -> Path:
    """What a report reads of a run, to be spoilt."""
    place.mkdir(parents=True)
    for name in ("experiment.toml", "rounds.jsonl", "timings.jsonl", "summary.json"):
        shutil.copy(folder / name, place / name)
    return place


def renamed(folder: Path, place: Path, names: dict[str, str]) -> Path:
    """A copy in which clients have other names."""
    copied(folder, place)
    for file in ("rounds.jsonl", "summary.json"):
        text = (place / file).read_text()
        for old, new in names.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (place / file).write_text(text)
    return place


def grown(folder: Path, place: Path, clients: int) -> Path:
    """A copy in which every client stands for many, so that there are as many as asked for."""
    copied(folder, place)
    told = summary_of(folder)
    lines = told["statements"]
    many = [f"client-{number:04d}" for number in range(clients)]
    twins = {name: lines[number % len(lines)]["account"] for number, name in enumerate(many)}
    by_name = {line["account"]: line for line in lines}
    told["statements"] = [{**by_name[twins[name]], "account": name} for name in many]
    told["clients"] = clients
    (place / "summary.json").write_text(json.dumps(told))
    spread = []
    for line in rounds_of(folder):
        own = [name for name in many if twins[name] in line["weights"]]
        line["weights"] = {name: line["weights"][twins[name]] / clients for name in own}
        truth = line.get("simulated_truth", {})
        for key in ("oracle_weights", "noise_variance"):
            if key in truth:
                truth[key] = {name: truth[key][twins[name]] for name in own}
        line["cohort"] = line["arrived"] = own
        spread.append(json.dumps(line))
    (place / "rounds.jsonl").write_text("\n".join(spread) + "\n")
    return place


def reported(folder: Path, name: str = "report.html", *, public: bool = False) -> Path:
    return write_report(of_folders([folder]), folder / name, public=public)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Run a method once a session."""
    done: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in done:
            folder = tmp_path_factory.mktemp("runs") / name
            run_experiment(experiment_of(**METHODS[name]), folder)
            done[name] = folder
        return done[name]

    return make


@pytest.fixture(scope="session")
def weiavg(made: Callable[[str], Path]) -> Path:
    return made("weiavg")


@pytest.fixture(scope="session")
def fedavg(made: Callable[[str], Path]) -> Path:
    return made("fedavg")


@pytest.fixture(scope="session")
def robust_hdp(made: Callable[[str], Path]) -> Path:
    return made("robust_hdp")


@pytest.fixture(scope="session")
def pfa(made: Callable[[str], Path]) -> Path:
    return made("pfa")


@pytest.fixture(scope="session")
def fedceo(made: Callable[[str], Path]) -> Path:
    return made("fedceo")


@pytest.fixture(scope="session")
def dp_fed_ls(made: Callable[[str], Path]) -> Path:
    return made("dp_fed_ls")


SMALL = ("--dataset", "digits", "--clients", "6", "--rounds", "3", "--local-steps", "2", "--batch-size", "8", "--quiet",
         "--budgets", "0.5,1,2,4,8,8", "--delta", "1e-3", "--clip", "1", "--seeds", "2", "--workers", "1")  # fmt: skip


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Methods of two units and one that protects nobody, two seeds."""
    base = tmp_path_factory.mktemp("comparison")
    methods = "fedavg,fedavg_dp,weiavg,robust_hdp,dp_fed"
    place = ("--kept", str(base / "kept"), "--out", str(base / "compare"))
    assert run_command(["compare", *SMALL, "--methods", methods, *place]) == 0
    return base / "compare"


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods of different units over three scales of the budgets, two seeds."""
    base = tmp_path_factory.mktemp("sweep")
    place = ("--kept", str(base / "kept"), "--out", str(base / "sweep"))
    asked = ("--methods", "weiavg,dp_fed", "--over", "budgets.scale=0.1,1,2")
    assert run_command(["sweep", *SMALL, *asked, *place]) == 0
    return base / "sweep"


# -- the browser -----------------------------------------------------------------------------------


@dataclass
class Seen:
    """An open page, and what was said, asked for and popped up meanwhile."""

    page: Any
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where Chromium is; skip without one, unless ``DPFL_REQUIRE`` names ``browser``."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    path = next((path for name in names if (path := shutil.which(name))), None)
    if path is None:
        require("browser", "there is no Chromium on this machine")
    assert path is not None
    return path


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """Start Debian's Chromium, headless."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        require("browser", "playwright is not installed")
    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = driver.chromium.launch(executable_path=chromium, args=flags)
        yield started
        started.close()


@pytest.fixture(scope="session")
def look(browser: Any) -> Iterator[Callable[..., Seen]]:
    """Open a page at a width; every message, request and dialog is noted."""
    pages: list[Any] = []

    def opened(address: Path | str, width: int = 1440) -> Seen:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        seen = Seen(page=page)
        page.on("console", lambda message: seen.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.said.append(f"pageerror: {error}"))
        page.on("request", lambda request: seen.requests.append(request.url))

        def closed(dialog: Any) -> None:
            seen.dialogs.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", closed)
        page.goto(address.as_uri() if isinstance(address, Path) else address, timeout=60_000)
        page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
        return seen

    yield opened
    for page in pages:
        page.close()
