"""A study: one rule for all methods, validation records that are no test records, runs that are
never repeated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dpfl
from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DataError, DpflError
from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer
from dpfl.experiments import pool as compare
from dpfl.experiments.compare import run_study
from dpfl.experiments.results import StudyResult
from dpfl.experiments.study import Sweep
from dpfl.experiments.tuning import RunStore
from dpfl.methods import find
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment

SMALL: dict[str, Any] = {
    "title": "small",
    "seeds": [0, 1],
    "base": {
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 4},
        "budgets": {"delta": 1e-3},
        "method": {"clip": 1.0, "batch_size": 8, "local_steps": 2},
        "run": {"rounds": 2},
    },
    "vary": {"budgets.epsilon": [1.0, 8.0]},
    "tune": {"over": {"method.lr": [0.001, 0.5]}, "seeds": [7]},
    "methods": {
        "fedavg": {},
        "weiavg": {},
        "oracle": {"name": "robust_hdp", "estimator": "oracle"},
    },
    "metrics": ["update_norm", "weights_metrics.nothing"],
}


def changed(**fields: Any) -> Sweep:
    return Sweep.from_dict({**SMALL, **fields})


def studied(study: Sweep, kept: Path, workers: int = 1) -> dict[str, Any]:
    """The results as they are written."""
    result = run_study(study, RunStore(kept=kept, workers=workers))
    document = result.to_dict()
    assert StudyResult.from_dict(json.loads(json.dumps(document))).to_dict() == document
    return document


def test_every_method_is_tried_over_the_same_values_in_every_case(tmp_path: Path) -> None:
    results = studied(changed(), tmp_path)
    assert [(c["case"]["budgets.epsilon"], c["label"]) for c in results["cells"]] == [
        (epsilon, label) for epsilon in (1.0, 8.0) for label in ("fedavg", "weiavg", "oracle")
    ]
    for cell in results["cells"]:
        assert [one["values"]["method.lr"] for one in cell["tried"]] == [0.001, 0.5]
        best = max(cell["tried"], key=lambda one: one["validation"])
        assert cell["chosen"] == best["values"]
        assert [run["seed"] for run in cell["runs"]] == [0, 1]
        assert all(
            0 < run["accuracy"] <= 1 and run["update_norm"]["last"] > 0 for run in cell["runs"]
        )
        assert "weights_metrics.nothing" not in cell["runs"][0]
    oracle = results["cells"][2]
    assert oracle["method"] == "robust_hdp"
    assert oracle["runs"][0]["noise_over_least"]["largest"] == pytest.approx(1.0, abs=1e-6)
    assert json.loads(json.dumps(results)) == results


def test_a_run_that_is_there_is_not_repeated_and_a_new_method_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"weiavg": {}}
    first = studied(changed(methods=few), tmp_path)
    ran: list[str] = []
    real = compare.run_experiment

    def spy(experiment: Experiment, *rest: Any, **more: Any) -> Any:
        ran.append(experiment.method.name)
        return real(experiment, *rest, **more)

    monkeypatch.setattr(compare, "run_experiment", spy)
    assert studied(changed(methods=few), tmp_path) == first
    assert ran == []
    again = studied(changed(methods={**few, "fedavg_dp": {}}), tmp_path)
    assert set(ran) == {"fedavg_dp"}
    assert again["cells"][0] == first["cells"][0]


def test_tuning_at_one_case_serves_all(tmp_path: Path) -> None:
    study = changed(
        tune={"over": {"method.lr": [0.001, 0.5]}, "seeds": [7], "at": {"budgets.epsilon": 8.0}},
        methods={"weiavg": {}},
        seeds=[0],
    )
    results = studied(study, tmp_path)
    assert results["cells"][0]["tried"] == results["cells"][1]["tried"]
    assert len(list(tmp_path.iterdir())) == 2 + 2  # two tuning runs, one final run a case


def test_two_workers_change_nothing(tmp_path: Path) -> None:
    study = changed(methods={"weiavg": {"lr": 0.1}}, seeds=[0], tune=None)
    one = studied(study, tmp_path / "one")
    two = studied(study, tmp_path / "two", 2)
    assert one == two


def test_a_tuned_setting_that_a_method_lacks_is_left_out_once() -> None:
    study = changed(tune={"over": {"method.lr": [0.1, 0.2], "method.k": [1, 2]}, "seeds": [7]})
    assert len(study.tunable("weiavg")) == 2
    plus = changed(
        tune={"over": {"method.lr": [0.1, 0.2], "method.k": [1, 2]}, "seeds": [7]},
        methods={"pfa": {}},
    )
    assert len(plus.tunable("pfa")) == 4


def test_validation_records_are_training_records_and_no_test_record_is_among_them() -> None:
    study = changed()
    case = study.cases()[0]
    tuning = study.rehearsal(case, "weiavg", {"method.lr": 0.1}, 7, ()).federation()
    final = study.experiment(case, "weiavg", {"method.lr": 0.1}, 7).federation()

    def rows(tensor: torch.Tensor) -> list[bytes]:
        return sorted(row.numpy().tobytes() for row in tensor)

    for client in final.ids:
        held, whole = tuning.shards[client], final.shards[client]
        assert rows(torch.cat([held.features, held.test_features])) == rows(whole.features)
        assert len(held.test_labels) == pytest.approx(len(whole.labels) / 5, abs=1)


def test_a_text_keeps_its_end_for_validation() -> None:
    text = torch.arange(30)
    windows = text.unfold(0, 5, 1)  # overlapping views of one text
    shard = dpfl.data.records.Shard.of(
        windows, torch.zeros(len(windows), dtype=torch.int64), windows, windows[:, 0] * 0
    )
    federation = dpfl.Federation(
        shards={"a": shard},
        task=dpfl.tasks.Classification(classes=2),
        inputs=dpfl.data.inputs.Tokens(30),
    )
    held = federation.with_validation(PublicSeed(0)).shards["a"]
    assert torch.equal(torch.cat([held.features, held.test_features]), windows)
    assert len(held.test_labels) == round(len(windows) / 5)


def test_one_record_cannot_be_set_aside() -> None:
    one, label = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)
    federation = dpfl.Federation.from_arrays({"a": (one, label, one, label)}, classes=2)
    with pytest.raises(DataError, match="too few"):
        federation.with_validation(PublicSeed(0))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"methods": {}}, "methods"),
        ({"methods": {"weiavgg": {}}}, "weiavg"),
        ({"methods": {"pfa": {"kk": 1}}}, "kk"),
        ({"vary": {"budgets.epsilon": []}}, "at least 1 value"),
        ({"vary": {"epsilon": [1.0]}}, "names no section"),
        ({"tune": {"over": {}, "seeds": [7]}}, "over"),
        ({"tune": {"over": {"method.lr": [0.1]}, "seeds": [0]}}, "also a final one"),
        ({"tune": {"over": {"method.lr": [0.1]}, "at": {"budgets.delta": 1}}}, "does not vary"),
        ({"seedss": [1]}, "seeds"),
        ({"seeds": []}, "seeds"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        changed(**wrong)
    assert "\n" not in str(caught.value)


def test_the_command_records_shows_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        'title = "a small one"\nseeds = [0]\n[base]\ndata = { name = "digits" }\npartition = { clients = 3 }\n'
        "budgets = { epsilon = 2.0, delta = 1e-3 }\nmethod = { lr = 0.1, clip = 1.0, batch_size = 8, local_steps = 1 }\n"
        "run = { rounds = 1 }\n[methods]\nweiavg = {}\n"
    )
    assert run_command(["study", str(file), "--show"]) == 5
    assert "run the study with --record first" in capsys.readouterr().err.replace("\n", " ")
    assert (
        run_command(["study", str(file), "--out", str(tmp_path / "runs"), "--record", "--quiet"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "a small one" in printed
    assert "weiavg" in printed
    shutil.rmtree(tmp_path / "runs")
    assert run_command(["study", str(file), "--show"]) == 0
    assert capsys.readouterr().out == printed
    file.with_suffix(".json").write_text("{}")
    assert run_command(["study", str(file), "--show"]) == 5
    assert run_command(["study", str(tmp_path / "none.toml")]) == 2


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("studies/*/*.toml")), ids=lambda p: p.stem
)
def test_the_studies_of_the_project_are_complete_and_recorded(path: Path) -> None:
    study = Sweep.from_file(path)
    recorded = json.loads(path.with_suffix(".json").read_text())
    assert recorded["study"] == json.loads(json.dumps(study.model_dump(exclude_none=True)))
    assert [(c["case"], c["label"]) for c in recorded["cells"]] == [*study.cells()]
    assert all([run["seed"] for run in cell["runs"]] == study.seeds for cell in recorded["cells"])
    assert path.name in (path.parent / "README.md").read_text()


def test_practices_are_drawn_from_lists_and_a_client_s_own_wins() -> None:
    values = {
        **SMALL["base"],
        "budgets": {"epsilon": 1.0, "delta": 1e-3},
        "partition": {"kind": "iid", "clients": 30},
        "method": {**SMALL["base"]["method"], "name": "weiavg", "lr": 0.1},
        "client_settings": {"batch_size": [4, 16], "local_epochs": [1, 2]},
        "clients": {"client-03": {"batch_size": 5, "local_steps": 3}},
    }
    client_settings = Experiment.from_dict(values).federation().client_settings
    assert {p.batch_size for p in client_settings.values()} == {4, 16, 5}
    assert client_settings["client-03"].local_steps == 3
    assert client_settings["client-03"].local_epochs is None
    assert client_settings == Experiment.from_dict(values).federation().client_settings
    other = (
        Experiment.from_dict({**values, "run": {"rounds": 2, "seed": 1}})
        .federation()
        .client_settings
    )
    assert client_settings != other


@pytest.mark.parametrize("method", sorted(dpfl.methods.METHODS))
def test_every_method_goes_on_with_lost_uploads_partial_cohorts_and_clients_that_leave(
    method: str, tmp_path: Path
) -> None:
    settings = find(method).settings
    own = {"spending": "uniform"} if "spending" in settings else {}
    usual = {"clip": 1.0, "batch_size": 16, "local_steps": 3, "dimension": 20}
    usual = {name: value for name, value in usual.items() if name in settings}
    values: dict[str, Any] = {
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": 8},
        "partition": {"kind": "iid", "clients": 8},
        "budgets": {"epsilon": [0.5, 0.5, 0.6, 1.0, 1.0, 8.0, 9.0, 9.0], "delta": 1e-3},
        "method": {"name": method, "lr": 0.2, **usual, **own},
        "run": {"rounds": 10, "cohort": 6, "dropout": 0.3},
    }
    if find(method).model is not None:  # it brings its model, and asks everyone
        del values["model"], values["run"]["cohort"], values["method"]["lr"]
    experiment = Experiment.from_dict(values)
    result = run_experiment(experiment, tmp_path / "run")
    lost = [
        client
        for line in result.history
        for client, why in line.missing.items()
        if why == "lost on the way"
    ]
    ended, amplifies = result.summary.rounds.ended_early, experiment.strategy(8).amplifies
    if amplifies(Observer.WORLD) and any(not line.published for line in result.history):
        assert "would tell who is drawn" in str(ended)
        assert len(lost) >= 1
    else:
        assert 5 <= len(lost) <= 35
    if own:
        assert result.summary.clients_left
    rounds = [line for line in result.history if line.round >= 0]  # releases have no scores
    assert all(line.scores is not None and line.scores.loss > 0 for line in rounds)


def test_a_share_of_lost_uploads_is_a_probability() -> None:
    with pytest.raises(DpflError, match="dropout"):
        changed(base={**SMALL["base"], "run": {"rounds": 1, "dropout": 1.5}}).experiment(
            {"budgets.epsilon": 1.0}, "weiavg", {"method.lr": 0.1}, 0
        ).strategy(4)
