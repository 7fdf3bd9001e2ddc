"""The personal finish: what a client's own head is worth, and that only its own records are
read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.data.inputs import NUMBERS
from dpfl.data.records import Shard, lay_out
from dpfl.engine.finish_scores import FinishScores, Verdict, finish_gain, finish_means
from dpfl.engine.personal_finish import (
    LEAST_RECORDS,
    STRENGTHS,
    PersonalFinish,
    fitted_head,
    personal_finish,
)
from dpfl.models.features import make_features
from dpfl.models.preconditioning import linear_head, split_features
from dpfl.tasks import CLASSIFICATION, Binary, Classification, PerPerson, Regression, Task

SIZE, CLASSES = 12, 3
TASK = Classification(classes=CLASSES)
RELEASED = ("centre.mean", "standardise.scale")
CENTRES = 0.6 * torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(1))


def records(count: int, seed: int, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Records around one centre a class; ``shift`` permutes what the classes are called."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, SIZE, generator=generator)
    return CENTRES[labels] + noise, (labels + shift) % CLASSES


def shard_of(train: int, seed: int, *, test: int = 300, shift: int = 0) -> Shard:
    own, others = records(train, seed, shift=shift), records(test, seed + 1000, shift=shift)
    return Shard.of(*own, *others)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A common model that others have trained well: on 3,000 records."""
    made = linear_head(make_features("table", (SIZE,)), CLASSES)
    x, y = records(3000, seed=7)
    made.centre.mean.fill_(0.01)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        rows = nn.Sequential(*list(made)[:-1])(x).double()
    head = fitted_head(rows, y, torch.zeros(CLASSES, SIZE + 1).double(), 1e-3)
    made.linear.weight.data = head.float()  # type: ignore[union-attr]
    return made


def finished(model: nn.Module, shard: Shard, task: Task = TASK) -> PersonalFinish:
    found = personal_finish(model, shard, NUMBERS, task, released=RELEASED)
    assert found is not None
    return found


# -- what it is worth ------------------------------------------------------------------------------


def test_a_client_whose_labels_are_permuted_gains_from_its_own_head(model: nn.Module) -> None:
    scores = finished(model, shard_of(120, seed=2, shift=1)).scores
    assert scores.common < 0.2
    assert scores.both > 0.75
    assert scores.local > 0.75
    assert scores.verdict is Verdict.UNCLEAR
    assert f"{scores.tested} test records are too few to tell" in scores.sentence


def test_a_client_with_12_records_gains_from_the_common_head(model: nn.Module) -> None:
    found = [finished(model, shard_of(12, seed=seed)).scores for seed in range(5)]
    local, common, both = finish_means({str(i): one for i, one in enumerate(found)})
    assert common > local + 0.05
    assert both > local + 0.05
    gain, error = finish_gain({str(i): one for i, one in enumerate(found)})
    assert gain == pytest.approx(both - local)
    assert 0 < error < gain
    assert sum(one.verdict is Verdict.HELPS for one in found) >= 4
    assert any("Federating helps this site" in one.sentence for one in found)


def test_a_client_of_the_federation_loses_nothing_by_its_own_head(model: nn.Module) -> None:
    found = [finished(model, shard_of(100, seed=seed)).scores for seed in range(5)]
    _, common, both = finish_means({str(i): one for i, one in enumerate(found)})
    assert both > common - 0.02


@pytest.mark.parametrize("bias", [False, True])
def test_the_model_with_the_own_head_scores_what_is_said(model: nn.Module, bias: bool) -> None:
    if bias:
        model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES))
    shard = shard_of(60, seed=3, shift=1)
    found, own = finished(model, shard), copy.deepcopy(model)
    assert set(found.head) == {block.name for block in Layout.of_module(model)}
    with torch.no_grad():
        common = TASK.score(own(shard.test_features), shard.test_labels)
        own.load_state_dict({**own.state_dict(), **found.head})
        both = TASK.score(own(shard.test_features), shard.test_labels)
    assert found.scores.common == common
    assert found.scores.both == both > common


