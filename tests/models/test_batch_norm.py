"""BatchNorm: constants in evaluation mode, refused in training mode, or replaced by GroupNorm."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from dpfl.core.errors import ConfigurationError
from dpfl.models import check_model, replace_batch_norm
from dpfl.models.checks import in_mode


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 2), norm, nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(24, 3)
    )


def trained(norm: nn.Module) -> nn.Module:
    """A network whose statistics are those of some public records."""
    model = network(norm)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(3):
            model(torch.randn(8, 1, 3, 3))
    return model


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_are_accepted_in_evaluation_mode_only(norm: type[nn.Module]) -> None:
    model = trained(norm(6, affine=True, track_running_stats=True))
    with pytest.raises(ConfigurationError, match=r"model layer '1': .*\.eval\(\) on the layer"):
        check_model(model, (1, 3, 3), 3)
    model[1].eval()
    check_model(model, (1, 3, 3), 3)
    model.eval()
    check_model(model, (1, 3, 3), 3)
    assert not any(module.training for module in model.modules())


def test_without_statistics_evaluation_mode_does_not_help() -> None:
    model = network(nn.BatchNorm2d(6, track_running_stats=False)).eval()
    with pytest.raises(ConfigurationError, match="model layer '1': BatchNorm2d mixes"):
        check_model(model, (1, 3, 3), 3)


def test_no_mode_of_the_model_wakes_a_layer_in_evaluation_mode() -> None:
    model = trained(nn.BatchNorm2d(6)).train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    with in_mode(model, training=True):
        assert model[3].training
        assert not model[1].training
        model(torch.randn(4, 1, 3, 3))
    with in_mode(model, training=False):
        assert not model[3].training
    assert model.training
    assert not model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@given(st.integers(1, 200))
def test_groups_are_the_largest_divisor_of_the_channels_up_to_32(channels: int) -> None:
    groups = replace_batch_norm(nn.BatchNorm2d(channels)).num_groups
    assert channels % groups == 0
    assert groups <= 32
    assert replace_batch_norm(nn.BatchNorm1d(channels)).num_groups == 1
    assert not any(channels % n == 0 for n in range(groups + 1, min(32, channels) + 1))


def test_every_batch_norm_is_replaced_and_the_model_given_is_left_alone() -> None:
    model = nn.Sequential(
        trained(nn.BatchNorm2d(6)), nn.Sequential(nn.BatchNorm1d(3, affine=False))
    )
    nn.init.normal_(model[0][1].weight)
    model[0][1].bias.requires_grad_(False)
    changed = replace_batch_norm(model)
    assert [type(m).__name__ for m in model.modules()].count("GroupNorm") == 0
    kinds = [type(m).__name__ for m in changed.modules()]
    assert (kinds.count("GroupNorm"), kinds.count("BatchNorm2d")) == (2, 0)
    assert torch.equal(changed[0][1].weight, model[0][1].weight)
    assert changed[0][1].weight is not model[0][1].weight
    assert not changed[0][1].bias.requires_grad
    assert list(changed[1].parameters()) == []
    check_model(changed, (1, 3, 3), 3)


def test_a_layer_at_two_places_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(4)
    changed = replace_batch_norm(nn.Sequential(nn.Sequential(norm), nn.Linear(4, 4), norm))
    assert changed[0][0] is changed[2]
    assert isinstance(changed[2], nn.GroupNorm)
