"""Persons: one unit each, of a bounded number of records, clipped once and never split."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import accuracy_score
from torch import Tensor, nn
from torch.nn import functional as F

import dpfl
from dpfl.core.errors import ConfigurationError, DataError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase, Plain, Unit
from dpfl.data.schema import Prepared, Schema
from dpfl.data.units import UnitKey, table_units
from dpfl.engine.base import Engine, Job
from dpfl.engine.ghost_clipping import GhostClipping, records_at_once
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.methods import make_strategy
from dpfl.tasks import Classification, MultiLabel, PerPerson, Regression, Task

SEED = PublicSeed(3)
Rows = dict[str, list[float]]  # the records of each person, by id
PERSONS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=6),
    min_size=1,
)


def units(rows: Rows, most: int, shuffle: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The units of these persons, whose records lie in any order that keeps each one's own."""
    who = [name for name, own in rows.items() for _ in own]
    who = np.random.default_rng(shuffle).permutation(who).tolist() if shuffle else who
    left = {name: iter(own) for name, own in rows.items()}
    values = np.array([[next(left[name])] for name in who])
    kept = np.ones(len(who), dtype=bool)
    made = Prepared(features=values, targets=values[:, 0], kept=kept, values=values, persons=who)
    found = table_units(made, UnitKey.of(SEED), most)
    return found.features, found.targets


@given(PERSONS, st.integers(1, 4))
def test_a_unit_holds_some_of_its_persons_records_and_nobody_elses(rows: Rows, most: int) -> None:
    features, targets = units(rows, most)
    assert len(features) == len(targets) == len(rows)
    for unit, target, name in zip(features, targets, sorted(rows), strict=True):
        real = ~np.isnan(np.atleast_1d(target))
        used = unit.reshape(most, -1)[real, 0].tolist()
        assert (
            len(used) == min(most, len(rows[name])) and np.atleast_1d(target)[real].tolist() == used
        )
        left = list(rows[name])
        for value in used:  # each record at most once
            left.remove(value)
    assert np.isfinite(features).all()


@given(PERSONS, PERSONS, st.integers(1, 4), st.integers(0, 9))
def test_one_persons_records_change_that_persons_unit_alone(
    rows: Rows, others: Rows, most: int, shuffle: int
) -> None:
    name = sorted(rows)[0]
    neighbour = {**rows, name: next(iter(others.values()))}
    before, after = units(rows, most), units(neighbour, most, shuffle)
    for old, new in zip(before, after, strict=True):
        assert old.shape == new.shape
        assert np.array_equal(old[1:], new[1:], equal_nan=True)


def frame(rng: np.random.Generator, persons: int = 40) -> dict[str, list[Any]]:
    who = np.repeat(np.arange(persons), rng.integers(1, 6, persons))
    values = who + rng.uniform(0, 0.5, len(who))  # a record tells whose it is
    ill = (who % 2).tolist()
    return {"site": (who % 2).tolist(), "who": who.tolist(), "x": values.tolist(), "ill": ill}


def schema(most: int, **changes: Any) -> Schema:
    plain: Plain = {
        "target": "ill",
        "person": "who",
        "person_word": "patient",
        "records_per_person": most,
        "columns": {"x": {"type": "number"}, "ill": {"type": "boolean"}},
    }
    return Schema.from_dict({**plain, **changes})


@pytest.mark.parametrize("most", [1, 3])
def test_no_person_is_in_both_parts_and_counts_are_of_persons(most: int) -> None:
    table = frame(np.random.default_rng(0))
    federation = dpfl.Federation.from_frame(table, client="site", schema=schema(most), seed=5)
    assert federation.unit is Unit("patient") and federation.record_shape == (1,)
    assert isinstance(federation.task, PerPerson) is (most > 1)
    for client, shard in federation.shards.items():
        parts = [shard.features, shard.test_features]
        people = [{int(value) for value in part.flatten()} for part in parts]
        assert [len(own) for own in people] == [len(part) for part in parts]
        assert not people[0] & people[1]
        assert people[0] | people[1] == {w for w in table["who"] if w % 2 == int(client)}
        assert shard.examples == len(people[0])
    validated = federation.with_validation(PublicSeed(1))
    parts = [validated.shards["0"].features, validated.shards["0"].test_features]
    people = [{int(value) for value in part.flatten()} for part in parts]
    assert not people[0] & people[1]


