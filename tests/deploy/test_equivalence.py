"""A rehearsal over Flower's messages and the simulator are the same study: model, spends and bytes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Observer, Unit
from dpfl.data.units import UnitKey
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.outcome import outcomes
from dpfl.deploy.records import UNITS_KEY
from dpfl.deploy.requests import TRAIN
from dpfl.deploy.site import Site
from dpfl.deploy.transport import Transport
from dpfl.methods import METHODS, find
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.runs.deployment import StudyFile
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment
from tests.deploy.federation import WatchedGrid, make_server, study_values
from tests.deploy.sums import pin

GRANTS = [4.0, 5.0, 15.0]
DELTA = 1e-3
PARTITION = {"kind": "iid", "clients": 3}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fedavg": ("fedavg", {}, {}),
    "fedavg_dp": ("fedavg_dp", {}, {}),
    "dpfedavg": ("dpfedavg", {}, {}),
    "minimum": ("minimum", {}, {}),
    "weiavg": (
        "weiavg",
        {"momentum": 0.5, "proximal": 0.1, "weight_decay": 0.01, "clipping": "per_layer"},
        {},
    ),
    "pfa": ("pfa", {}, {}),
    "pfa_plus": ("pfa_plus", {}, {}),
    "robust_hdp": ("robust_hdp", {}, {}),
    "krum": ("krum", {"byzantine": 0}, {}),
    "trimmed_mean": ("trimmed_mean", {"byzantine": 1}, {}),
    "median": ("median", {}, {}),
    "geometric_median": ("geometric_median", {}, {}),
    "dp_fed": ("dp_fed", {}, {}),
    "dp_fed over Poisson cohorts": ("dp_fed", {}, {"cohort": 0.6}),
    "dp_fed with an adaptive clip": (
        "dp_fed",
        {"project": "once", "target_quantile": 0.6, "momentum": 0.5},
        {"cohort": 0.6},
    ),
    "udp_fedavg with an adaptive clip": ("udp_fedavg", {"target_quantile": 0.6}, {}),
    "dp_fed_ls over Poisson cohorts": ("dp_fed_ls", {}, {"cohort": 0.6}),
    "fedceo": ("fedceo", {"interval": 2, "coefficient": 10.0}, {}),
    "udp_fedavg": ("udp_fedavg", {}, {}),
    "udp_fedavg, local noise": ("udp_fedavg", {"noise": "local"}, {}),
    "udp_fedavg, two of three": ("udp_fedavg", {}, {"cohort": 2}),
    "ppsgd": ("ppsgd", {}, {}),
    "centaur": ("centaur", {}, {}),
}


def experiment_of(
    method: str,
    settings: dict[str, Any],
    run: dict[str, Any],
    rounds: int,
    data: str = "digits",
    task: dict[str, Any] | None = None,
) -> Experiment:
    own = {"lr": 0.3, "clip": 1.0, "batch_size": 16, "local_steps": 3, **settings}
    own = {name: value for name, value in own.items() if name in find(method).settings}
    return Experiment.from_dict(
        {
            "data": {"name": data},
            **({} if task is None else {"task": task}),
            "model": {"name": "mlp", "hidden": 8} if method == "centaur" else {"name": "logistic"},
            "partition": PARTITION,
            "budgets": {"epsilon": GRANTS, "delta": DELTA},
            "method": {"name": method, **own},
            "run": {"rounds": rounds, "seed": 5, **run},
        }
    )


def on_files(experiment: Experiment, folder: Path) -> Experiment:
    """The same clients with their records in files, of which both sides set the same ones aside."""
    folder.mkdir()
    for name, shard in experiment.federation().shards.items():
        with (folder / f"{name}.csv").open("w") as stream:
            writer = csv.writer(stream)
            writer.writerow([*(f"x{i}" for i in range(shard.features[0].numel())), "target"])
            for features, targets in (
                (shard.features, shard.labels),
                (shard.test_features, shard.test_labels),
            ):
                rows = zip(features.flatten(1).tolist(), targets.tolist(), strict=True)
                writer.writerows([*row, target] for row, target in rows)
    values = {**experiment.to_dict(), "data": {"folder": str(folder)}, "partition": {}}
    return Experiment.from_dict(values)


def deploy(base: Path, experiment: Experiment) -> tuple[Path, WatchedGrid, dict[str, Site]]:
    """An experiment on files as a study with three sites, each with a folder, budget and ledger."""
    federation = experiment.federation()
    strategy = experiment.strategy(3)
    sites = {}
    for name, epsilon in zip(federation.ids, GRANTS, strict=True):
        folder = base / name
        folder.mkdir(parents=True)
        budget: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "unit": str(strategy.unit)}
        budget["observer"] = str(strategy.observer)
        budget["filter"] = "allotments"  # as a simulation's ledger has it
        protected = strategy.observer is not Observer.NOBODY
        text = _site_toml(
            name, experiment, max(2, federation.classes), budget if protected else None
        )
        (folder / "site.toml").write_text(text)
        shutil.copy(f"{experiment.data.folder}/{name}.csv", folder / "records.csv")
        seed = PublicSeed(experiment.public_seed().child("data").value).child("split", name)
        (folder / UNITS_KEY).write_text(UnitKey.of(seed).value.hex())  # as the simulation has it
        sites[name] = Site(folder)
        sites[name].prepare()
    run = {
        "rounds": experiment.run.rounds,
        "noise": "seeded",
        "seed": 5,
        "round_timeout": 60,
        "enrol_timeout": 5,
    }
    run |= {k: v for k in ("cohort", "sampling") if (v := getattr(experiment.run, k)) is not None}
    run = {name: value for name, value in run.items() if value is not None}
    values = {
        "study": {
            "name": "demo",
            "sites": list(federation.ids),
            "feature_shape": list(federation.feature_shape),
            **({"classes": 10} if experiment.task is None else {}),
        },
        **({} if experiment.task is None else {"task": experiment.task.model_dump()}),
        "model": experiment.model.model_dump(exclude_none=True),
        "method": {"name": experiment.method.name, **experiment.method.settings()},
        "run": run,
        **{
            name: section.model_dump(exclude_none=True)
            for name in ("accounted", "secure_sum")
            if (section := getattr(experiment, name)) is not None
        },
    }
    pin(sites)
    server = make_server(base / "server", values)
    grid = WatchedGrid({number + 1: base / name for number, name in enumerate(federation.ids)})
    Coordinator(server, Transport(grid)).begin()
    return server, grid, sites


def _site_toml(
    name: str, experiment: Experiment, classes: int, budget: dict[str, Any] | None
) -> str:
    from dpfl.runs.site_file import SiteFile

    numbers = experiment.task is not None and experiment.task.name == "regression"
    data: dict[str, Any] = {"targets": "numbers"} if numbers else {"classes": classes}
    data["file"] = "records.csv"
    return SiteFile.from_dict(
        {
            "site": {"id": name},
            "data": data,
            **({} if budget is None else {"budget": budget}),
            "policy": {
                "allow_seeded": True,
                "least_noise_multiplier": 0.0,
                "trust_server": True,
                "allow_unprotected": budget is None,
            },
        }
    ).to_toml()


def relative_error(one: Path, other: Path) -> float:
    a, b = load_file(one), load_file(other)
    assert set(a) == set(b)
    worst = 0.0
    for name in a:
        assert torch.isfinite(a[name]).all()
        worst = max(
            worst, float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp_min(1e-9))
        )
    return worst


@pytest.mark.parametrize("case", sorted(CASES))
def test_three_sites_and_the_simulator_give_the_same_model_spends_and_bytes(
    case: str, tmp_path: Path
) -> None:
    method, settings, run = CASES[case]
    experiment = experiment_of(method, settings, run, rounds=4 if run else 3)
    experiment = on_files(experiment, tmp_path / "files")
    server, grid, sites = deploy(tmp_path, experiment)
    simulated = run_experiment(experiment, tmp_path / "simulated")
    summary = json.loads((server / "summary.json").read_text())
    assert summary["rounds"] == {
        "planned": experiment.run.rounds,
        "done": experiment.run.rounds,
        "ended_early": None,
    }
    assert summary["missed"] == summary["refusals"] == {}
    assert (
        relative_error(server / "model.safetensors", tmp_path / "simulated" / "model.safetensors")
        <= 1e-5
    )
    start = experiment.build_model(experiment.federation()).state_dict()
    moved = load_file(server / "model.safetensors")
    assert any(not torch.allclose(moved[name], start[name], atol=1e-3) for name in moved)
    # Bytes are those of the simulator, and of the payloads that were really in Flower's messages.
    on_the_wire = sum(
        len(answer.payload) for _, asked, answer in grid.heard if asked.header["kind"] == TRAIN
    )
    downloads = sum(
        len(asked.payload) for _, asked, _ in grid.heard if asked.header["kind"] == TRAIN
    )
    assert summary["bytes_up"] == simulated.summary.bytes_up == on_the_wire
    assert summary["bytes_down"] == simulated.summary.bytes_down == downloads
    # What sites find with the delivered model, and with parts that never left them, is what the
    # simulator finds.
    tried = [
        outcomes(site.folder)[0].tried(name, site.federation()) for name, site in sites.items()
    ]
    right = sum(found.scores.accuracy * found.test_records for found in tried)
    records = sum(found.test_records for found in tried)
    assert right / records == pytest.approx(simulated.summary.accuracy, abs=1e-6)
    strategy = experiment.strategy(3)
    if strategy.observer is Observer.NOBODY:
        return
    for name, site in sites.items():
        own = {line.observer: line for line in site.spent()}
        alone = simulated.spent[name]
        line = own[str(strategy.observer)]
        assert line.epsilon == pytest.approx(alone.epsilon, rel=1e-9), (name, own)
        assert line.epsilon >= alone.epsilon * (1 - 1e-12)
        assert (line.unit, line.adjacency, line.rounds) == (
            alone.unit,
            alone.adjacency,
            alone.rounds,
        )
        assert 0 < line.epsilon <= (line.budget or 0)
        told = {
            line.observer: line.epsilon
            for line in simulated.summary.statements
            if line.account == name
        }
        if "server" in told and strategy.unit is Unit.CLIENT:
            assert own["server"].to_dict()["epsilon"] == pytest.approx(told["server"], rel=1e-9)


def test_a_frozen_layer_never_travels(tmp_path: Path) -> None:
    values = experiment_of("weiavg", {}, {}, rounds=2).to_dict()
    model = {"name": "mlp", "hidden": 8, "freeze": ["1"]}
    experiment = on_files(Experiment.from_dict({**values, "model": model}), tmp_path / "files")
    server, grid, sites = deploy(tmp_path, experiment)
    simulated = run_experiment(experiment, tmp_path / "simulated")
    there = load_file(tmp_path / "simulated" / "model.safetensors")
    learned = load_file(server / "model.safetensors")
    assert set(learned) == set(there)
    assert all(torch.equal(learned[name], there[name]) for name in ("3.weight", "3.bias"))
    sent = [len(asked.payload) for _, asked, _ in grid.heard if asked.header["kind"] == TRAIN]
    assert max(sent) < 4 * 64 * 8
    tried = [outcomes(own.folder)[0].tried(name, own.federation()) for name, own in sites.items()]
    right = sum(one.scores.accuracy * one.test_records for one in tried)
    records = sum(one.test_records for one in tried)
    assert right / records == pytest.approx(simulated.summary.accuracy, abs=1e-6)


TASKS = {
    "regression": ("digits", {"name": "regression", "loss": "huber", "delta": 2.0}),
    "regression of numbers": ("diabetes", {"name": "regression"}),
    "binary": ("breast_cancer", {"name": "binary", "positive_weight": 3.0}),
}


@pytest.mark.parametrize("method", ["weiavg", "dp_fed"])
@pytest.mark.parametrize("case", sorted(TASKS))
def test_other_tasks_give_the_same_bits_between_sites_and_in_the_simulator(
    case: str, method: str, tmp_path: Path
) -> None:
    data, task = TASKS[case]
    experiment = experiment_of(method, {"batch_size": 4}, {}, rounds=3, data=data, task=task)
    experiment = on_files(experiment, tmp_path / "files")
    server, _, sites = deploy(tmp_path, experiment)
    simulated = run_experiment(experiment, tmp_path / "simulated")
    summary = json.loads((server / "summary.json").read_text())
    assert summary["missed"] == summary["refusals"] == {}
    model, other = (
        load_file(folder / "model.safetensors") for folder in (server, tmp_path / "simulated")
    )
    assert set(model) == set(other)
    assert all(torch.equal(model[name], other[name]) for name in model)
    start = experiment.build_model(experiment.federation()).state_dict()
    assert not any(torch.equal(model[name], start[name]) for name in model)
    if task["name"] == "regression":  # squared errors of the sites add up to the simulator's
        tried = [
            outcomes(site.folder)[0].tried(name, site.federation()) for name, site in sites.items()
        ]
        records = sum(found.test_records for found in tried)
        squares = sum(found.scores.value**2 * found.test_records for found in tried)
        scores = simulated.summary.scores
        assert (scores.metric, tried[0].scores.metric) == ("rmse", "rmse")
        assert (squares / records) ** 0.5 == pytest.approx(scores.value, rel=1e-6)
    for name, site in sites.items():
        line = next(x for x in site.spent() if x.observer == str(experiment.strategy(3).observer))
        assert line.epsilon == pytest.approx(simulated.spent[name].epsilon, rel=1e-9)


def test_personal_starts_travel_and_matter(tmp_path: Path) -> None:
    experiment = experiment_of("fedceo", {"interval": 2, "coefficient": 10.0}, {}, rounds=3)
    experiment = on_files(experiment, tmp_path / "files")
    _, grid, _ = deploy(tmp_path, experiment)
    downloads: dict[int, set[bytes]] = {}
    for _, asked, _ in grid.heard:
        if asked.header["kind"] == TRAIN:
            downloads.setdefault(asked.header["round"], set()).add(asked.payload)
    assert len(downloads[0]) == 1
    assert (
        max(map(len, downloads.values())) == 3
    )  # after a smoothing round everyone starts elsewhere


def test_pfa_plus_sends_fewer_bytes_and_they_are_counted_on_the_wire(tmp_path: Path) -> None:
    experiment = on_files(experiment_of("pfa_plus", {}, {}, rounds=3), tmp_path / "files")
    server, grid, _ = deploy(tmp_path, experiment)
    sizes = {
        (node, asked.header["round"]): len(answer.payload)
        for node, asked, answer in grid.heard
        if asked.header["kind"] == TRAIN
    }
    full, coordinates = (
        FRAME_BYTES + 4 * 650,
        FRAME_BYTES + 4 * 2,
    )  # one number a tensor, of two tensors
    assert sizes == {(1, 0): full, (2, 0): full, (3, 0): full} | {
        (node, round_): full if node == 3 else coordinates
        for node in (1, 2, 3)
        for round_ in (1, 2)
    }
    summary = json.loads((server / "summary.json").read_text())
    assert summary["bytes_up"] == sum(sizes.values())
    assert summary["payload_bytes_up"] == sum(sizes.values()) - FRAME_BYTES * len(sizes)


def test_every_method_is_compared_or_refused_with_the_reason() -> None:
    compared = {method for method, _, _ in CASES.values()}
    compared |= {"individual_clips", "preconditioned", "preconditioned_sum"}  # in a file of theirs
    for method in set(METHODS) - compared:
        dimension = {"dimension": 20} if "dimension" in find(method).settings else {}
        values = study_values(method, **dimension)
        known = find(method).settings
        values["method"] = {k: v for k, v in values["method"].items() if k == "name" or k in known}
        with pytest.raises(PrivacyRefusal, match="simulation") as caught:
            StudyFile.from_dict(values).strategy()
        assert caught.value.exit_code == 4
    assert set(METHODS) - compared == {"airsgd", "dprp", "local_only", "maximum", "pooled_dp"}
