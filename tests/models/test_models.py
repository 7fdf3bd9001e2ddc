from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.models import MODELS, check_model, make_model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "hidden", "parameters"),
    [
        ("logistic", (64,), 64, 650),
        ("logistic", (1, 28, 28), 64, 7850),
        ("logistic", (784,), 64, 7850),
        ("mlp", (64,), 32, 64 * 32 + 32 + 32 * 10 + 10),
    ],
)
def test_models_have_the_papers_number_of_parameters(
    name: str, shape: tuple[int, ...], hidden: int, parameters: int
) -> None:
    model = make_model(name, shape, 10, PublicSeed(0), hidden=hidden)
    assert size(model) == parameters
    assert tuple(model(torch.zeros(3, *shape)).shape) == (3, 10)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_equal_seeds_give_equal_starts_and_others_give_others(name: str) -> None:
    starts = []
    for seed in (7, 7, 8):
        model = make_model(name, (3, 32, 32), 3, PublicSeed(seed))
        starts.append(Layout.of_module(model).read(model))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_seeds_of_any_size_make_a_model() -> None:
    make_model("logistic", (6,), 3, PublicSeed(0).child("model"))
    make_model("logistic", (6,), 3, PublicSeed(2**128 - 1))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_start_neither_moves_nor_reads_the_global_generators(name: str) -> None:
    torch.manual_seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = make_model(name, (3, 32, 32), 3, PublicSeed(7))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(2)
    again = make_model(name, (3, 32, 32), 3, PublicSeed(7))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'logistic'"):
        make_model("logistik", (6,), 3, PublicSeed(0))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_our_own_models_pass_the_checks(name: str) -> None:
    check_model(make_model(name, (3, 32, 32), 3, PublicSeed(0)), (3, 32, 32), 3)


NORMS = {
    "BatchNorm1d": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "BatchNorm2d": nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)
    ),
    "SyncBatchNorm": nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_layer_that_mixes_records_is_refused_by_name_with_what_to_use_instead(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"replace_batch_norm\(model\)") as caught:
        check_model(NORMS[kind], (4,), 3)
    assert "model layer '1'" in str(caught.value)
    assert kind in str(caught.value)


def test_a_nested_layer_that_mixes_records_is_found() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3))
    with pytest.raises(ConfigurationError, match=r"model layer '0\.1'"):
        check_model(model, (4,), 3)


def test_a_layer_that_keeps_statistics_of_the_records_is_refused_before_it_fails_in_the_middle_of_a_round() -> (
    None
):
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    with pytest.raises(ConfigurationError, match="model layer '1'"):
        check_model(nn.Sequential(*model, nn.Linear(6, 3)), (1, 4), 3)


def test_normalising_each_record_on_its_own_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 3))
    check_model(model, (4,), 3)


def test_frozen_and_shared_parameters_are_accepted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    check_model(model, (4,), 3)
    model[0].to(torch.float64)  # what is frozen may have any type, as long as the model runs
    with pytest.raises(ConfigurationError, match="does not accept records"):
        check_model(model, (4,), 3)
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    shared[1].weight = shared[0].weight
    check_model(shared, (4,), 3)


def test_a_model_with_frozen_parameters_only_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="frozen parameters only; set requires_grad"):
        check_model(nn.Linear(4, 3).requires_grad_(False), (4,), 3)


def test_a_parameter_that_is_learned_is_float32_and_a_frozen_one_need_not_be() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x.double()).float())

    model = Mixed()
    with pytest.raises(ConfigurationError, match=r"'body.weight': is torch.float64"):
        check_model(model, (4,), 3)
    model.body.requires_grad_(False)
    check_model(model, (4,), 3)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no parameters"):
        check_model(nn.Sequential(nn.Flatten(), nn.ReLU()), (4,), 3)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Linear(5, 3), (4,)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), (16,)),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (4,)),
        (nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), (4,)),
    ],
    ids=["linear", "convolution", "flatten", "embedding"],
)
def test_a_model_that_does_not_accept_the_records_is_refused(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigurationError, match="does not accept records of shape"):
        check_model(model, shape, 3)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 2),
        nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (3, 4))),
        nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
    ],
    ids=["too few", "a matrix a record", "one number a record"],
)
def test_outputs_that_are_no_class_scores_are_refused(model: nn.Module) -> None:
    with pytest.raises(
        ConfigurationError, match="for 3 classes; let it return one row of 3 scores per record"
    ):
        check_model(model, (4,), 3)


def test_a_model_that_writes_into_its_records_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.ELU(inplace=True), nn.Linear(4, 2))
    with pytest.raises(ConfigurationError, match="writes into the records that it is given"):
        check_model(model, (4,), 2)


def test_a_model_that_returns_several_things_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="model"):
        check_model(nn.LSTM(4, 3), (2, 4), 3)


def test_more_outputs_than_classes_are_fine() -> None:
    check_model(nn.Linear(4, 5), (4,), 3)


def test_a_check_leaves_every_layer_in_its_mode() -> None:
    """A layer that its owner put into evaluation must not be woken up."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    check_model(model, (4,), 3)
    assert [module.training for module in model.modules()] == [True, True, True, False, True]


def test_a_refused_model_is_left_in_its_mode_too() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout())
    with pytest.raises(ConfigurationError):
        check_model(model, (4,), 3)
    assert all(module.training for module in model.modules())


class Centred(nn.Module):
    """Subtracts the batch's mean: no layer to blame, and still no record is apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(dim=0))


def test_a_model_that_mixes_records_by_hand_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="another one is in the batch"):
        check_model(Centred(), (4,), 3)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("cnn", (1, 28, 28), 28_938),
        ("cnn_small", (1, 28, 28), 26_010),
        ("cnn_cifar", (3, 32, 32), 1_105_098),
        ("lenet5", (3, 32, 32), 1_141_194),
        ("resnet18", (3, 32, 32), 11_173_962),
    ],
)
def test_the_papers_networks_have_the_papers_sizes(
    name: str, shape: tuple[int, ...], parameters: int
) -> None:
    model = make_model(name, shape, 10, PublicSeed(0))
    assert sum(p.numel() for p in model.parameters()) == parameters
    check_model(model, shape, 10)


def test_a_network_for_images_refuses_vectors_in_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="cannot take records of shape"):
        make_model("cnn", (64,), 10, PublicSeed(0))
    with pytest.raises(ConfigurationError, match="cannot take records of shape"):
        make_model("lenet5", (1, 4, 4), 10, PublicSeed(0))