def test_a_strong_prior_is_the_common_head_and_none_the_fit_to_own_records() -> None:
    x, y = records(200, seed=4)  # they overlap: the fit without a prior is finite
    rows = torch.cat([x, torch.ones(200, 1)], dim=1).double() / 4
    prior = torch.randn(CLASSES, SIZE + 1, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(fitted_head(rows, y, prior, math.inf), prior)
    assert torch.allclose(fitted_head(rows, y, prior, 1e9), prior, atol=1e-6)
    weak, alone = (fitted_head(rows, y, one, 1e-9, tolerance=1e-9) for one in (prior, 0 * prior))
    apart = rows @ (weak - alone).T  # but for what softmax does not see
    assert torch.allclose(apart - apart.mean(dim=1, keepdim=True), 0 * apart, atol=2e-2)
    distances = [float((fitted_head(rows, y, prior, one) - prior).norm()) for one in STRENGTHS]
    assert distances == sorted(distances)


def test_a_fit_is_where_the_gradient_is_zero() -> None:
    x, y = records(90, seed=5)
    rows, strength = x.double(), 0.1
    prior = torch.ones(CLASSES, SIZE).double()
    head = fitted_head(rows, y, prior, strength, tolerance=1e-9).requires_grad_()
    pull = strength * rows.square().sum(dim=1).mean() / 2 * (head - prior).square().sum()
    (nn.functional.cross_entropy(rows @ head.T, y) + pull).backward()
    assert head.grad is not None
    assert float(head.grad.abs().max()) < 1e-6


def test_the_standard_error_is_that_of_a_paired_comparison(model: nn.Module) -> None:
    shard = shard_of(12, seed=6, test=40)
    scores = finished(model, shard).scores
    assert scores.tested == 40
    most = math.sqrt(abs(scores.gain) * (1 - abs(scores.gain)) / 39)
    assert scores.error >= most * 0.999  # as if all records that differ differed in one direction
    assert scores.error <= math.sqrt(1 / 39)


@pytest.mark.parametrize("tested", [4, 20, 500])
def test_four_records_more_are_no_gain_and_five_are_one(tested: int) -> None:
    for more in range(1, min(tested, 6) + 1):
        gain = more / tested
        error = math.sqrt(gain * (1 - gain) / (tested - 1))  # all that differ do so in one way
        values = {"error": error, "tested": tested, "strength": 0.1}
        better = FinishScores(local=0.0, common=gain, both=gain, **values)
        worse = FinishScores(local=gain, common=0.0, both=0.0, **values)
        clear = more > 4
        assert better.verdict is (Verdict.HELPS if clear else Verdict.UNCLEAR)
        assert worse.verdict is (Verdict.NOTHING if clear else Verdict.UNCLEAR)
        assert ("are too few to tell" in better.sentence) is not clear


def test_of_a_loss_less_is_a_gain() -> None:
    values = {"metric": "loss", "error": 0.1, "tested": 20, "strength": 0.1}
    lower = FinishScores(local=0.9, common=0.5, both=0.7, **values)
    assert lower.verdict is Verdict.HELPS
    assert lower.gain == pytest.approx(0.4)
    assert FinishScores(local=0.5, common=0.9, both=1.0, **values).verdict is Verdict.NOTHING


@pytest.mark.parametrize(
    ("tested", "rates", "helped"),
    [
        (20, (0.7, 0.7), (0.0, 0.05)),  # chance: a verdict is wrong once in twenty
        (200, (0.7, 0.7), (0.0, 0.05)),
        (200, (0.95, 0.95), (0.0, 0.05)),
        (200, (0.6, 0.8), (0.95, 1.0)),  # a clear difference is called
        (200, (0.8, 0.6), (0.0, 0.0)),
        (20, (0.5, 0.95), (0.8, 1.0)),
    ],
)
def test_a_clear_difference_is_called_and_a_chance_one_is_not(
    tested: int, rates: tuple[float, float], helped: tuple[float, float]
) -> None:
    """Three models of two rates of success, on the same test records."""
    generator = torch.Generator().manual_seed(1)
    verdicts = []
    for _ in range(2000):
        chances = torch.rand(3, tested, generator=generator)
        right = (chances < torch.tensor([rates[0], rates[1], rates[1]])[:, None]).double()
        local, common, both = right.mean(dim=1).tolist()
        ahead = (right[1] if common > both else right[2]) - right[0]
        error = float(ahead.std()) / math.sqrt(tested)
        values = {"local": local, "common": common, "both": both, "error": error}
        verdicts.append(FinishScores(**values, tested=tested, strength=0.1).verdict)
    assert helped[0] <= verdicts.count(Verdict.HELPS) / len(verdicts) <= helped[1]


# -- who chooses what ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["few", "one class"])
def test_who_has_too_little_keeps_the_common_head_and_is_told(kind: str, model: nn.Module) -> None:
    shard = shard_of(LEAST_RECORDS - 1 if kind == "few" else 30, seed=8)
    if kind == "one class":
        shard = Shard.of(
            shard.features, 0 * shard.labels, shard.test_features, 0 * shard.test_labels
        )
    found = finished(model, shard)
    assert torch.equal(found.head["linear.weight"], model.linear.weight)  # type: ignore[arg-type, union-attr]
    assert found.scores.both == found.scores.common
    assert math.isinf(found.scores.strength)
    assert "the common head is kept" in found.scores.note
    assert ("one class" in found.scores.note) == (kind == "one class")
    if kind == "one class":
        assert found.scores.local == 1.0


def test_the_local_model_does_without_what_the_federation_released(model: nn.Module) -> None:
    shard, other = shard_of(60, seed=9), copy.deepcopy(model)
    other.centre.mean.fill_(0.3)  # type: ignore[union-attr, operator]
    other.standardise.scale.copy_(torch.linspace(0.1, 1, SIZE))  # type: ignore[union-attr, operator]
    first, second = finished(model, shard), finished(other, shard)
    assert first.scores.local == second.scores.local
    assert not torch.equal(first.head["linear.weight"], second.head["linear.weight"])


def test_nothing_but_own_records_is_read_and_the_model_stays_as_it_is(model: nn.Module) -> None:
    clients = {name: shard_of(40, seed=ord(name), test=50) for name in "abc"}
    parts = {name: (one.train, one.test) for name, one in clients.items()}
    before = copy.deepcopy(model.state_dict())
    shards = lay_out(parts)  # in one storage
    alone = finished(model, clients["b"])
    for name in "ac":
        for x in (shards[name].features, shards[name].test_features):
            x.fill_(math.nan)
    among = finished(model, shards["b"])
    assert among.scores == alone.scores
    assert torch.equal(among.head["linear.weight"], alone.head["linear.weight"])
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())


