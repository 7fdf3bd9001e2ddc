"""A search with a privacy cost: what it costs whom, what it keeps, what it never tells."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dpfl.cli.main import run_command
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.experiments import private_search as library
from dpfl.experiments.private_search import private_search
from dpfl.experiments.search_result import SearchResult
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.measures import Estimate
from dpfl.privacy.selection import RandomRuns

BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"clients": 3},
    "budgets": {"epsilon": [0.5, 1, 4], "delta": 1e-3},
    "method": {"clip": 1.0, "batch_size": 32, "local_steps": 2},
    "run": {"rounds": 2},
}
OVER: dict[str, list[Any]] = {"method.lr": [0.01, 0.3]}
METRIC, RUNS = AccountedMetric(share=0.2), RandomRuns(mean=3.0)


def searched(**more: Any) -> SearchResult:
    options = {"runs": RUNS, "metric": METRIC, **more}
    base, over = options.pop("base", BASE), options.pop("over", OVER)
    return private_search(base, options.pop("method", "weiavg"), over, **options)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return searched()


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Runs are not run: a run scores its learning rate, and is remembered."""
    tried: list[float] = []

    def run(experiment: Any, *given: Any) -> tuple[Estimate, nn.Module]:
        tried.append(experiment.method.lr)
        return Estimate(value=tried[-1], standard_error=0.0), nn.Linear(1, 1)

    monkeypatch.setattr(library, "_one_run", run)
    return tried


def test_a_search_states_two_costs_per_client(result: SearchResult) -> None:
    """Against the world that of the search, against the server that of all runs."""
    assert sorted(result.epsilon) == ["client-0", "client-1", "client-2"]
    for client, budget in zip(sorted(result.epsilon), (0.5, 1.0, 4.0), strict=True):
        world, server = result.epsilon[client], result.operator.epsilon[client]
        assert budget < world.epsilon < 5 * budget  # more than one run, which costs the budget
        assert world.delta == 1e-3
        least = 0.95 * budget * (1 if result.operator.runs == 1 else 1.05)
        assert least < server.epsilon <= budget * result.operator.runs
    text = str(result)
    for word in ("per record", "against the world", "NOT PRIVATE: SEEDED", "lr = "):
        assert word in text
    assert "against the server" in str(result.operator)


def test_the_model_of_the_best_run_is_kept(result: SearchResult) -> None:
    assert isinstance(result.model, nn.Module)
    assert result.score is not None
    assert 0 <= result.score.value <= 1
    assert result.chosen in [{"method.lr": 0.01}, {"method.lr": 0.3}]
    assert result.experiment is not None
    assert result.experiment.method.lr == result.chosen["method.lr"]


def test_the_public_part_tells_nothing_of_other_runs(scores: list[float]) -> None:
    """Searches of different lengths with the same best run look alike in public."""
    told: dict[str, set[int]] = {}
    for _ in range(12):
        found = searched(base={**BASE, "run": {"rounds": 2, "noise": "system"}})
        told.setdefault(json.dumps(found.to_dict()), set()).add(found.operator.runs)
    assert any(len(lengths) > 1 for lengths in told.values())
    assert not any("runs" in text or "server" in text for text in told)


def test_candidates_are_drawn_with_replacement_and_the_best_wins(scores: list[float]) -> None:
    lengths: Counter[int] = Counter()
    for _ in range(25):
        scores.clear()
        found = searched(base={**BASE, "run": {"rounds": 2, "noise": "system"}})
        assert found.chosen == {"method.lr": max(scores)}
        assert found.operator.runs == len(scores)
        assert not found.flags
        lengths[len(scores)] += 1
    assert len(lengths) > 3
    mean = sum(length * count for length, count in lengths.items()) / 25
    assert abs(mean - 3.0) < 4 * math.sqrt(6.0 / 25)  # the geometric law has the variance 6


def test_a_loss_is_best_where_it_is_smallest(scores: list[float]) -> None:
    for seed in range(5):
        metric = AccountedMetric(metric="loss", bound=3.0, share=0.2)
        found = searched(metric=metric, base={**BASE, "run": {"rounds": 2, "seed": seed}})
        assert found.chosen == {"method.lr": min(scores)}
        scores.clear()


def test_no_run_is_an_outcome_of_the_poisson_law(scores: list[float]) -> None:
    runs = RandomRuns(mean=1.1, shape=math.inf)
    found = [
        searched(runs=runs, base={**BASE, "run": {"rounds": 2, "seed": seed}}) for seed in range(12)
    ]
    empty = [one for one in found if one.chosen is None]
    assert 0 < len(empty) < 12
    assert "no run was drawn" in str(empty[0])
    assert str(empty[0].operator).startswith("0 runs")
    assert empty[0].model is None


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"most_epsilon": 1.0}, PrivacyRefusal, "would cost 'client-"),
        ({"method": "udp_fedavg"}, DpflError, "protects records"),
        ({"method": "fedavg"}, DpflError, "protects records"),
        ({"over": {"run.rounds": [1, 2]}}, ConfigurationError, r"run\.rounds"),
        ({"over": {"method.lrr": [1, 2]}}, ConfigurationError, "lrr"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(
    given: dict[str, Any], kind: type[DpflError], said: str, scores: list[float]
) -> None:
    with pytest.raises(kind, match=said):
        searched(**given)
    assert scores == []


# ---- the command line ----------------------------------------------------------------------------

OPTIONS = ["--dataset", "digits", "--clients", "3", "--rounds", "2", "--local-steps", "2"]
OPTIONS += [
    "--budgets",
    "0.5,1,4",
    "--delta",
    "1e-3",
    "--clip",
    "1",
    "--over",
    "method.lr=0.01,0.3",
]


def test_tune_accounted_writes_two_files(
    tmp_path: Path, scores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--out", str(tmp_path / "t"), "--methods", "weiavg", "--accounted", "3"]
    assert run_command(["tune", *OPTIONS, *where, "--score-share", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert "epsilon of the search" in out
    assert "runs" not in out
    assert "operator.json" in err
    told = json.loads((tmp_path / "t/search.json").read_text())
    assert told["chosen"] == {"method.lr": max(scores)}
    assert json.loads((tmp_path / "t/operator.json").read_text())["runs"] == len(scores)
    assert (tmp_path / "t/weiavg.toml").exists()
    assert (tmp_path / "t/model.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--methods", "weiavg"], 2, "--score-share"),
        (["--methods", "weiavg,pfa", "--score-share", "0.1"], 2, "2 methods"),
        (["--methods", "weiavg", "--score-share", "0.1", "--seeds", "2"], 2, "--seeds"),
        (["--methods", "weiavg", "--score-share", "1.5"], 2, "1.5"),
        (["--methods", "weiavg", "--score-share", "0.1", "--most-epsilon", "1"], 4, "more than 1"),
        (["--methods", "weiavg", "--score-share", "0.1", "--score", "auc"], 2, "two classes"),
    ],
)
def test_tune_accounted_refuses(
    more: list[str], code: int, said: str, scores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["tune", *OPTIONS, "--accounted", "3", *more]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert scores == []