def test_a_client_with_one_person_is_refused_by_the_persons_word() -> None:
    table = {"site": [0, 0, 0], "who": [1, 1, 1], "x": [1, 2, 3], "ill": [0, 1, 0]}
    with pytest.raises(DataError, match=r"client '0': has 1 patient\(s\), too few"):
        dpfl.Federation.from_frame(table, client="site", schema=schema(3))


def test_places_that_do_not_fit_into_memory_are_refused() -> None:
    table = frame(np.random.default_rng(0))
    with pytest.raises(DataError, match=r"places for each patient take .* GiB; use fewer"):
        dpfl.Federation.from_frame(table, client="site", schema=schema(10**9))


def test_persons_with_several_records_have_no_class_to_be_stratified_by() -> None:
    table = frame(np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match="have no one class"):
        dpfl.Federation.from_frame(table, client="site", schema=schema(3), stratified=True)


# -- losses and gradients --------------------------------------------------------------------------

MODELS = {
    "linear": lambda: nn.Linear(3, 2),
    "flatten": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)
    ),
    "norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
}
ENGINES: dict[str, Engine] = {
    "stacked": Stacked(),
    "ghost": GhostClipping(),
    "one_by_one": OneByOne("cpu"),
}


def persons(count: int, places: int, seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """Features, and classes with NaN where a place has no record."""
    rng = np.random.default_rng(seed)
    features = torch.from_numpy(rng.normal(size=(count, places, 3)).astype(np.float32))
    labels = rng.integers(0, 2, (count, places)).astype(np.float64)
    labels[np.arange(places) >= rng.integers(1, places + 1, count)[:, None]] = np.nan
    return features, labels


def naive_sum(model: nn.Module, features: Tensor, labels: np.ndarray, clip: float) -> Tensor:
    """Every person's records by themselves: mean loss, its gradient, clipped, added up."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for records, own in zip(features, labels, strict=True):
        real = torch.from_numpy(~np.isnan(own))
        wanted = torch.from_numpy(own)[real].long()
        loss = F.cross_entropy(model(records[real]), wanted)
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([part.flatten() for part in found]).double()
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return total


def one_step(
    engine: Engine, model: nn.Module, task: Task, features: Tensor, labels: Tensor, clip: float
) -> Tensor:
    """What an engine adds up in one step that takes every person."""
    layout, count = Layout.of_module(model), len(features)
    phase = Phase(steps=1, batch_size=count, sampling="poisson", lr=float(count), clip=clip)
    job = Job(
        client="a",
        start=layout.read(model),
        phases=(phase,),
        features=features,
        labels=labels,
        rng=SecretRng.simulated(PublicSeed(0)),
        task=task,
    )
    return (job.start - engine.run(model, layout, [job])[0]).double()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_a_person_has_one_gradient_which_is_clipped_once(name: str, engine: str) -> None:
    torch.manual_seed(1)
    model, task = MODELS[name](), PerPerson(task=Classification(classes=2))
    for clip in (0.05, 0.4, 100.0):
        features, labels = persons(7, 3)
        wanted = naive_sum(model, features, labels, clip)
        targets = task.check_targets("client 'a'", labels)
        found = one_step(ENGINES[engine], model, task, features, targets, clip)
        assert float((found - wanted).norm()) < 5e-5 * float(wanted.norm())


@given(st.integers(0, 99), st.integers(2, 4))
@settings(max_examples=15)
def test_one_person_moves_a_step_by_no_more_than_the_clip(seed: int, places: int) -> None:
    """However many records one has, and whatever they are."""
    torch.manual_seed(1)
    model, task, clip = MODELS["flatten"](), PerPerson(task=Classification(classes=2)), 0.3
    features, labels = persons(4, places, seed)
    features[0] *= 1e4
    targets = task.check_targets("client 'a'", labels)
    whole = one_step(ENGINES["stacked"], model, task, features, targets, clip)
    rest = naive_sum(model, features[1:], labels[1:], clip)
    assert float((whole - rest).norm()) <= clip * (1 + 1e-3)


def test_ghost_clipping_knows_that_a_row_of_the_model_is_not_a_person() -> None:
    model, task = MODELS["linear"](), PerPerson(task=Classification(classes=2))
    features, labels = persons(3, 2)
    job = Job(
        client="a",
        start=torch.zeros(0),
        phases=(),
        features=features,
        labels=task.check_targets("client 'a'", labels),
        rng=SecretRng.simulated(PublicSeed(0)),
        task=task,
    )
    assert records_at_once(model, Layout.of_module(model), job, torch.device("cpu")) == 0


@given(st.integers(0, 99))
@settings(max_examples=20)
def test_places_without_a_record_have_no_influence(seed: int) -> None:
    task = PerPerson(task=Regression())
    features, labels = persons(5, 3, seed)
    targets = task.check_targets("client 'a'", labels)
    outputs = features[..., :1].clone().requires_grad_()
    losses = task.losses(outputs, targets)
    losses.sum().backward()
    absent = torch.from_numpy(np.isnan(labels))
    assert outputs.grad is not None and bool((outputs.grad[absent] == 0).all())
    changed = outputs.detach().masked_fill(absent[..., None], 1e6)
    assert torch.equal(task.losses(changed, targets), losses.detach())


def test_metrics_are_those_of_single_records() -> None:
    task = PerPerson(task=Classification(classes=2))
    features, labels = persons(30, 4)
    targets, outputs = task.check_targets("client 'a'", labels), features[..., :2]
    real = ~np.isnan(labels)
    wanted = accuracy_score(labels[real], outputs.argmax(-1).numpy()[real])
    assert task.score(outputs, targets) == pytest.approx(wanted)
    assert task.scores(outputs, targets)["accuracy"] == pytest.approx(wanted)
    assert sum(map(sum, task.by_class(outputs, targets))) == real.sum()
    assert task.predictions(outputs).shape == (30, 4)
    assert task.to_dict() == Classification(classes=2).to_dict()
    assert task.with_metric("auc").score(outputs, targets) == task.task.with_metric("auc").score(
        outputs.flatten(0, 1)[torch.from_numpy(real.flatten())],
        targets.flatten()[torch.from_numpy(real.flatten())],
    )


def test_several_targets_of_a_record_are_absent_together() -> None:
    values = np.array([[[0.0, 1.0], [np.nan, np.nan]], [[1.0, 1.0], [0.0, 0.0]]])
    task = PerPerson(task=MultiLabel())
    targets = task.check_targets("client 'a'", values)
    task = task.resolve([targets])
    alone = MultiLabel(labels=2).losses(torch.ones(1, 2), torch.tensor([[0.0, 1.0]]))
    assert task.losses(torch.ones(2, 2, 2), targets)[0] == alone[0]


def test_training_protects_persons_and_says_so() -> None:
    table = frame(np.random.default_rng(0))
    budgets = {site: dpfl.Budget(epsilon=4.0, delta=1e-3) for site in (0, 1)}
    made = dpfl.Federation.from_frame(table, client="site", schema=schema(3), budgets=budgets)
    strategy = make_strategy("weiavg", {"clip": 1, "lr": 0.1, "batch_size": 8, "local_steps": 2})
    result = dpfl.train(nn.Linear(1, 2), made, strategy, rounds=2)
    assert {line.unit for line in result.spent.values()} == {"patient"}
    said = " ".join([str(result.summary.promise), *result.summary.assumptions])
    assert "patient" in said and "record" not in said
    single = dpfl.Federation.from_frame(table, client="site", schema=schema(1), budgets=budgets)
    plain = dpfl.train(nn.Linear(1, 2), single, strategy, rounds=2)
    assert {line.epsilon for line in plain.spent.values()} == {
        line.epsilon for line in result.spent.values()
    }  # as many persons, as much noise
