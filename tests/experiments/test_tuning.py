"""The search: one rule for every method, validation records of their own, runs that wait and go on
to the same bits.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpfl.core.errors import ConfigurationError, DataError
from dpfl.engine.evaluation import Scores
from dpfl.experiments import pool as compare
from dpfl.experiments.compare import tune_study
from dpfl.experiments.pool import Ended, Task, run_all, run_task
from dpfl.experiments.study import Sweep, on_proxy
from dpfl.experiments.tuning import PROXY_TUNING, UNACCOUNTED_TUNING, RunStore, kept_name
from dpfl.runs.experiment import Experiment
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment, run_until
from tests.sim.conftest import small
from tests.sim.test_loop import _traces

RATES = [0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 3.0]
ROUNDS = 8
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 4},
    "budgets": {"epsilon": [0.5, 1.0, 4.0, 8.0], "delta": 1e-3},
    "method": {"clip": 1.0, "batch_size": 16, "local_steps": 4},
    "run": {"rounds": ROUNDS},
}


def study_of(search: str = "halving", **more: Any) -> Sweep:
    values = {"title": "t", "base": BASE, "methods": {"weiavg": {}}, "seeds": [0], **more}
    values.setdefault("tune", {"over": {"method.lr": RATES}, "seeds": [7], "search": search})
    return Sweep.from_dict(values)


def tuned(study: Sweep, kept: Path) -> dict[str, Any]:
    """The results of a search, as they are written."""
    return tune_study(study, RunStore(kept=kept)).to_dict()


def ended(accuracy: float, task: Task) -> Ended:
    return Ended(scores=Scores(value=accuracy, loss=0.0), rounds=task.rounds)


class Spy:
    """Counts what is really run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[Experiment] = []
        real = compare.run_experiment

        def run(experiment: Experiment, *rest: Any, **more: Any) -> Any:
            self.ran.append(experiment)
            return real(experiment, *rest, **more)

        monkeypatch.setattr(compare, "run_experiment", run)


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    kept = tmp_path_factory.mktemp("halved")
    return kept, tuned(study_of(), kept)


@pytest.fixture(scope="module")
def gridded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    kept = tmp_path_factory.mktemp("gridded")
    return kept, tuned(study_of("grid"), kept)


def folders(kept: Path) -> dict[float, RunFolder]:
    """By learning rate."""
    found = [RunFolder(path) for path in kept.iterdir()]
    return {
        Experiment.from_file(place.experiment).method.settings()["lr"]: place for place in found
    }


def rounds_done(kept: Path) -> int:
    return sum(len(place.read_lines(place.rounds)) for place in folders(kept).values())


# -- the grid --------------------------------------------------------------------------------------


def test_a_grid_chooses_the_best_on_validation_records(
    gridded: tuple[Path, dict[str, Any]],
) -> None:
    kept, results = gridded
    (cell,) = results["cells"]
    assert [one["values"]["method.lr"] for one in cell["tried"]] == RATES
    assert rounds_done(kept) == len(RATES) * ROUNDS
    measured = {}
    for rate, place in folders(kept).items():
        experiment = Experiment.from_file(place.experiment)
        assert experiment.partition.validation
        federation = experiment.federation()
        model = experiment.build_model(federation)
        model.load_state_dict(load_file(place.model))
        features, labels = federation.test_set()
        with torch.no_grad():
            measured[rate] = float((model(features).argmax(1) == labels).double().mean())
    for one in cell["tried"]:
        assert one["validation"] == pytest.approx(measured[one["values"]["method.lr"]], abs=1e-6)
    assert cell["chosen"] == {
        "method.lr": max(measured, key=lambda rate: (round(measured[rate], 6), -rate))
    }
    assert (
        measured[cell["chosen"]["method.lr"]] > min(measured.values()) + 0.1
    )  # the choice matters


