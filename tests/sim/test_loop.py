"""Whole runs: budgets that run out, methods against each other, workers, engines, noise from the
system.
"""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dpfl
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.privacy.flags import Flag
from dpfl.privacy.ledger import Ledger
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment

from .conftest import small


def _federation(clients: int = 4, epsilon: float = 2.0, **options: Any) -> dpfl.Federation:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(3, 5)) * 2
    arrays = {}
    for i in range(clients):
        labels = generator.integers(0, 3, 60)
        arrays[f"site-{i}"] = (centres[labels] + generator.normal(size=(60, 5)), labels)
    budgets = {
        site: dpfl.Budget(epsilon=epsilon * (i + 1), delta=1e-3) for i, site in enumerate(arrays)
    }
    return dpfl.Federation.from_arrays(
        arrays, budgets=options.pop("budgets", budgets), classes=3, **options
    )


def raised(result: dpfl.Result) -> set[Flag]:
    return {one.flag for one in result.summary.flags}


SETTINGS = {"lr": 0.3, "clip": 1.0, "batch_size": 10, "local_steps": 4}


def test_train_learns_and_spends_within_every_budget() -> None:
    federation = _federation(epsilon=4.0)
    model = nn.Linear(5, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = dpfl.train(model, federation, dpfl.weiavg(**SETTINGS), rounds=15, seed=0)
    assert result.accuracy > 0.8
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not torch.equal(result.model.weight, model.weight)
    assert len(result.history) == 15
    for site, spent in result.spent.items():
        budget = federation.budgets[site]
        # Multipliers lie on a ladder of 0.5 %
        assert 0.985 * budget.epsilon <= spent.epsilon <= budget.epsilon
        assert (spent.unit, spent.observer, spent.adjacency, spent.delta) == (
            "record",
            "server",
            "zero_out",
            1e-3,
        )
        assert spent.rounds == 15


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    federation, model = _federation(), nn.Linear(5, 3)
    first, again, other = (
        dpfl.train(model, federation, dpfl.fedavg_dp(**SETTINGS), rounds=3, seed=s).model.weight
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_noise_from_the_system_differs_even_when_every_global_generator_is_seeded() -> None:
    federation, model = _federation(), nn.Linear(5, 3)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        results.append(
            dpfl.train(model, federation, dpfl.fedavg_dp(**SETTINGS), rounds=1, seed=None)
        )
    assert not torch.equal(results[0].model.weight, results[1].model.weight)
    assert Flag.SEEDED not in raised(results[0])
    seeded = dpfl.train(model, federation, dpfl.weiavg(**SETTINGS), rounds=1)
    assert Flag.SEEDED in raised(seeded)
    assert "NOT PRIVATE" in Flag.SEEDED.about


def test_fedavg_without_privacy_says_so_and_is_billed_infinite() -> None:
    result = dpfl.train(
        nn.Linear(5, 3),
        _federation(budgets={}),
        dpfl.fedavg(lr=0.3, batch_size=10, local_epochs=1),
        rounds=3,
    )
    assert result.summary.epsilon.spent.smallest == math.inf
    assert Flag.UNPROTECTED in raised(result)


def test_minimum_spends_the_smallest_budget_everywhere_and_maximum_is_stamped_hypothetical() -> (
    None
):
    federation = _federation()
    smallest = dpfl.train(nn.Linear(5, 3), federation, dpfl.minimum(**SETTINGS), rounds=3)
    assert max(s.epsilon for s in smallest.spent.values()) <= 2.0
    largest = dpfl.train(nn.Linear(5, 3), federation, dpfl.maximum(**SETTINGS), rounds=3)
    assert min(s.epsilon for s in largest.spent.values()) > 7.9
    assert Flag.HYPOTHETICAL in raised(largest)
    assert Flag.HYPOTHETICAL not in raised(smallest)


def test_uniform_spending_makes_small_budgets_leave_first_and_training_goes_on() -> None:
    budgets = {
        f"site-{i}": dpfl.Budget(epsilon=e, delta=1e-3) for i, e in enumerate([0.5, 1.0, 2.0, 8.0])
    }
    strategy = dpfl.fedavg_dp(**SETTINGS, spending="uniform")
    result = dpfl.train(nn.Linear(5, 3), _federation(budgets=budgets), strategy, rounds=20)
    assert result.summary.clients_left == ("site-0",)
    spent = {site: line.epsilon for site, line in result.spent.items()}
    assert all(spent[site] <= budgets[site].epsilon for site in spent)
    rounds = [result.spent[site].rounds for site in sorted(spent)]
    assert rounds[0] < rounds[1] == rounds[2] == rounds[3] == 20


def test_training_ends_early_and_says_so_when_nobody_is_left(tmp_path: Path) -> None:
    """The same sites train twice against one ledger: the second run finds hardly anything left."""
    federation, book = _federation(), tmp_path / "sites.sqlite"
    with pytest.raises(dpfl.DpflError, match="there is no ledger"):
        dpfl.train(nn.Linear(5, 3), federation, dpfl.fedavg_dp(**SETTINGS), rounds=6, ledger=book)
    dpfl.train(
        nn.Linear(5, 3),
        federation,
        dpfl.fedavg_dp(**SETTINGS),
        rounds=6,
        ledger=book,
        new_ledger=True,
    )
    with pytest.raises(dpfl.DpflError, match="already exists"):
        dpfl.train(
            nn.Linear(5, 3),
            federation,
            dpfl.fedavg_dp(**SETTINGS),
            rounds=6,
            ledger=book,
            new_ledger=True,
        )
    with pytest.warns(RuntimeWarning, match="no client can afford"):
        second = dpfl.train(
            nn.Linear(5, 3), federation, dpfl.fedavg_dp(**SETTINGS), rounds=6, ledger=book
        )
    assert len(second.summary.clients_left) == 4
    assert "no client can afford" in second.summary.rounds.ended_early
    assert second.summary.rounds.done == 0
    assert all(
        line.epsilon <= federation.budgets[site].epsilon for site, line in second.spent.items()
    )


def test_a_seeded_past_stays_on_the_stamp(tmp_path: Path) -> None:
    book = tmp_path / "sites.sqlite"
    federation = _federation(epsilon=4.0)
    # Pays release by release, so that several studies have room
    Ledger.create(book, "sites", filter="renyi").close()
    strategy = dpfl.minimum(**SETTINGS)  # leaves something of the larger budgets
    for seed in (0, None):
        result = dpfl.train(nn.Linear(5, 3), federation, strategy, rounds=1, seed=seed, ledger=book)
        assert result.summary.rounds.done == 1
        assert Flag.SEEDED in raised(result)
    result = dpfl.train(nn.Linear(5, 3), federation, strategy, rounds=1, seed=None)
    assert Flag.SEEDED not in raised(result)


def test_budgets_that_do_not_fit_the_method_are_refused() -> None:
    wrong_unit = {
        f"site-{i}": dpfl.Budget(epsilon=1, delta=1e-3, unit=dpfl.Unit.CLIENT) for i in range(4)
    }
    with pytest.raises(ConfigurationError, match="per client"):
        dpfl.train(
            nn.Linear(5, 3), _federation(budgets=wrong_unit), dpfl.weiavg(**SETTINGS), rounds=1
        )
    some = {"site-0": dpfl.Budget(epsilon=1, delta=1e-3)}
    with pytest.raises(PrivacyRefusal, match="'site-1': has no budget"):
        dpfl.train(nn.Linear(5, 3), _federation(budgets=some), dpfl.weiavg(**SETTINGS), rounds=1)
    tiny = {f"site-{i}": dpfl.Budget(epsilon=1e-9, delta=1e-12) for i in range(4)}
    with pytest.raises(PrivacyRefusal, match="no finite noise"):
        dpfl.train(nn.Linear(5, 3), _federation(budgets=tiny), dpfl.weiavg(**SETTINGS), rounds=500)


def test_one_poisoned_record_changes_no_other_client_and_expels_nobody() -> None:
    clean = _federation()
    shard = clean.shards["site-0"]
    shard.features[0] = float("nan")
    result = dpfl.train(nn.Linear(5, 3), clean, dpfl.fedavg_dp(**SETTINGS), rounds=2)
    assert bool(torch.isfinite(result.model.weight).all())
    assert all(line.not_finite == () for line in result.history)


def test_a_run_folder_holds_what_it_should(tmp_path: Path) -> None:
    experiment = small()
    result = run_experiment(experiment, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    names = {path.name for path in folder.path.iterdir()}
    assert {
        "experiment.toml",
        "rounds.jsonl",
        "timings.jsonl",
        "ledger.sqlite",
        "model.safetensors",
        "summary.json",
        "checkpoint",
    } <= names
    assert type(experiment).from_file(folder.experiment) == experiment
    assert folder.read_summary() == result.summary
    assert json.loads(folder.summary.read_text()) == json.loads(
        json.dumps(result.summary.to_dict())
    )
    assert folder.read_rounds() == result.history
    assert [line.round for line in folder.read_rounds()] == list(range(8))
    tensors = load_file(folder.model)
    assert torch.equal(tensors["1.weight"], result.model[1].weight)
    assert Ledger.open(folder.ledger).seeded_runs() == [result.summary.run]


def test_what_is_published_names_nobody(tmp_path: Path) -> None:
    """The model is the one artefact meant for the world: neither it nor a round's public part may
    name a client.
    """
    sites = tmp_path / "sites"
    sites.mkdir()
    for site in ("canary-north", "canary-south"):
        rows = "".join(f"{i % 7},{(i * 3) % 5},{int(i % 7 > 3)}\n" for i in range(40))
        (sites / f"{site}.csv").write_text("a,b,ill\n" + rows)
    values = small(run={"rounds": 2, "cohort": 1}).to_dict() | {
        "data": {"folder": str(sites)},
        "clients": {},
    }
    values |= {"partition": {}, "budgets": {"epsilon": 1.0, "delta": 1e-3}}
    run_experiment(type(small()).from_dict(values), tmp_path / "run")
    assert b"canary" in (tmp_path / "run" / "rounds.jsonl").read_bytes()  # the operator's own
    published = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert b"canary" not in published
    assert b"NOT PRIVATE: SEEDED" in published


def test_what_is_billed_is_what_was_planned_and_done(tmp_path: Path) -> None:
    """An independent count: participations from the record x steps of each client's own practice,
    and its own rate.
    """
    experiment = small()
    run_experiment(experiment, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    federation = experiment.federation()
    lines = folder.read_rounds()
    ledger = Ledger.open(folder.ledger)
    for client in federation.ids:
        done = sum(client in line.arrived for line in lines)
        tab = ledger.history(client, dpfl.Observer.SERVER)
        if done == 0:
            assert tab == ()
            continue
        (event,) = tab
        batch, steps = (16, 5) if client == "client-2" else (8, 3)
        assert event.steps == done * steps
        assert event.sampling_rate == pytest.approx(batch / federation.shards[client].examples)


@pytest.mark.parametrize("method", ["weiavg", "fedavg"])
def test_the_number_of_workers_never_changes_a_bit(tmp_path: Path, method: str) -> None:
    changes = {
        "partition": {"clients": 10},
        "budgets": {"epsilon": 3.0},
        "run": {"rounds": 3, "cohort": 9},
    }
    experiment = small(**changes)
    if method == "fedavg":
        experiment = small(**changes, method={"name": "fedavg"})
        values = experiment.to_dict()
        values["method"].pop("clip")
        experiment = type(experiment).from_dict(values)
    run_experiment(experiment, tmp_path / "one", workers=1)
    run_experiment(experiment, tmp_path / "two", workers=2)
    assert _traces(tmp_path / "one") == _traces(tmp_path / "two")


def test_both_engines_give_the_same_run_to_float_error(tmp_path: Path) -> None:
    models, lines = [], []
    for engine in ("stacked", "one_by_one"):
        result = run_experiment(small(run={"engine": engine}), tmp_path / engine)
        models.append(result.model[1].weight)
        lines.append([line.arrived for line in result.history])
    assert lines[0] == lines[1]
    start = small().build_model(small().federation())[1].weight
    assert (models[0] - models[1]).norm() / (models[1] - start).norm() < 1e-3


def _traces(folder: Path) -> dict[str, Any]:
    """Everything that must be bit-identical: model, record, ledger, summary but for seconds and the
    name of the run, which is drawn at random.
    """
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("seconds")
    name = summary.pop("run")
    with sqlite3.connect(folder / "ledger.sqlite") as book:
        tables = ("meta", "runs", "bills", "charges", "grants", "members")
        ledger = {
            table: [
                [cell for cell in row if cell != name]
                for row in book.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
            ]
            for table in tables
        }
    book.close()
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "rounds": (folder / "rounds.jsonl").read_bytes(),
        "ledger": ledger,
        "summary": summary,
    }
