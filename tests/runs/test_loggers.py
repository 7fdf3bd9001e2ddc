"""A run told to TensorBoard and MLflow: the same numbers, nothing of single clients, and never the
end of a run.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError
from dpfl.runs.experiment import Experiment
from dpfl.runs.loggers import logging_to, numbers_of

FEDERATION = [
    "--dataset",
    "digits",
    "--clients",
    "4",
    "--rounds",
    "3",
    "--local-steps",
    "2",
    "--quiet",
]
PRIVATE = ["--budgets", "0.5,1,4,8", "--delta", "1e-3", "--clip", "1"]
RUN = ["run", *FEDERATION, *PRIVATE, "--method", "robust_hdp", "--out", "r"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow as its user has set it up: a folder of files."""
    pytest.importorskip("mlflow")
    uri = (tmp_path / "mine").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri


def rounds_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "rounds.jsonl").read_text().splitlines()]


def events_of(folder: str) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(folder, "tensorboard")))
    events.Reload()
    return events


def test_tensorboard_holds_the_numbers_of_every_round() -> None:
    assert run_command([*RUN, "--log", "tensorboard"]) == 0
    events, lines = events_of("r"), rounds_of("r")
    for name in ("accuracy", "loss", "update_norm", "bytes_up"):
        told = [(event.step, event.value) for event in events.Scalars(name)]
        assert told == [
            (n + 1, pytest.approx(line[name], rel=1e-6)) for n, line in enumerate(lines)
        ]
    ranks = [event.value for event in events.Scalars("weights_metrics/rank")]
    assert ranks == [line["weights_metrics"]["rank"] for line in lines]
    summary = json.loads(Path("r/summary.json").read_text())
    (final,) = events.Scalars("final/accuracy")
    assert (final.step, final.value) == (3, pytest.approx(summary["accuracy"], rel=1e-6))
    (spent,) = events.Scalars("epsilon_spent/largest")
    assert spent.value == pytest.approx(summary["epsilon"]["spent"]["largest"], rel=1e-6)
    flags = events.Tensors("flags/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "NOT PRIVATE: SEEDED" in flags


def test_mlflow_holds_the_numbers_of_every_round_where_its_user_says(tracked: str) -> None:
    assert run_command([*RUN, "--log", "mlflow"]) == 0
    import mlflow

    client = mlflow.MlflowClient(tracked)
    experiment = client.get_experiment_by_name("dpfl")
    (run,) = client.search_runs([experiment.experiment_id])
    lines = rounds_of("r")
    for name in ("accuracy", "loss", "weights_metrics/rank"):
        told = sorted(
            (metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        )
        own = [line["weights_metrics"]["rank"] if "/" in name else line[name] for line in lines]
        assert told == [(n + 1, pytest.approx(value, rel=1e-6)) for n, value in enumerate(own)]
    assert run.info.status == "FINISHED"
    assert run.data.params["method.name"] == "robust_hdp"
    assert run.data.params["run.rounds"] == "3"
    assert any(value.startswith("NOT PRIVATE: SEEDED") for value in run.data.tags.values())
    assert not any(re.search("client-", name) for name in run.data.metrics)
    assert not Path("mlruns").exists()


@pytest.mark.parametrize("method", ["robust_hdp", "airsgd", "pfa", "ppsgd"])
def test_nothing_of_single_clients_is_told(method: str) -> None:
    work = [] if method == "airsgd" else ["--local-steps", "2", "--dropout", "0.4"]
    federation = [
        "--dataset",
        "digits",
        "--clients",
        "4",
        "--rounds",
        "1",
        "--model",
        "mlp",
        "--quiet",
    ]
    arguments = ["run", *federation, *PRIVATE, "--method", method, *work, "--out", "r"]
    assert run_command([*arguments, "--log", "tensorboard"]) == 0
    (line,) = rounds_of("r")
    told = set(events_of("r").Tags()["scalars"])
    assert {"accuracy", "loss", "bytes_up"} <= told
    assert not any(
        "client-" in name or re.search(r"(^|/)(weights|missing|simulated_truth)(/|$)", name)
        for name in told
    )
    by_client = {
        name
        for name, value in line.items()
        if isinstance(value, dict) and any("client-" in k for k in value)
    }
    assert not {name for name in told for own in by_client if name.split("/")[0] == own}


def test_numbers_are_found_at_any_depth_and_lists_words_and_truths_are_left_out() -> None:
    line = {
        "round": 1,
        "accuracy": 0.5,
        "flag": True,
        "cohort": ["a"],
        "weights": {"a": 0.5},
        "missing": {"a": "late"},
        "simulated_truth": {"least_noise_variance": 1.0},
        "clean_metrics": {"public": "a", "rank": 2, "inner": {"deep": 3.5, "list": [1.0]}},
    }
    assert dict(numbers_of(line)) == {
        "accuracy": 0.5,
        "clean_metrics/rank": 2.0,
        "clean_metrics/inner/deep": 3.5,
    }


@pytest.mark.parametrize("where", ["round", "start", "end"])
def test_a_logger_that_fails_is_reported_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    tried = []

    def broken(self: Any, name: str, *rest: Any) -> None:
        if where == "end" and not name.startswith("final/"):
            return
        tried.append(name)
        raise OSError("the disk of the logs is full")

    monkeypatch.setattr(SummaryWriter, "add_text" if where == "start" else "add_scalar", broken)
    assert run_command([*RUN, "--log", "tensorboard"]) == 0
    captured = capsys.readouterr()
    assert captured.err.replace("\n", " ").count("logging to tensorboard stopped") == 1
    assert "the disk of the logs is full" in captured.err.replace("\n", " ")
    assert len(tried) == 1
    assert len(rounds_of("r")) == 3
    assert "test accuracy" in captured.out
    assert Path("r/model.safetensors").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_logger_that_is_not_installed_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for module in [
        m for m in sys.modules if m == name or m.startswith(("torch.utils.tensorboard", f"{name}."))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    code = run_command([*RUN, "--log", name])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert (
        captured.err
        == f"dpfl: --log: {name} is not installed; pip install {name}, or leave --log out\n"
    )
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--log", "tensorbord"],
            2,
            "there is no logger 'tensorbord'; did you mean 'tensorboard'?",
        ),
        (["--log", "tensorboard", "--budgets", "1e-9", "--delta", "1e-12"], 4, "no finite noise"),
        (["--log", "tensorboard", "--clients", "5000"], 3, "clients"),
    ],
)
def test_a_run_that_is_refused_leaves_no_logs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found = run_command([*RUN, *arguments])
    captured = capsys.readouterr()
    assert (found, captured.out) == (code, "")
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert list(Path().iterdir()) == []