def test_features_may_be_given_in_place_of_records(model: nn.Module) -> None:
    """As a simulation does, which computes them once."""
    shard = shard_of(60, seed=10)
    features, rest = split_features(model, CLASSIFICATION)
    assert features is not None
    made = Shard.of(
        features(shard.features), shard.labels, features(shard.test_features), shard.test_labels
    )
    assert finished(rest, made).scores == finished(model, shard).scores


def test_a_finish_is_repeatable_whatever_numbers_are_drawn(model: nn.Module) -> None:
    shard = shard_of(50, seed=11)
    first = finished(model, shard)
    torch.manual_seed(5)
    np.random.seed(5)
    state = torch.get_rng_state()
    second = finished(model, shard)
    assert torch.equal(state, torch.get_rng_state())
    assert first.scores == second.scores
    assert torch.equal(first.head["linear.weight"], second.head["linear.weight"])


# -- where there is none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(SIZE, CLASSES),
        lambda: nn.Sequential(nn.Linear(SIZE, 4), nn.ReLU(), nn.Linear(4, CLASSES)),
        lambda: nn.Sequential(nn.Linear(SIZE, CLASSES), nn.Softplus()),
    ],
)
def test_other_models_have_none(make: Callable[[], nn.Module]) -> None:
    found = personal_finish(make(), shard_of(30, seed=12), NUMBERS, TASK, released=())
    assert found is None


@pytest.mark.parametrize(
    "task",
    [
        Regression(),
        Binary(),
        PerPerson(task=TASK),
        Classification(classes=CLASSES, class_weights=(1.0, 2.0, 3.0)),
    ],
    ids=str,
)
def test_other_tasks_have_none(task: Task, model: nn.Module) -> None:
    shard = shard_of(30, seed=13)
    assert personal_finish(model, shard, NUMBERS, task, released=RELEASED) is None


def test_without_test_records_that_define_the_metric_there_is_none(model: nn.Module) -> None:
    shard = shard_of(30, seed=14, test=1)
    assert personal_finish(model, shard, NUMBERS, TASK, released=RELEASED) is None
    auc = Classification(classes=CLASSES, metric="auc")
    many = shard_of(30, seed=14, test=60)
    assert 0.5 < finished(model, many, auc).scores.both <= 1
    one = Shard.of(many.features, many.labels, many.test_features, 0 * many.test_labels)
    assert personal_finish(model, one, NUMBERS, auc, released=RELEASED) is None


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.01, math.inf])
def test_scores_are_read_back(strength: float) -> None:
    scores = FinishScores(
        local=0.8, common=0.7, both=0.9, error=0.05, tested=30, strength=strength, note="why"
    )
    told = scores.to_dict()
    assert all(isinstance(value, str | int | float) for value in told.values())
    assert math.inf not in told.values()
    assert FinishScores.from_dict(told) == scores
