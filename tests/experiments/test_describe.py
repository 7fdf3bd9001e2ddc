"""Descriptions and plans as library calls: what they say before anything runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.core.types import Observer
from dpfl.experiments.compare import compare, fitting, own_searches, sweep, tune
from dpfl.experiments.describe import describe, noise_forecast
from dpfl.experiments.plan import plan
from dpfl.experiments.ranking import standings
from dpfl.experiments.results import StudyResult
from dpfl.experiments.tuning import RunStore
from dpfl.methods import METHODS, find
from dpfl.runs.experiment import Experiment, for_method

VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 4},
    "budgets": {"epsilon": [0.5, 1.0, 4.0, 8.0], "delta": 1e-3},
    "model": {"name": "mlp", "hidden": 8},
    "method": {"lr": 0.1, "clip": 1.0, "batch_size": 16, "local_steps": 2, "dimension": 20},
    "run": {"rounds": 2},
}


def of(method: str, **changes: Any) -> Experiment:
    return Experiment.from_dict(for_method({**VALUES, **changes}, method))


def without(setting: str) -> dict[str, Any]:
    kept = {name: value for name, value in VALUES["method"].items() if name != setting}
    return {**VALUES, "method": kept}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_described_and_its_document_is_json(method: str) -> None:
    found = describe(of(method))
    assert found.method == method
    assert found.promise == of(method).strategy(4).promise
    assert len(found.clients) == 4
    assert set(found.epsilon) == {Observer.SERVER, Observer.WORLD}
    assert bool(found.by_assumption) == (find(method).family == "wireless")
    assert found.bytes_up > 0
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["clients"] == 4
    assert document["observer"] == str(found.promise.observer)


POOR: dict[str, Any] = {"budgets": {"epsilon": 0.05, "delta": 1e-3}}


def test_noise_that_drowns_the_signal_is_said_by_all_three(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    poor = of("dp_fed", **POOR)
    warning = describe(poor).forecast.warning
    assert "learn little" in warning
    assert noise_forecast(poor).warning == warning
    assert plan([poor], timing=False).methods[0].description.forecast.warning == warning
    Path("e.toml").write_text(poor.to_toml())
    for command in (
        ["describe", "e.toml"],
        ["plan", "e.toml", "--methods", "dp_fed", "--no-timing"],
        ["run", "e.toml", "--quiet"],
    ):
        assert run_command(command) == 0
        assert "WARNING" in capsys.readouterr().err
    rich = of("fedavg_dp", budgets={"epsilon": 8.0, "delta": 1e-3})
    assert describe(rich).forecast.warning == ""


def test_a_forecast_before_a_run_looks_at_a_few_of_many_clients() -> None:
    many = of("weiavg", partition={"clients": 200}, budgets={"epsilon": "uniform", "delta": 1e-3})
    began = time.perf_counter()
    few = noise_forecast(many).noise_to_signal
    took = time.perf_counter() - began
    began = time.perf_counter()
    everyone = describe(many).forecast.noise_to_signal
    assert took < time.perf_counter() - began
    assert everyone is not None
    assert few == pytest.approx(everyone, rel=0.25)


def test_compare_sweep_and_tune_are_calls_with_typed_results(tmp_path: Path) -> None:
    store, usual = RunStore(kept=tmp_path / "kept"), without("dimension")
    compared = compare(usual, ["fedavg_dp", "weiavg"], seeds=[0, 1], store=store)
    lines = standings(compared.cells)
    assert [one.label for one in lines] == ["fedavg_dp", "weiavg"]
    assert sum(one.best for one in lines) == 1
    swept = sweep(usual, {"server.lr": [0.5, 1.0]}, ["weiavg"], seeds=[0], store=store)
    assert swept.cases == [{"server.lr": 0.5}, {"server.lr": 1.0}]
    accuracy = [cell.runs[0].accuracy for cell in swept.cells]
    assert compared.of_case({})[1].runs[0].accuracy in accuracy  # a step of 1 is plain averaging
    tuned = tune(usual, ["weiavg"], over={"method.lr": [0.01, 0.3]}, store=store)
    (cell,) = tuned.cells
    assert len(cell.tried) == 2
    assert tuned.settings() == {"weiavg": {"lr": cell.chosen["method.lr"]}}
    for result in (compared, swept, tuned):
        result.write(tmp_path / "results.json")
        assert StudyResult.read(tmp_path).to_dict() == json.loads(json.dumps(result.to_dict()))


def test_a_method_that_does_not_fit_is_named_with_its_reason() -> None:
    fit, refused = fitting({**VALUES, "model": {"name": "logistic"}}, ["weiavg", "centaur"])
    assert fit == ["weiavg"]
    assert list(refused) == ["centaur"]


def test_a_share_of_a_whole_number_setting_is_a_share_of_the_parameters() -> None:
    free = without("dimension")
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    wanted = [round(share * parameters) for share in find("dprp").search["dimension"]]
    assert own_searches(free, ["dprp"]) == {"dprp": {"method.dimension": wanted}}
    assert own_searches(VALUES, ["dprp", "weiavg"]) == {}