def test_validation_records_are_neither_trained_nor_tested_on() -> None:
    study = study_of()
    rehearsed = study.rehearsal({}, "weiavg", {"method.lr": 0.1}, 7, ()).federation()
    final = study.experiment({}, "weiavg", {"method.lr": 0.1}, 7).federation()

    def rows(tensor: torch.Tensor) -> Counter[bytes]:
        return Counter(row.numpy().tobytes() for row in tensor)

    for client in final.ids:
        whole, held = final.shards[client], rehearsed.shards[client]
        validation, tested, trained = (
            rows(held.test_features),
            rows(whole.test_features),
            rows(held.features),
        )
        assert validation.total() > 0
        assert not validation & tested
        assert not validation & trained
        assert validation + trained == rows(whole.features)
    everything = rows(torch.cat([s.features for s in final.shards.values()])) + rows(
        final.test_set()[0]
    )
    assert max(everything.values()) == 1  # digits are all different, or the above would say little


def test_of_equals_the_smaller_value_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(task: Task, report: Any) -> Ended:
        return ended(0.5, task)

    monkeypatch.setattr(compare, "run_task", alike)
    for search in ("grid", "halving"):
        study = study_of(
            tune={
                "over": {"method.lr": [0.3, 0.1, 1.0], "method.clip": [2.0, 0.5]},
                "search": search,
            }
        )
        (cell,) = tuned(study, tmp_path)["cells"]
        assert cell["chosen"] == {"method.lr": 0.1, "method.clip": 0.5}


def test_a_seed_that_is_lucky_once_does_not_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    luck = {(0.1, 7): 0.9, (0.1, 8): 0.1, (0.3, 7): 0.6, (0.3, 8): 0.6}

    def known(task: Task, report: Any) -> Ended:
        e = task.experiment
        return ended(luck[e.method.settings()["lr"], e.run.seed], task)

    monkeypatch.setattr(compare, "run_task", known)
    tune = {"over": {"method.lr": [0.1, 0.3]}, "seeds": [7, 8]}
    (cell,) = tuned(study_of(tune=tune), tmp_path)["cells"]
    assert [one["validation"] for one in cell["tried"]] == pytest.approx([0.5, 0.6])
    assert cell["chosen"] == {"method.lr": 0.3}


# -- successive halving ----------------------------------------------------------------------------


def test_halving_costs_about_half_of_the_grid(
    halved: tuple[Path, dict[str, Any]], gridded: tuple[Path, dict[str, Any]]
) -> None:
    assert rounds_done(halved[0]) == rounds_done(gridded[0]) // 2 == 32


def test_the_better_half_survives_each_halt(halved: tuple[Path, dict[str, Any]]) -> None:
    kept, results = halved
    going = set(RATES)
    places = folders(kept)
    for share, left in ((0.25, 4), (0.5, 2)):
        here = math.ceil(share * ROUNDS)
        at_halt = {rate: places[rate].read_lines(places[rate].halts) for rate in going}
        accuracy = {
            rate: [h["accuracy"] for h in lines if h["round"] == here]
            for rate, lines in at_halt.items()
        }
        assert all(len(found) == 1 for found in accuracy.values())
        for rate in going:  # the halt's accuracy is that of the round it halted after
            assert accuracy[rate] == [
                places[rate].read_lines(places[rate].rounds)[here - 1]["accuracy"]
            ]
        ranked = sorted(going, key=lambda rate: (-accuracy[rate][0], rate))
        going = set(ranked[:left])
    assert {rate for rate, place in places.items() if place.summary.exists()} == going
    (cell,) = results["cells"]
    final = {rate: places[rate].read_summary().accuracy for rate in going}
    assert cell["chosen"]["method.lr"] == max(final, key=lambda rate: (final[rate], -rate))
    done = {one["values"]["method.lr"]: one["rounds"] for one in cell["tried"]}
    assert sorted(done.values()) == [2, 2, 2, 2, 4, 4, 8, 8]
    for rate, place in places.items():
        assert len(place.read_lines(place.rounds)) == done[rate]


