"""Every task: its loss treats records apart, its metrics are those of the books, its targets are
checked, and every engine computes its gradients alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from sklearn import metrics as books
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, DataError, DpflError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.data.inputs import NUMBERS, Tokens
from dpfl.engine.base import Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.engine.stacked import Stacked
from dpfl.models import check_model
from dpfl.tasks import (
    TASKS,
    Binary,
    Classification,
    CustomTask,
    MultiLabel,
    Regression,
    Task,
    TokenPrediction,
    make_task,
    metrics,
)
from dpfl.tasks.metrics import Evaluated


@dataclass(frozen=True)
class Case:
    """A task that is resolved, the shape of one output and of one target."""

    task: Task
    output: tuple[int, ...]
    target: tuple[int, ...] = ()


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs()


CASES = {
    "classes": Case(Classification(classes=3), (3,)),
    "spare scores": Case(Classification(classes=2), (4,)),
    "weighted classes": Case(Classification(classes=3, class_weights=(1.0, 4.0, 0.5)), (3,)),
    "binary": Case(Binary(), (1,)),
    "flat binary": Case(Binary(positive_weight=3.0), ()),
    "labels": Case(MultiLabel(labels=4), (4,), (4,)),
    "squared": Case(Regression(outputs_per_record=1), (1,)),
    "huber": Case(Regression(outputs_per_record=1, loss="huber", delta=0.3), ()),
    "several numbers": Case(Regression(outputs_per_record=2), (2,), (2,)),
    "tokens": Case(TokenPrediction(vocabulary=5), (6, 5), (6,)),
    "padded tokens": Case(TokenPrediction(vocabulary=5, padding=0), (6, 5), (6,)),
    "own": Case(CustomTask(loss=absolute), (1,)),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def drawn(case: Case, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(count, *case.output, generator=generator)
    return outputs, case.task.made_up(count, case.target, generator)


# ---- laws ----------------------------------------------------------------------------------------


@EVERY
@given(count=st.integers(1, 7), seed=st.integers(0, 999))
def test_a_record_s_loss_is_its_own(case: Case, count: int, seed: int) -> None:
    outputs, targets = drawn(case, count, seed)
    losses = case.task.losses(outputs, targets)
    assert losses.shape == (count,)
    assert torch.isfinite(losses).all() and bool((losses >= 0).all())
    for i in range(count):
        alone = case.task.losses(outputs[i : i + 1], targets[i : i + 1])
        assert torch.allclose(alone, losses[i : i + 1], rtol=1e-5, atol=1e-6)
    moved = outputs.clone()
    moved[0] += 1.0
    assert torch.equal(case.task.losses(moved, targets)[1:], losses[1:])


@EVERY
@given(count=st.integers(1, 40), seed=st.integers(0, 999))
def test_made_up_targets_are_targets_and_all_scores_are_finite(
    case: Case, count: int, seed: int
) -> None:
    outputs, targets = drawn(case, count, seed)
    again = case.task.check_targets("here", targets.numpy())
    assert torch.equal(again, targets) and again.dtype == targets.dtype
    assert case.task.outside(targets) is None
    scores = case.task.scores(outputs, targets)
    assert "loss" in scores and all(map(math.isfinite, scores.values()))
    assert len(case.task.predictions(outputs)) == count
    broken = torch.full_like(outputs, math.nan)
    assert all(map(math.isfinite, case.task.scores(broken, targets).values())) or "loss" in scores


@EVERY
def test_a_task_travels_as_plain_values(case: Case) -> None:
    if isinstance(case.task, CustomTask):
        with pytest.raises(ConfigurationError, match="own"):
            make_task(case.task.to_dict())
    else:
        assert make_task(case.task.to_dict()) == case.task


# ---- references ----------------------------------------------------------------------------------


def test_losses_are_those_of_the_books() -> None:
    outputs, targets = drawn(CASES["weighted classes"], 20, 0)
    weights = np.array([1.0, 4.0, 0.5])
    chances = np.exp(outputs.numpy()) / np.exp(outputs.numpy()).sum(1, keepdims=True)
    y = targets.numpy()
    expected = -weights[y] * np.log(chances[np.arange(20), y])
    found = CASES["weighted classes"].task.losses(outputs, targets)
    assert np.allclose(found, expected, rtol=1e-4)

    outputs, targets = drawn(CASES["flat binary"], 20, 1)
    yes, y = 1 / (1 + np.exp(-outputs.numpy().astype(float))), targets.numpy()
    expected = -3 * y * np.log(yes) - (1 - y) * np.log(1 - yes)
    assert np.allclose(CASES["flat binary"].task.losses(outputs, targets), expected, rtol=1e-4)

    outputs, targets = drawn(CASES["huber"], 50, 2)
    error = np.abs(outputs.numpy() - targets.numpy())
    expected = np.where(error <= 0.3, error**2 / 2, 0.3 * (error - 0.15))
    assert np.allclose(CASES["huber"].task.losses(outputs, targets), expected, rtol=1e-4)


def test_padding_counts_neither_in_losses_nor_in_metrics() -> None:
    task = TokenPrediction(vocabulary=4, padding=0)
    outputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 0], [0, 0, 0]])
    each = nn.functional.cross_entropy(outputs[0, :2], targets[0, :2], reduction="none")
    losses = task.losses(outputs, targets)
    assert torch.allclose(losses, torch.tensor([float(each.mean()), 0.0]))
    changed = outputs.clone()
    changed[0, 2] += 100.0
    changed[1] -= 7.0
    assert torch.equal(task.losses(changed, targets), losses)
    assert task.scores(changed, targets) == task.scores(outputs, targets)
    assert task.scores(outputs, targets)["perplexity"] == pytest.approx(
        math.exp(float(each.mean()))
    )


def test_metrics_are_scikit_learn_s() -> None:
    outputs, targets = drawn(CASES["classes"], 200, 3)
    targets = torch.randint(0, 3, (200,), generator=torch.Generator().manual_seed(5))
    found, y = CASES["classes"].task.scores(outputs, targets), targets.numpy()
    chances, named = outputs.double().softmax(1).numpy(), outputs.argmax(1).numpy()
    assert found["accuracy"] == pytest.approx(books.accuracy_score(y, named))
    assert found["balanced_accuracy"] == pytest.approx(books.balanced_accuracy_score(y, named))
    assert found["auc"] == pytest.approx(books.roc_auc_score(y, chances, multi_class="ovr"))
    assert found["f1"] == pytest.approx(books.f1_score(y, named, average="macro"))
    task, (outputs, targets) = Binary(), drawn(CASES["binary"], 200, 4)
    found, y = task.scores(outputs, targets), targets.numpy()
    assert found["auc"] == pytest.approx(books.roc_auc_score(y, outputs[:, 0].numpy()))
    precision = books.average_precision_score(y, outputs[:, 0].numpy())
    assert found["average_precision"] == pytest.approx(precision)
    task = Regression(outputs_per_record=1)
    outputs, targets = drawn(CASES["squared"], 99, 5)
    found, y = task.scores(outputs, targets), targets.numpy()
    assert found["rmse"] == pytest.approx(books.root_mean_squared_error(y, outputs[:, 0]), rel=1e-5)
    assert found["r2"] == pytest.approx(books.r2_score(y, outputs[:, 0]), rel=1e-5)


@st.composite
def evaluated(draw: st.DrawFn) -> Evaluated:
    """Few records of classes or labels, some of which do not occur, with equal probabilities."""
    count, width = draw(st.integers(1, 12)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    occurring = draw(st.integers(1, width))
    if draw(st.booleans()):
        targets, predictions = rng.integers(0, occurring, (2, count))
        chances = rng.dirichlet(np.ones(width), count).round(1).astype(np.float32)
    else:  # several labels
        targets = rng.integers(0, 2, (count, width)) * (np.arange(width) < occurring)
        predictions = rng.integers(0, 2, (count, width))
        chances = rng.random((count, width)).round(1).astype(np.float32)
    losses = np.zeros(count)
    return Evaluated(targets=targets, predictions=predictions, losses=losses, probabilities=chances)


@given(found=evaluated())
def test_metrics_are_scikit_learn_s_with_ties_and_missing_classes(found: Evaluated) -> None:
    y, named, several = found.targets, found.predictions, found.targets.ndim == 2
    two = not several and found.one_hot.shape[1] == 2
    average = {"average": "binary" if two else "macro", "zero_division": 0}
    assert metrics.f1(found) == pytest.approx(books.f1_score(y, named, **average))
    if not several:
        recall = books.recall_score(y, named, labels=np.unique(y), average="macro", zero_division=0)
        assert metrics.balanced_accuracy(found) == pytest.approx(recall)
    assert found.probabilities is not None
    wanted, columns = found.one_hot, range(1 if two else 0, found.one_hot.shape[1])
    both = [i for i in columns if 0 < wanted[:, i].sum() < len(y)]
    for metric, book in (
        (metrics.auc, books.roc_auc_score),
        (metrics.average_precision, books.average_precision_score),
    ):
        expected = [book(wanted[:, i], found.probabilities[:, i]) for i in both]
        mean = np.mean(expected) if expected else math.nan
        assert metric(found) == pytest.approx(mean, nan_ok=True)


@given(count=st.integers(1, 5), width=st.integers(1, 3), seed=st.integers(0, 999))
def test_r2_is_scikit_learn_s_also_of_targets_that_are_all_the_same(
    count: int, width: int, seed: int
) -> None:
    targets, predictions = np.random.default_rng(seed).integers(0, 2, (2, count, width))
    found = Evaluated(targets=targets, predictions=predictions, losses=np.zeros(count))
    expected = books.r2_score(targets, predictions) if count > 1 else math.nan
    assert metrics.r2(found) == pytest.approx(expected, nan_ok=True)


def test_calibration_error_is_zero_for_chances_that_are_right_and_large_for_wrong_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40_000, generator=generator)
    targets = (torch.rand(40_000, generator=generator) < logits.sigmoid()).float()
    task = Binary()
    assert task.scores(logits, targets)["calibration_error"] < 0.01
    assert task.scores(5 * logits, targets)["calibration_error"] > 0.1


def test_the_confusion_matrix_counts_true_classes_in_rows() -> None:
    outputs = torch.eye(3)[[0, 0, 1, 2, 2]]
    counts = Classification(classes=3).by_class(outputs, torch.tensor([0, 1, 1, 2, 0]))
    assert counts == ((1, 0, 1), (1, 1, 0), (0, 0, 1))


# ---- engines -------------------------------------------------------------------------------------


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.dense(self.table(tokens))
        return scores


def models(case: Case) -> list[Callable[[], nn.Module]]:
    if case.target == (6,):
        return [PerToken]
    width = case.output[0] if case.output else 1
    return [
        lambda: nn.Linear(7, width),
        lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, width)),
        lambda: nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, width)),  # no chain
    ]


@EVERY
@pytest.mark.parametrize("clip", [None, 0.7], ids=["plain", "clipped"])
def test_every_engine_takes_the_gradient_of_the_task_s_loss(case: Case, clip: float | None) -> None:
    for build in models(case):
        torch.manual_seed(0)
        model = build()
        layout, generator = Layout.of_module(model), torch.Generator().manual_seed(1)
        tokens = case.target == (6,)
        x = torch.randn(12, 7, generator=generator)
        features = torch.randint(0, 5, (12, 6), generator=generator) if tokens else x
        targets = case.task.made_up(12, case.target, generator)
        phase = Phase(
            steps=3,
            batch_size=5,
            sampling="shuffle" if clip is None else "poisson",
            lr=0.4,
            clip=clip,
        )
        jobs = [
            Job(
                client=str(i),
                start=layout.read(model),
                phases=(phase,),
                features=features[6 * i : 6 * i + 6],
                labels=targets[6 * i : 6 * i + 6],
                rng=SecretRng.simulated(PublicSeed(i)),
                inputs=Tokens(5) if tokens else NUMBERS,
                task=case.task,
            )
            for i in range(2)
        ]
        fast = Stacked().run(model, layout, jobs)
        slow = OneByOne(one_at_a_time=True).run(model, layout, jobs)
        for job, one, other in zip(jobs, fast, slow, strict=True):
            size = float((other - job.start).norm())
            assert size > 1e-3
            assert float((one - other).norm()) <= 5e-5 * size


def test_one_step_is_the_mean_of_clipped_gradients_written_out_by_hand() -> None:
    task, x = Regression(outputs_per_record=1), torch.tensor([[1.0, 2.0], [0.1, 0.0]])
    y, model = torch.tensor([3.0, 0.5]), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    layout = Layout.of_module(model)
    phase = Phase(steps=1, batch_size=2, sampling="poisson", lr=1.0, clip=1.0)
    job = Job(
        client="a",
        start=layout.read(model),
        phases=(phase,),
        features=x,
        labels=y,
        rng=SecretRng.simulated(PublicSeed(0)),
        task=task,
    )
    errors = x @ torch.tensor([1.0, -1.0]) - y  # (-4, -0.4)
    rows = errors[:, None] * x
    clipped = rows * (1 / rows.norm(dim=1).clamp_min(1.0))[:, None]
    expected = torch.tensor([1.0, -1.0]) - clipped.sum(dim=0) / 2
    for engine in (Stacked(), OneByOne()):
        assert torch.allclose(engine.run(model, layout, [job])[0], expected, atol=1e-6)


# ---- whole runs ----------------------------------------------------------------------------------


def arrays(kind: str, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(seed)
    x, clients = generator.normal(size=(3, 200, 6)), {}
    weights = generator.normal(size=6)
    for i, own in enumerate(x):
        found = own @ weights
        targets = {
            "binary": (found > 0.5).astype(int),
            "classification": (found > 0).astype(int) + (found > 1),
            "multi_label": (own[:, :2] > 0).astype(int),
            "regression": found,
        }
        clients[f"h{i}"] = own, targets[kind]
    return clients


@pytest.mark.parametrize(
    ("kind", "metric", "least"),
    [
        ("binary", "auc", 0.9),
        ("classification", "balanced_accuracy", 0.6),
        ("multi_label", "auc", 0.85),
        ("regression", "r2", 0.7),
    ],
)
def test_every_task_learns_under_a_budget(kind: str, metric: str, least: float) -> None:
    clients = arrays(kind)
    budgets = {client: dpfl.Budget(epsilon=8.0, delta=1e-3) for client in clients}
    federation = dpfl.Federation.from_arrays(
        clients, task={"name": kind, "metric": metric}, budgets=budgets
    )
    strategy = dpfl.weiavg(lr=0.5, clip=1.0, batch_size=40, local_epochs=1)
    result = dpfl.train(nn.Linear(6, federation.task.width), federation, strategy, rounds=15)
    scores = result.summary.scores
    assert scores.metric == metric and scores.value > least
    assert set(scores.by_client) == set(clients) and scores.worst is not None
    assert scores.worst[1] == min(scores.by_client.values())
    again = type(scores).from_dict(scores.to_dict())
    assert again == scores


def test_a_user_s_own_loss_is_trained() -> None:
    task = CustomTask(
        loss=lambda found, wanted: (found[:, 0] - wanted).square(),
        metric="bias",
        own_metrics={"bias": lambda found, wanted: float((found[:, 0] - wanted).mean().abs())},
    )
    federation = dpfl.Federation.from_arrays(arrays("regression"), task=task)
    result = dpfl.train(nn.Linear(6, 1), federation, FEDAVG, rounds=10)
    assert result.summary.scores.metric == "bias" and result.summary.scores.value < 0.2
    assert result.summary.scores.loss < 0.1


FEDAVG = dpfl.fedavg(lr=0.1, batch_size=20, local_epochs=1)


# ---- stratified splits and test parts that lack something ----------------------------------------


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(0, 99))
def test_a_stratified_split_has_the_size_of_any_split_and_the_mix_of_all(
    labels: list[int], seed: int
) -> None:
    x = np.arange(len(labels), dtype=float)[:, None]
    plain, chosen = (
        dpfl.Federation.from_arrays({"a": (x, labels)}, classes=3, stratified=how, seed=seed)
        for how in (False, True)
    )
    found, usual = chosen.shards["a"], plain.shards["a"]
    assert len(found.test_labels) == len(usual.test_labels)
    everyone = sorted([*found.features.flatten().tolist(), *found.test_features.flatten().tolist()])
    assert everyone == x.flatten().tolist()
    for label in range(3):
        share = labels.count(label) / len(labels)
        held = int((found.test_labels == label).sum())
        assert abs(held - share * len(found.test_labels)) < 1.5
    assert chosen.stratified and not plain.stratified


def test_a_stratified_split_is_flagged() -> None:
    budgets = {client: dpfl.Budget(epsilon=1.0, delta=1e-3) for client in ("h0", "h1", "h2")}
    federation = dpfl.Federation.from_arrays(
        arrays("binary"), task="binary", stratified=True, budgets=budgets
    )
    strategy = dpfl.weiavg(lr=0.5, clip=1.0, batch_size=40, local_epochs=1)
    result = dpfl.train(nn.Linear(6, 1), federation, strategy, rounds=1)
    assert "stratified" in [raised.flag.value for raised in result.summary.flags]


def test_a_test_part_without_positive_records_is_said_aloud_or_refused() -> None:
    x, none = np.ones((10, 2)), np.zeros(10)
    some = np.arange(10) % 2
    clients = {"a": (x, some, x, none)}
    counted = dpfl.Federation.from_arrays(clients, task={"name": "binary", "metric": "accuracy"})
    result = dpfl.train(nn.Linear(2, 1), counted, FEDAVG, rounds=1)
    assert any("no positive record" in str(raised) for raised in result.summary.flags)
    ranked = dpfl.Federation.from_arrays(clients, task="binary")
    with pytest.raises(DataError, match="no positive record"):
        dpfl.train(nn.Linear(2, 1), ranked, FEDAVG, rounds=1)


# ---- bad input -----------------------------------------------------------------------------------

ROWS = [[0.0, 1.0]] * 6
BAD_TARGETS = {
    "real numbers as classes": (None, [0.5] * 6, "not whole numbers"),
    "one-hot rows as classes": (None, np.eye(6), "one-hot"),
    "words": ("regression", ["a"] * 6, "not numbers, such as .a."),
    "missing numbers": ("regression", [1.0, math.nan] * 3, "not finite"),
    "a third answer": ("binary", [0, 1, 2] * 2, "label 2"),
    "one column of labels": ("multi_label", [0, 1] * 3, r"shape \(6,\)"),
    "half a label": ("multi_label", [[0, 0.5]] * 6, "label 0.5"),
    "single tokens": ("token_prediction", [1] * 6, r"shape \(6,\)"),
    "tokens in pieces": ("token_prediction", [[0.5, 1]] * 6, "not tokens"),
    "huge numbers": ("regression", [1e30] * 6, "1e15"),
    "cubes": ("regression", np.zeros((6, 2, 2)), r"shape \(6, 2, 2\)"),
    "too few": ("regression", [1.0] * 5, "6 records and 5"),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_targets_of_the_wrong_kind_are_refused_with_the_client_s_name(case: str) -> None:
    task, targets, reason = BAD_TARGETS[case]
    with pytest.raises(DataError, match=reason) as caught:
        dpfl.Federation.from_arrays({"north": (ROWS, targets)}, task=task)
    assert "north" in str(caught.value) and caught.value.exit_code == 3


BAD_TASKS = {
    "an unknown task": ({"name": "regresion"}, "did you mean 'regression'"),
    "a metric that does not fit": ({"name": "regression", "metric": "accuracy"}, "accuracy"),
    "an unknown metric": ({"name": "binary", "metric": "acc"}, "metric"),
    "an unknown setting": ({"name": "binary", "weight": 2}, "not a setting"),
    "a negative weight": ({"name": "binary", "positive_weight": -1}, "-1"),
    "an unknown loss": ({"name": "regression", "loss": "cubed"}, "cubed"),
    "too few weights": (
        {"name": "classification", "classes": 3, "class_weights": [1, 2]},
        "2 weights",
    ),
    "a user's own": ({"name": "custom"}, "own"),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_task_that_cannot_be_is_refused_before_anything_runs(case: str) -> None:
    values, reason = BAD_TASKS[case]
    with pytest.raises(ConfigurationError, match=reason):
        make_task(values)


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_gives_something_else_is_refused_with_what_is_wanted(name: str) -> None:
    resolved: dict[str, Task] = {
        "classification": Classification(classes=3),
        "binary": Binary(),
        "multi_label": MultiLabel(labels=3),
        "regression": Regression(outputs_per_record=1),
        "token_prediction": TokenPrediction(vocabulary=3),
    }
    task, wrong = resolved[name], nn.Linear(4, 2)
    with pytest.raises(ConfigurationError, match="let it return"):
        check_model(wrong, (4,), task, target_shape=(4,) if name == "token_prediction" else ())


def test_a_loss_that_is_no_loss_per_record_is_refused() -> None:
    bad: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        r"\(\) for": lambda found, wanted: (found[:, 0] - wanted).abs().mean(),
        "when others are there": lambda found, wanted: found[:, 0] - found.mean(),
    }
    for reason, loss in bad.items():
        with pytest.raises(DpflError, match=reason):
            check_model(nn.Linear(4, 1), (4,), CustomTask(loss=loss))


def test_a_comparison_ranks_less_error_first() -> None:
    from dpfl.core.types import Adjacency, Observer, Promise, Unit
    from dpfl.experiments.ranking import standings
    from dpfl.experiments.results import CellResult, RunScore

    promise = Promise(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, observer=Observer.SERVER)
    errors = {"good": (0.3, 0.4, 0.35), "bad": (0.6, 0.7, 0.64)}
    cells = [
        CellResult(
            label=name,
            runs=tuple(
                RunScore(
                    seed=seed, value=value, metric="rmse", higher_is_better=False, promise=promise
                )
                for seed, value in enumerate(values)
            ),
        )
        for name, values in errors.items()
    ]
    ranked = {one.label: one for one in standings(cells)}
    assert ranked["good"].best and not ranked["bad"].best
    assert ranked["bad"].gap == pytest.approx(0.2967, abs=1e-3)
    assert RunScore.from_dict(cells[0].runs[0].to_dict()) == cells[0].runs[0]


@pytest.mark.parametrize("given", [Regression, 3, ["regression"]])
def test_what_is_not_a_task_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="is not a task; give its name, such as"):
        make_task(given)  # type: ignore[arg-type]


def test_targets_of_another_kind_are_named() -> None:
    with pytest.raises(DataError, match="has labels that are not numbers, such as 'ill'"):
        Binary().check_targets("client 'a'", np.array(["0", "ill", "1"]))
    with pytest.raises(DataError, match="has label 2; label records 0 or 1"):
        Binary().check_targets("client 'a'", np.array([0, 2]))


def test_predictions_of_classes_are_whole_numbers() -> None:
    for task in (Binary(), MultiLabel(labels=1)):
        found = task.predictions(torch.tensor([[-1.0], [2.0]]))
        assert found.dtype == torch.int64
        assert found.flatten().tolist() == [0, 1]


def test_a_metric_alone_is_one_of_the_data_set_s_own_task() -> None:
    from dpfl.runs.experiment import Experiment

    base = {
        "partition": {"clients": 3},
        "method": {"name": "fedavg", "lr": 0.1, "batch_size": 8, "local_steps": 1},
        "run": {"rounds": 1},
    }
    for data, metric, name in (
        ("diabetes", "mae", "regression"),
        ("digits", "f1", "classification"),
    ):
        values = {**base, "data": {"name": data}, "task": {"metric": metric}}
        task = Experiment.from_dict(values).federation().task
        assert (task.name, task.metric) == (name, metric)
        plain = Experiment.from_dict({**base, "data": {"name": data}}).federation()
        own = Experiment.from_dict(values).federation()
        assert all(torch.equal(own.shards[c].features, plain.shards[c].features) for c in plain.ids)
    wrong = {**base, "data": {"name": "diabetes"}, "task": {"metric": "auc"}}
    with pytest.raises(ConfigurationError, match="not a metric of regression"):
        Experiment.from_dict(wrong).federation()
