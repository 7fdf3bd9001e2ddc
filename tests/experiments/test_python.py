"""Studies from Python: on experiments in every form, and on a federation of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dpfl
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.experiments import compare as library
from dpfl.experiments.ranking import standings
from dpfl.experiments.tuning import RunStore
from dpfl.runs.experiment import Experiment

from ..sim import own_training as own

VALUES: dict[str, Any] = {
    "data": {"name": "breast_cancer"},
    "partition": {"clients": 3},
    "budgets": {"epsilon": [2.0, 4.0, 8.0], "delta": 1e-3},
    "method": {"lr": 0.5, "clip": 1.0, "batch_size": 32, "local_steps": 1},
    "run": {"rounds": 2},
}
METHODS = ["weiavg", "fedavg_dp"]


def _strategies() -> dict[str, dpfl.Strategy]:
    return {"quick": own.strategy(), "slow": own.strategy(lr=0.01)}


def _own(**more: Any) -> dpfl.StudyResult:
    given = {"federation": own.federation(), "model": own.model(), "strategies": _strategies()}
    return dpfl.compare(**{**given, "rounds": 3, "seeds": 2, "progress": False, **more})


def test_an_experiment_may_be_an_object_a_file_or_a_dict(tmp_path: Path) -> None:
    whole = {**VALUES, "method": {**VALUES["method"], "name": "weiavg"}}
    file = tmp_path / "experiment.toml"
    file.write_text(Experiment.from_dict(whole).to_toml())
    found = [
        dpfl.describe(source).to_dict()
        for source in (whole, file, str(file), Experiment.from_dict(whole))
    ]
    assert found[0]["method"] == "weiavg"
    assert all(one == found[0] for one in found)
    (one,) = dpfl.plan(file, timing=False).methods
    assert one.description.to_dict() == found[0]


def test_compare_is_the_comparison_of_the_command_line(tmp_path: Path) -> None:
    store = RunStore(kept=tmp_path / "kept")
    expected = library.compare(VALUES, METHODS, seeds=[0, 1], store=store)
    found = dpfl.compare(VALUES, METHODS, seeds=2, folder=tmp_path / "study", progress=False)
    assert found.cells == expected.cells
    assert dpfl.StudyResult.read(tmp_path / "study").cells == expected.cells
    assert dpfl.report(tmp_path / "study").exists()
    other = {**VALUES, "run": {"rounds": 1}}
    with pytest.raises(DpflError, match="results of another experiment") as caught:
        dpfl.compare(other, METHODS, seeds=2, folder=tmp_path / "study")
    assert caught.value.exit_code == 5


def test_runs_of_ones_own_are_those_of_train(tmp_path: Path) -> None:
    result = _own(folder=tmp_path)
    for cell in result.cells:
        for run in cell.runs:
            alone = dpfl.train(
                own.model(), own.federation(), _strategies()[cell.label], rounds=3, seed=run.seed
            )
            assert run.value == alone.value
            assert run.epsilon == alone.summary.epsilon
    best = {one.label: one.best for one in standings(result.cells)}
    assert best == {"quick": True, "slow": False}
    frame = result.to_pandas()
    assert list(frame["method"]) == ["quick", "quick", "slow", "slow"]
    assert list(frame["accuracy"]) == [run.value for cell in result.cells for run in cell.runs]
    page = dpfl.report(tmp_path).read_text()
    assert "quick" in page
    assert "slow" in page


def test_a_repeated_comparison_runs_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _own(folder=tmp_path)
    played: list[str] = []
    original = dpfl.sim.loop.Simulation.play

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        played.append(self.strategy.name)
        return original(self, *arguments, **options)

    monkeypatch.setattr(dpfl.sim.loop.Simulation, "play", counted)
    more = {**_strategies(), "other": own.strategy(lr=0.1)}
    again = _own(folder=tmp_path, strategies=more)
    assert again.cells[:2] == first.cells
    assert len(played) == 2  # the new one, with two seeds
    with pytest.raises(DpflError, match="results of another experiment"):
        _own(folder=tmp_path, federation=own.federation(shift=0.5))


def test_a_model_may_be_built_from_the_seed() -> None:
    starts: list[int] = []

    def build(seed: int) -> torch.nn.Module:
        starts.append(seed)
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 2)

    result = _own(model=build, strategies={"quick": own.strategy()})
    assert {0, 1} == set(starts)
    (cell,) = result.cells
    torch.manual_seed(1)
    alone = dpfl.train(torch.nn.Linear(3, 2), own.federation(), own.strategy(), rounds=3, seed=1)
    assert cell.runs[1].value == alone.value


def test_sweep_and_tune() -> None:
    swept = dpfl.sweep(VALUES, {"budgets.scale": [1, 2]}, METHODS[:1], seeds=1, progress=False)
    frame = swept.to_pandas()
    assert list(frame["budgets.scale"]) == [1, 2]
    assert frame["epsilon_largest"].is_monotonic_increasing
    tuned = dpfl.tune(VALUES, METHODS[:1], over={"method.lr": [0.001, 0.5]}, progress=False)
    (cell,) = tuned.cells
    best = max(one.validation for one in cell.tried)
    winners = [one.values["method.lr"] for one in cell.tried if one.validation == best]
    assert tuned.settings() == {"weiavg": {"lr": winners[0]}}
    page = tuned._repr_html_()
    assert f"lr = {winners[0]}" in page
    assert "no privacy cost" in page  # what the choice rests on is said


def test_studies_show_themselves() -> None:
    page = _own()._repr_html_()
    assert "best" in page
    assert "NOT PRIVATE: SEEDED" in page
    described = dpfl.describe(
        federation=own.federation(), model=own.model(), strategy=own.strategy(), rounds=2
    )
    assert "EpsilonWeights" in described._repr_html_()
    planned = dpfl.plan(VALUES, METHODS, timing=False)._repr_html_()
    assert "try first" in planned


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: dpfl.compare(VALUES), "names no method"),
        (lambda: dpfl.compare(VALUES, METHODS, rounds=3), "an experiment and rounds"),
        (lambda: dpfl.compare(), "lacks federation, model, strategies, rounds"),
        (lambda: dpfl.compare(3, METHODS), "3 is not an experiment"),  # type: ignore[arg-type]
        (lambda: dpfl.compare(VALUES, METHODS, seeds=0), "seeds = 0"),
        (lambda: dpfl.compare(VALUES, METHODS, seeds=[1, 1]), "repeats a seed"),
        (lambda: dpfl.compare(VALUES, ["weiavgg"]), "weiavg"),
        (lambda: _own(strategies={}), "strategies = {}"),
        (lambda: _own(strategies={"a": "weiavg"}), "'weiavg' is not a strategy"),
        (lambda: _own(model=lambda seed: None), "is not a module"),
        (lambda: _own(rounds=0), "rounds = 0"),
        (lambda: dpfl.describe(), "lacks federation, model, strategy, rounds"),
        (lambda: dpfl.plan(VALUES), "names no method"),
        (lambda: dpfl.describe("nowhere.toml"), "nowhere.toml"),
    ],
)
def test_bad_input_is_named(call: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert problem in str(caught.value)


def test_what_is_printed_is_readable() -> None:
    study, values = _own(), {**VALUES, "method": {**VALUES["method"], "name": "weiavg"}}
    plan = dpfl.plan(VALUES, METHODS, timing=False)
    for shown in map(str, (study, plan, dpfl.describe(values))):
        assert "<" not in shown
        assert "method" in shown or "promise " in shown
        assert "Unit.RECORD" not in shown


def test_a_search_is_a_frame_of_candidates() -> None:
    found = dpfl.tune(VALUES, ["weiavg"], over={"method.lr": [0.1, 0.5]}, progress=False)
    frame = found.to_pandas()
    assert list(frame["method.lr"]) == [0.1, 0.5]
    best = frame.loc[frame["validation_accuracy"].idxmax(), "method.lr"]
    assert list(frame.loc[frame["chosen"], "method.lr"]) == [best]
    shown = [f"{100 * frame['validation_accuracy'].agg(which):.1f}" for which in ("max", "min")]
    assert ["weiavg", "lr", "=", str(best), *shown, "2"] in [
        line.split() for line in str(found).splitlines()
    ]