def test_survivors_are_the_runs_that_a_grid_would_have_made(
    halved: tuple[Path, dict[str, Any]], gridded: tuple[Path, dict[str, Any]]
) -> None:
    finished = [path.name for path in halved[0].iterdir() if (path / "summary.json").exists()]
    assert len(finished) == 2
    for name in finished:
        assert _traces(halved[0] / name) == _traces(gridded[0] / name)


def test_repeating_a_halving_search_runs_nothing(
    halved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    assert tuned(study_of(), halved[0]) == halved[1]
    assert spy.ran == []


def test_a_halving_search_says_the_same_where_the_grid_was_run_before(
    gridded: tuple[Path, dict[str, Any]],
    halved: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = Spy(monkeypatch)
    found = tuned(study_of(), gridded[0])
    assert found["cells"] == halved[1]["cells"]
    assert spy.ran == []


def test_a_grid_finishes_what_a_halving_search_has_begun(
    halved: tuple[Path, dict[str, Any]], gridded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    tuned(study_of(), tmp_path)
    found = tuned(study_of("grid"), tmp_path)
    assert found["cells"] == gridded[1]["cells"]
    for path in tmp_path.iterdir():
        assert _traces(path) == _traces(gridded[0] / path.name)


@pytest.mark.parametrize("method", ["weiavg", "robust_hdp", "pfa_plus", "ppsgd"])
def test_a_run_that_halts_and_goes_on_is_the_run_that_never_did(
    tmp_path: Path, method: str
) -> None:
    experiment = small(
        method={"name": method}, model={"name": "mlp", "hidden": 8}, run={"rounds": 4}, clients={}
    )
    whole = run_experiment(experiment, tmp_path / "whole")
    assert run_until(experiment, tmp_path / "parts", 1) == whole.history[0].scores
    assert len((tmp_path / "parts/rounds.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "parts/summary.json").exists()
    assert not (tmp_path / "parts/model.safetensors").exists()
    run_until(experiment, tmp_path / "parts", 3, resume=True)
    assert len((tmp_path / "parts/rounds.jsonl").read_text().splitlines()) == 3
    run_experiment(experiment, tmp_path / "parts", resume=True)
    assert _traces(tmp_path / "parts") == _traces(tmp_path / "whole")


def test_a_halt_beyond_the_end_is_the_end(tmp_path: Path) -> None:
    experiment = small(
        method={"name": "fedavg", "clip": None}, run={"rounds": 2, "cohort": None}, clients={}
    )
    values = experiment.to_dict()
    values["method"].pop("clip", None)
    task = Task(experiment=Experiment.from_dict(values), folder=tmp_path / "r", until=9)
    assert run_task(task, lambda done: None).rounds == 2
    assert (tmp_path / "r/summary.json").exists()
    assert not (tmp_path / "r/halts.jsonl").exists()


def test_a_run_that_ended_before_its_halt_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = small(
        method={"name": "dp_fed", "noise_multiplier": 1.5},
        run={"rounds": 8, "cohort": None},
        clients={},
    )
    poor = Experiment.from_dict({**poor.to_dict(), "budgets": {"epsilon": 4.0, "delta": 1e-3}})
    task = Task(experiment=poor, folder=tmp_path / "r", until=6)
    first = run_task(task, lambda done: None)
    assert RunFolder(task.folder).read_summary().rounds.ended_early
    assert 0 < first.rounds < 6
    spy = Spy(monkeypatch)
    assert run_task(task, lambda done: None) == first
    assert spy.ran == []


def test_progress_is_told_in_rounds_of_every_stage(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    tune = {"over": {"method.lr": [0.1, 0.3]}, "seeds": [7], "search": "halving"}
    base = {**BASE, "method": {"batch_size": 16, "local_steps": 1}, "run": {"rounds": 4}}
    store = RunStore(kept=tmp_path, progress=lambda *news: told.append(news))
    tune_study(study_of(tune=tune, base=base, methods={"fedavg": {}}), store)
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == [
        "tuning, first 25% of the rounds",
        "tuning, first 50% of the rounds",
        "tuning",
    ]
    last = {stage: (done, total) for stage, done, total in told}
    assert list(last.values()) == [(2, 2), (2, 2), (4, 4)]


# -- runs kept by content --------------------------------------------------------------------------


def sites(
    folder: Path, names: tuple[str, ...] = ("north", "south", "east"), shift: int = 0
) -> Path:
    folder.mkdir(exist_ok=True)
    for number, site in enumerate(names):
        rows = [
            f"{(i + number) % 7},{(i * 3 + shift) % 5},{int((i + number) % 7 > 3)}"
            for i in range(40)
        ]
        (folder / f"{site}.csv").write_text("a,b,ill\n" + "\n".join(rows) + "\n")
    return folder


def of_sites(folder: Path, **sections: Any) -> Experiment:
    values: dict[str, Any] = {
        "data": {"folder": str(folder)},
        "method": {"name": "fedavg", "lr": 0.1, "batch_size": 8, "local_steps": 2},
        "run": {"rounds": 2},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return Experiment.from_dict(values)


def test_the_name_of_a_run_holds_its_settings_the_bytes_of_its_files_and_nothing_else(
    tmp_path: Path,
) -> None:
    folder = sites(tmp_path / "sites")
    name = kept_name(of_sites(folder))
    assert kept_name(of_sites(folder)) == name
    assert kept_name(of_sites(folder, run={"workers": 2})) == name  # workers never change a result
    assert kept_name(of_sites(folder, run={"seed": 1})) != name
    assert kept_name(of_sites(folder, method={"lr": 0.2})) != name
    path = folder / "north.csv"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0", b"1", 1))
    changed = kept_name(of_sites(folder))
    assert changed != name
    path.write_bytes(content)
    assert kept_name(of_sites(folder)) == name
    path.rename(folder / "west.csv")
    assert kept_name(of_sites(folder)) not in (name, changed)


def test_another_version_of_dpfl_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = small().content()
    monkeypatch.setattr("dpfl.runs.experiment.__version__", "99.0")
    assert small().content() != before


def test_a_run_that_is_kept_is_found_whatever_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (of_sites(sites(tmp_path / "sites"), run={"workers": workers}) for workers in (1, 2))
    first = run_task(Task(experiment=one, folder=tmp_path / kept_name(one)), lambda done: None)
    spy = Spy(monkeypatch)
    assert (
        run_task(Task(experiment=two, folder=tmp_path / kept_name(two)), lambda done: None) == first
    )
    assert spy.ran == []


def test_two_workers_run_two_at_a_time(tmp_path: Path) -> None:
    import multiprocessing

    folder = sites(tmp_path / "sites")
    experiments = [of_sites(folder, run={"seed": seed, "rounds": 20}) for seed in range(2)]
    tasks = [Task(experiment=e, folder=tmp_path / kept_name(e)) for e in experiments]
    most: list[int] = []
    summaries = run_all(tasks, 2, lambda done: most.append(len(multiprocessing.active_children())))
    assert max(most) == 2
    again = run_all(tasks, 1, lambda done: None)
    assert summaries == again
    ran = [path.parent for path in tmp_path.glob("*/summary.json")]
    assert len(ran) == 2


# -- on other records ------------------------------------------------------------------------------


def proxied(folder: Path, kept: Path, **more: Any) -> dict[str, Any]:
    epsilon = {"south": 4.0, "north": 1.0, "east": 0.5}
    base = {
        "data": {"folder": str(folder)},
        "budgets": {"epsilon": epsilon, "delta": {"east": 1e-3, "north": 1e-3, "south": 2e-3}},
        "method": {"clip": 1.0, "batch_size": 16, "local_steps": 2},
        "run": {"rounds": 2, "misreports": {"north": 3.0}},
        "clients": {"east": {"batch_size": 4}},
        **more,
    }
    tune = {"over": {"method.lr": [0.1, 1.0]}, "seeds": [7], "on": {"name": "breast_cancer"}}
    return tuned(study_of(base=base, tune=tune), kept)


def test_on_a_proxy_nothing_is_learnt_from_the_federations_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    found = proxied(sites(tmp_path / "sites"), tmp_path / "kept")
    assert len(spy.ran) == 2
    for experiment in spy.ran:
        assert (experiment.data.name, experiment.data.folder) == ("breast_cancer", None)
        federation = experiment.federation()
        assert len(federation.ids) == 3
        assert federation.feature_shape == (30,)
        budgets = [federation.budgets[client] for client in federation.ids]
        assert [(b.epsilon, b.delta) for b in budgets] == [
            (0.5, 1e-3),
            (1.0, 1e-3),
            (4.0, 2e-3),
        ]  # east, north, south
        assert experiment.run.misreports == {}
    assert found["tuning"] == PROXY_TUNING.format(data="breast_cancer")
    # Other records at home: not one number changes, and nothing is run.
    spy.ran.clear()
    sites(tmp_path / "sites", shift=1)
    assert proxied(sites(tmp_path / "sites", shift=1), tmp_path / "kept") == found
    assert spy.ran == []


def test_the_scale_of_budgets_goes_with_them() -> None:
    budgets = {"epsilon": {"south": 4.0, "north": 1.0, "east": 0.5}, "delta": 1e-3, "scale": 2.0}
    tune = {"over": {"method.lr": [0.1]}, "seeds": [7], "on": {"name": "breast_cancer"}}
    study = study_of(base={**BASE, "budgets": budgets}, tune=tune)
    federation = study.rehearsal(
        {}, "weiavg", {"method.lr": 0.1}, 7, ["east", "north", "south"]
    ).federation()
    assert [federation.budgets[client].epsilon for client in federation.ids] == [1.0, 2.0, 8.0]


def test_a_proxy_in_a_folder_is_shared_out_as_it_lies(tmp_path: Path) -> None:
    values = {
        "data": {"name": "digits"},
        "partition": {"kind": "dirichlet", "clients": 3},
        "budgets": {"epsilon": 1.0},
    }
    there = on_proxy(values, {"folder": "elsewhere"}, ["a", "b", "c"])
    assert there == {"data": {"folder": "elsewhere"}, "budgets": {"epsilon": 1.0}, "partition": {}}
    kept = on_proxy(values, {"name": "breast_cancer"}, ["a", "b", "c"])
    assert kept["partition"] == {"kind": "dirichlet", "clients": 3}


def test_the_remark_says_whose_records_the_choice_rests_on(
    halved: tuple[Path, dict[str, Any]],
) -> None:
    assert halved[1]["tuning"] == UNACCOUNTED_TUNING
    assert "--tune-on" in UNACCOUNTED_TUNING
    assert json.loads(json.dumps(halved[1])) == halved[1]


@pytest.mark.parametrize(
    ("on", "error", "words"),
    [
        ({"name": "breast_cancr"}, ConfigurationError, "did you mean 'breast_cancer'"),
        ({"folder": "/nowhere"}, DataError, "not a folder"),
        ({"nam": "digits"}, ConfigurationError, "did you mean 'name'"),
    ],
)
def test_a_proxy_that_is_not_there_is_refused_before_anything_runs(
    tmp_path: Path, on: dict[str, str], error: type[Exception], words: str
) -> None:
    tune = {"over": {"method.lr": [0.1, 1.0]}, "seeds": [7], "on": on}
    with pytest.raises(error, match=words):
        tuned(study_of(tune=tune), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
