"""Every model by name on the data it is meant for, and every user's model that must not be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Pixels, Tokens
from dpfl.models import MODELS, TEXT_MODELS, about, check_model, make_model

CIFAR = Pixels(mean=(0.5, 0.5, 0.5), deviation=(0.25, 0.25, 0.25))
# What a model of this name is for: shape, classes, inputs.
MEANT_FOR: dict[str, tuple[tuple[int, ...], int, Inputs]] = {
    "alexnet": ((3, 32, 32), 10, CIFAR),
    "cnn": ((1, 28, 28), 10, NUMBERS),
    "cnn_cifar": ((3, 32, 32), 10, CIFAR),
    "cnn_small": ((1, 28, 28), 10, NUMBERS),
    "lenet5": ((3, 32, 32), 10, CIFAR),
    "logistic": ((64,), 10, NUMBERS),
    "lstm": ((20,), 2, Tokens(4096)),
    "lstm_shakespeare": ((80,), 81, Tokens(81)),
    "mlp": ((64,), 10, NUMBERS),
    "resnet18": ((3, 32, 32), 10, CIFAR),
}
EVERY = sorted(MODELS | TEXT_MODELS)


def build(name: str, seed: int = 0, hidden: int = 64) -> nn.Module:
    shape, classes, inputs = MEANT_FOR[name]
    return make_model(name, shape, classes, PublicSeed(seed), hidden, inputs)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def one_sentence(error: BaseException) -> str:
    """Check the shape of a message: where, what is wrong, what to do; on one line that a person
    would read.
    """
    assert isinstance(error, DpflError)
    assert error.where
    assert error.problem
    assert error.remedy
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400
    return text


# ---- every name ----------------------------------------------------------------------------------


def test_no_model_is_left_out_here() -> None:
    assert sorted(MEANT_FOR) == EVERY
    assert not set(MODELS) & set(TEXT_MODELS)
    assert all(about(name).endswith(".") for name in EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_every_model_passes_the_checks_on_the_data_it_is_for_and_gives_a_score_a_class(
    name: str,
) -> None:
    shape, classes, inputs = MEANT_FOR[name]
    model = build(name)
    check_model(model, shape, classes, inputs)
    records = inputs(inputs.made_up(3, shape, PublicSeed(1).generator()))
    with torch.no_grad():
        assert tuple(model(records).shape) == (3, classes)


@pytest.mark.parametrize("name", EVERY)
def test_a_model_s_start_is_its_seed_s_and_leaves_the_global_generators_alone(name: str) -> None:
    torch.manual_seed(11)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = list(build(name, seed=5).parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(12)  # a start that read the global generator would now differ
    again, other = (list(build(name, seed=seed).parameters()) for seed in (5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def reader(vocabulary: int, embedding: int, hidden: int, layers: int, classes: int) -> int:
    """Count an embedding, LSTM layers (four gates, two biases each) and a dense layer."""
    recurrent = sum(
        4 * hidden * ((embedding if layer == 0 else hidden) + hidden) + 2 * 4 * hidden
        for layer in range(layers)
    )
    return vocabulary * embedding + recurrent + hidden * classes + classes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("cnn", 28_938),
        ("cnn_small", 26_010),
        ("resnet18", 11_173_962),
        ("lstm_shakespeare", reader(81, 8, 256, 2, 81)),
        ("lstm", reader(4096, 64, 64, 2, 2)),
        ("mlp", 64 * 64 + 64 + 64 * 10 + 10),
    ],
)
def test_the_documented_number_of_parameters_is_the_number_there_is(
    name: str, parameters: int
) -> None:
    assert size(build(name)) == parameters


def test_the_shakespeare_model_is_leaf_s_whatever_hidden_says() -> None:
    """By formula: 81 x 8, then 4 x 256 gates on 8 + 256 and on 256 + 256 inputs with two biases,
    then 257 x 81.
    """
    expected = 81 * 8 + 1024 * (8 + 256 + 2) + 1024 * (256 + 256 + 2) + 257 * 81
    assert expected == 820_185 == size(build("lstm_shakespeare", hidden=3))


def test_documented_sizes_are_those_of_the_description() -> None:
    for name in ("cnn", "cnn_small"):
        assert f"{size(build(name)):,}" in about(name)
    assert "11.2 million" in about("resnet18")
    assert round(size(build("resnet18")) / 1e6, 1) == 11.2


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_hidden_is_the_width_of_models_that_have_one(name: str) -> None:
    assert size(build(name, hidden=5)) < size(build(name, hidden=6))


# ---- tokens and numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TEXT_MODELS))
@pytest.mark.parametrize("inputs", [NUMBERS, CIFAR], ids=["numbers", "pixels"])
def test_a_model_of_tokens_refuses_numbers_and_names_what_reads_them(
    name: str, inputs: Inputs
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_model(name, (3, 32, 32), 3, PublicSeed(0), inputs=inputs)
    text = one_sentence(caught.value)
    assert f"model '{name}': reads tokens, and the data are numbers" in text
    assert all(other in caught.value.remedy for other in MODELS)
    assert not any(other in caught.value.remedy for other in TEXT_MODELS)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_of_numbers_refuses_tokens_and_names_what_reads_them(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_model(name, (3, 32, 32), 3, PublicSeed(0), inputs=Tokens(5))
    text = one_sentence(caught.value)
    assert f"model '{name}': reads numbers, and the data are tokens" in text
    assert all(other in caught.value.remedy for other in TEXT_MODELS)
    assert "logistic" not in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "shape", "inputs", "words"),
    [
        (lambda: build("lstm"), (20,), NUMBERS, "does not accept records of shape (20,)"),
        (lambda: nn.Linear(20, 2), (20,), Tokens(9), "does not accept tokens of shape (20,)"),
        (
            lambda: build("lstm_shakespeare"),
            (80,),
            Tokens(8000),
            "does not accept tokens of shape (80,)",
        ),
    ],
    ids=["tokens wanted", "numbers wanted", "a vocabulary beyond the embedding"],
)
def test_a_user_s_model_for_other_inputs_is_refused_before_training(
    model: Callable[[], nn.Module], shape: tuple[int, ...], inputs: Inputs, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_model(model(), shape, 2, inputs)
    assert words in one_sentence(caught.value)


# ---- a user's model, through the door ------------------------------------------------------------


class Scores(nn.Module):
    """A linear layer whose scores are changed before they are returned."""

    def __init__(self, change: Callable[[Tensor], Any], classes: int = 3) -> None:
        super().__init__()
        self.dense = nn.Linear(4, classes)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.dense(x))


class Before(nn.Module):
    """A linear layer whose records are changed before it sees them."""

    def __init__(
        self, change: Callable[[Tensor], Tensor], *, only_in_training: bool = False
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.change = change
        self.only_in_training = only_in_training

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x if self.only_in_training and not self.training else self.change(x))


class Attention(nn.Module):
    """Attention over the four positions of a record, or, with the default order, over the records
    of a batch.
    """

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=batch_first)
        self.dense = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 2)
        return self.dense(self.attention(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    """A recurrent layer over the two positions of a record, or, with the default order, over the
    records of a batch.
    """

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 5, batch_first=batch_first)
        self.dense = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.recurrent(x.reshape(-1, 2, 2))[0][:, -1])


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).requires_grad_(False)


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, nn.Flatten(), nn.Linear(4, 3))


ONE_ROW = "let it return one row of 3 scores per record"
APART = "let every record be computed apart"
NORM = "replace_batch_norm(model)"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "too few scores": (lambda: nn.Linear(4, 2), "outputs of shape (2,) for 3 classes", ONE_ROW),
    "one score": (lambda: Scores(lambda y: y[:, 0]), "outputs of shape () for 3 classes", ONE_ROW),
    "a matrix a record": (
        lambda: Scores(lambda y: y[:, :, None]),
        "outputs of shape (3, 1)",
        ONE_ROW,
    ),
    "classes first": (lambda: Scores(lambda y: y.T), "for 3 classes", ONE_ROW),
    "one number": (lambda: Scores(lambda y: y.sum()), "for 3 classes", ONE_ROW),
    "one row for all": (lambda: Scores(lambda y: y[:1]), "for 3 classes", ONE_ROW),
    "a pair": (lambda: Scores(lambda y: (y, y)), "gives no tensor", ONE_ROW),
    "a dict": (lambda: Scores(lambda y: {"scores": y}), "gives no tensor", ONE_ROW),
    "nothing": (lambda: Scores(lambda y: None), "gives no tensor", ONE_ROW),
    "other records": (
        lambda: nn.Linear(5, 3),
        "does not accept records of shape (4,)",
        "fit the model",
    ),
    "BatchNorm1d": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        "model layer '1': BatchNorm1d mixes the records",
        NORM,
    ),
    "BatchNorm2d": (
        lambda: images(nn.BatchNorm2d(1)),
        "model layer '1': BatchNorm2d mixes the records",
        NORM,
    ),
    "BatchNorm without statistics": (
        lambda: images(nn.BatchNorm2d(1, track_running_stats=False)),
        "model layer '1': BatchNorm2d mixes the records",
        NORM,
    ),
    "InstanceNorm with statistics": (
        lambda: images(nn.InstanceNorm2d(1, track_running_stats=True)),
        "model layer '1': InstanceNorm2d",
        NORM,
    ),
    "the batch's mean": (
        lambda: Before(lambda x: x - x.mean(0)),
        "another one is in the batch",
        APART,
    ),
    "a softmax over records": (
        lambda: Scores(lambda y: y.softmax(0)),
        "another one is in the batch",
        APART,
    ),
    "attention over records": (
        lambda: Attention(batch_first=False),
        "another one is in the batch",
        APART,
    ),
    "recurrence over records": (
        lambda: Recurrent(batch_first=False),
        "another one is in the batch",
        APART,
    ),
    "a sum over earlier records": (
        lambda: Before(lambda x: x.cumsum(0)),
        "another one is in the batch",
        APART,
    ),
    "the batch's mean in training only": (
        lambda: Before(lambda x: x - x.mean(0), only_in_training=True),
        "another one is in the batch",
        APART,
    ),
    "frozen": (frozen, "model: has frozen parameters only", "set requires_grad"),
    "double": (lambda: nn.Linear(4, 3).double(), "is torch.float64", "use float32"),
    "whole scores": (lambda: Scores(lambda y: y.long()), "for 3 classes", ONE_ROW),
}
CASES = list(REFUSED)


@pytest.fixture(scope="module")
def federation() -> dpfl.Federation:
    rng = np.random.default_rng(0)
    arrays = {name: (rng.normal(size=(30, 4)), rng.integers(0, 3, 30)) for name in "ab"}
    budgets = {name: dpfl.Budget(epsilon=4.0, delta=1e-3) for name in "ab"}
    return dpfl.Federation.from_arrays(arrays, classes=3, budgets=budgets)


def train(model: nn.Module, federation: dpfl.Federation) -> dpfl.Result:
    strategy = dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=6, local_steps=2)
    return dpfl.train(model, federation, strategy, rounds=1)


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_trained_privately_is_refused_in_one_sentence(
    case: str, federation: dpfl.Federation
) -> None:
    make, problem, remedy = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError) as caught:
        train(make(), federation)
    text = one_sentence(caught.value)
    assert caught.value.exit_code == 2
    assert problem in text
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "model",
    [
        lambda: Attention(batch_first=True),
        lambda: Recurrent(batch_first=True),
        lambda: images(nn.InstanceNorm2d(1, affine=True)),
        lambda: images(nn.GroupNorm(1, 1)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 3)),
        lambda: Scores(lambda y: y - y.mean(1, keepdim=True)),
        lambda: nn.Linear(4, 7),
    ],
    ids=[
        "attention",
        "recurrence",
        "instance norm",
        "group norm",
        "dropout",
        "a record's own mean",
        "spare scores",
    ],
)
def test_its_nearest_relative_that_treats_records_apart_is_trained(
    model: Callable[[], nn.Module], federation: dpfl.Federation
) -> None:
    """A check that refuses too much would pass the test above."""
    torch.manual_seed(0)
    start = model()
    result = train(start, federation)
    pairs = zip(start.parameters(), result.model.parameters(), strict=True)
    assert all(bool(torch.isfinite(b).all()) for _, b in pairs)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(start.parameters(), result.model.parameters(), strict=True)
    )


# ---- what a model remembers ----------------------------------------------------------------------


class Remembering(nn.Module):
    """Keeps the last record it saw, as a layer with statistics of its own would."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x[-1].detach())
        return self.dense(x)


def test_no_record_comes_out_in_a_model_s_buffer(federation: dpfl.Federation) -> None:
    """Buffers are neither clipped nor noised, and whoever gets the model gets them."""
    strategy = dpfl.fedavg_dp(lr=0.1, clip=1.0, batch_size=6, local_steps=2)
    result = dpfl.train(Remembering(), federation, strategy, rounds=1, evaluate_every=2)
    everything = torch.cat(
        [part for s in federation.shards.values() for part in (s.features, s.test_features)]
    )
    seen = dict(result.model.named_buffers())["seen"]
    assert not bool((everything == seen).all(1).any())