def test_without_a_name_nothing_is_logged() -> None:
    values = {"data": {"name": "digits"}, "method": {"name": "fedavg"}, "run": {"rounds": 1}}
    complaints: list[str] = []
    with logging_to(None, Path("r"), Experiment.from_dict(values), complaints.append) as logger:
        assert logger is None
    with (
        pytest.raises(ConfigurationError, match="no logger"),
        logging_to("wandb", Path("r"), Experiment.from_dict(values), complaints.append),
    ):
        pass
    assert complaints == []


def test_a_resumed_run_goes_on_logging(capsys: pytest.CaptureFixture[str]) -> None:
    from dpfl.sim.train import run_until

    method = {"name": "fedavg", "lr": 0.1, "batch_size": 8, "local_steps": 1}
    values = {
        "data": {"name": "digits"},
        "partition": {"clients": 4},
        "method": method,
        "run": {"rounds": 3},
    }
    run_until(Experiment.from_dict(values), Path("r"), 1)
    assert run_command(["run", "--resume", "r", "--log", "tensorboard", "--quiet"]) == 0
    told = [(event.step, event.value) for event in events_of("r").Scalars("accuracy")]
    assert told == [(n, pytest.approx(rounds_of("r")[n - 1]["accuracy"], rel=1e-6)) for n in (2, 3)]
