"""The public page: canaries of everything an amplified observer may not see are in the full page,
and not in this one.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpfl.cli.main import run_command
from dpfl.privacy.accountant import shown
from dpfl.report.public import public_experiment
from dpfl.report.reading import of_folders
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment
from tests.report.conftest import copied, reported, rounds_of, summary_of

SITES = [
    f"canary-site-{name}" for name in "abcdefghijklm"
]  # thirteen: a number that nothing else has
SEED = 918273645
GRANTS = (1.2371, 2.4683, 6.1357)
WEAK = 0.081357  # above 1 / clients and 1 / records, so that a stamp names a client


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canary-xyz-folder") / "canary-sites"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in SITES:
        labels = rng.integers(0, 2, 30)
        rows = [
            f"{x:.4f},{x * 2:.4f},{y}"
            for x, y in zip(rng.normal(size=30) + labels, labels, strict=True)
        ]
        (folder / f"{site}.csv").write_text(
            "canary_age,canary_pressure,canary_ill\n" + "\n".join(rows) + "\n"
        )
    return folder


def _experiment(sites: Path, method: dict[str, Any], run: dict[str, Any]) -> Experiment:
    common = {"lr": 0.4567, "clip": 1.0, "batch_size": 8, "local_steps": 2}
    return Experiment.from_dict(
        {
            "data": {"folder": str(sites), "label": "canary_ill"},
            "budgets": {
                "epsilon": {site: GRANTS[i % 3] for i, site in enumerate(SITES)},
                "delta": WEAK,
            },
            "method": {**common, **method},
            "run": {"rounds": 4, "seed": SEED, **run},
            "client_settings": {"lr": [0.4567, 0.1234321]},
            "clients": {SITES[3]: {"batch_size": 19, "lr": 0.0777}},
        }
    )


@pytest.fixture(scope="session", params=["dp_fed", "weiavg"])
def secret(
    request: pytest.FixtureRequest, sites: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run full of canaries: by a method that draws its cohorts in secret, and by one that is lied
    to.
    """
    folder = tmp_path_factory.mktemp("secret") / str(request.param)
    if request.param == "dp_fed":
        experiment = _experiment(sites, {"name": "dp_fed"}, {"cohort": 0.45, "sampling": "poisson"})
    else:
        experiment = _experiment(sites, {"name": "weiavg"}, {"misreports": {SITES[5]: 77.0}})
    run_experiment(experiment, folder)
    reported(folder)
    reported(folder, "public.html", public=True)
    return folder


def words_of(page: Path) -> str:
    """What stands on the page and in its data; styles and scripts are the same for everyone."""
    text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page.read_text(), flags=re.S)
    return html.unescape(text)


def _spellings(value: float) -> set[str]:
    """How a number could be told: exactly, as a share or percentage, rounded."""
    return {str(value), json.dumps(value), f"{value:.3f}", f"{100 * value:.1f} %", f"{value:.4g}"}


def test_names_paths_and_settings_of_single_clients_are_left_out(secret: Path, sites: Path) -> None:
    full, public = (secret / "report.html").read_text(), (secret / "public.html").read_text()
    known = ["canary", str(sites), *SITES, "0.0777", "0.1234321", "batch_size = 19", "canary_ill"]
    if "weiavg" in str(secret):
        known += ["77.0", "x 77"]
    for canary in known:
        assert canary in full, canary
        assert canary not in public, canary
    assert "canary" not in public.lower()


def test_the_seed_is_left_out(secret: Path) -> None:
    assert str(SEED) in (secret / "report.html").read_text()
    public = (secret / "public.html").read_text()
    assert str(SEED) not in public
    assert not re.search(r"seed\s*=", words_of(secret / "public.html"))


def test_accuracy_and_loss_of_every_round_are_left_out(secret: Path) -> None:
    full, public = words_of(secret / "report.html"), words_of(secret / "public.html")
    told = summary_of(secret)
    lines = rounds_of(secret)
    assert f'data-value="{told["accuracy"]}"' in full
    assert f"{100 * told['accuracy']:.1f} %" in full
    assert all(json.dumps(100 * line["accuracy"]) in full for line in lines)
    for line in (told, *lines):
        for value in (line["accuracy"], line["loss"], 100 * line["accuracy"]):
            for spelling in _spellings(value) - {"0", "1", "0.0", "1.0"}:
                assert spelling not in public, spelling
    assert "UNACCOUNTED" in full and "UNACCOUNTED" not in public


def test_bytes_seconds_and_participation_are_left_out(secret: Path) -> None:
    full, public = words_of(secret / "report.html"), words_of(secret / "public.html")
    told = summary_of(secret)
    assert str(told["bytes_up"]) in full
    for canary in (
        str(told["bytes_up"]),
        str(told["bytes_down"]),
        "KiB",
        "MiB",
        "seconds",
        "cohorts",
        "arrived",
    ):
        assert canary not in public, canary
    counts = {len(line["cohort"]) for line in rounds_of(secret)}
    if "dp_fed" in str(secret):
        assert len(counts) > 1  # the draw is random: its sizes would tell
    for count in counts | {len(set().union(*(line["cohort"] for line in rounds_of(secret))))}:
        assert not re.search(rf"\b{count} (of|sites|clients)\b", public)


def test_the_number_of_clients_is_left_out(secret: Path) -> None:
    full, public = words_of(secret / "report.html"), words_of(secret / "public.html")
    assert "13 sites" in full
    assert not re.search(r"\b13\b|\bthirteen\b", public, re.I)


def test_no_single_client_s_epsilon_is_told_but_the_largest_as_the_bound_of_all(
    secret: Path,
) -> None:
    full, public = words_of(secret / "report.html"), words_of(secret / "public.html")
    told = summary_of(secret)
    largest = told["epsilon"]["spent"]["largest"]
    values = {line[key] for line in told["statements"] for key in ("epsilon", "budget")}
    assert len(values) >= 4
    for value in values:
        assert str(value) in full
        assert str(value) not in public
        if value != largest:
            assert shown(value) not in public
    assert f"is at most epsilon {shown(largest)}" in public


def test_stamps_that_name_clients_are_told_without_the_names(secret: Path) -> None:
    full, public = words_of(secret / "report.html"), words_of(secret / "public.html")
    stamps = [flag["text"] for flag in summary_of(secret)["flags"]]
    assert any("WEAK" in stamp and "canary" in stamp for stamp in stamps)
    assert all(stamp in full for stamp in stamps)
    assert "WEAK: delta is too large for some clients" in public
    assert "NOT PRIVATE: SEEDED" in public
    if "weiavg" in str(secret):
        assert "FALSE CLAIMS" in public


def test_there_is_no_figure_and_no_hidden_data(secret: Path, tmp_path: Path) -> None:
    public, full = (secret / "public.html").read_text(), (secret / "report.html").read_text()
    embedded = re.compile(r'<script type="application/json" id="figures">(.*?)</script>', re.S)
    assert json.loads(embedded.findall(public)[0]) == {}
    assert len(json.loads(embedded.findall(full)[0])) > 3
    assert 'class="plot"' not in public and "data-value" not in public and "data-fact" not in public
    assert len(public) < 40_000  # not even the library that draws
    figures = tmp_path / "figures"
    arguments = ["--public", "--figures", str(figures), "--out", str(tmp_path / "p.html")]
    assert run_command(["report", str(secret), *arguments]) == 0
    assert list(figures.iterdir()) == []


def test_the_promise_is_told(secret: Path) -> None:
    public = words_of(secret / "public.html")
    told = summary_of(secret)
    assert f"{told['adjacency']} adjacency, against the {told['observer']}" in public
    assert "An epsilon of" in public and "times as likely" in public
    assert all(assumption in public for assumption in told["assumptions"])
    assert f'name = "{told["method"]}"' in public


def test_public_goes_beside_the_full_page_and_does_not_replace_it(
    weiavg: Path, tmp_path: Path
) -> None:
    place = copied(weiavg, tmp_path / "run")
    assert run_command(["report", str(place)]) == 0
    full = (place / "report.html").read_bytes()
    assert run_command(["report", str(place), "--public"]) == 0
    assert (place / "report.html").read_bytes() == full
    assert (place / "public.html").exists()


def test_a_public_comparison_tells_promises_and_no_results(
    comparison: Path, tmp_path: Path
) -> None:
    page = tmp_path / "p.html"
    assert run_command(["report", str(comparison), "--public", "--out", str(page)]) == 0
    public = words_of(page)
    material = of_folders([comparison])
    for run in material.runs:
        for spelling in _spellings(run.result.accuracy):
            assert spelling not in public
        assert str(run.result.bytes_up) not in public
    assert "client-0" not in public
    for label in material.cases[0].methods:
        assert f"<h3>{label}</h3>" in public
    assert "behind" not in public and "best" not in public


@pytest.mark.parametrize("field", ["clients", "records", "smallest"])
def test_counts_of_the_partition_are_left_out(field: str, dp_fed_ls: Path) -> None:
    values = of_folders([dp_fed_ls]).runs[0].experiment.to_dict()
    values["partition"][field] = 4711
    assert "4711" not in json.dumps(public_experiment(Experiment.from_dict(values)))


@pytest.mark.parametrize("field", ["cohort", "least_willing"])
def test_counts_of_the_run_are_left_out(field: str, dp_fed_ls: Path) -> None:
    values = of_folders([dp_fed_ls]).runs[0].experiment.to_dict()
    values["run"][field] = 4711
    assert "4711" not in json.dumps(public_experiment(Experiment.from_dict(values)))


def test_every_setting_of_a_run_is_known_to_be_public_or_left_out(dp_fed_ls: Path) -> None:
    """A new field of an experiment does not reach the public page by itself."""
    told = public_experiment(of_folders([dp_fed_ls]).runs[0].experiment)
    assert set(told) == {"data", "partition", "budgets", "model", "method", "run"}
    assert set(told["run"]) <= {
        "rounds", "cohort", "sampling", "noise", "engine", "device", "evaluate_every", "dropout",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["method"].update(public=["canary-a", "canary-b"]),
        lambda e: e["run"].update(misreports={"canary-a": 100.0}),
        lambda e: e["budgets"].update(epsilon={"canary-a": 1.0}, delta={"canary-a": 1e-5}),
        lambda e: e["budgets"].update(epsilon="canary-budgets"),
        lambda e: e.update(clients={"canary-a": {"lr": 0.1}}),
        lambda e: e.update(data={"folder": "/home/canary", "label": "canary"}),
        lambda e: e["model"].update(weights="/home/canary/w", weights_sha256="0" * 64),
    ],
    ids=[
        "public clients",
        "misreports",
        "budgets",
        "name of budgets",
        "clients",
        "folder",
        "model",
    ],
)
def test_no_section_of_the_experiment_carries_a_name(
    change: Callable[[Any], object], pfa: Path
) -> None:
    values = of_folders([pfa]).runs[0].experiment.to_dict()
    change(values)
    assert "canary" in json.dumps(values)
    assert "canary" not in json.dumps(public_experiment(Experiment.from_dict(values)))
