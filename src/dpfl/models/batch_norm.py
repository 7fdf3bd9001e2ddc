"""A model without BatchNorm, which mixes records: GroupNorm in its place."""

import copy

from torch import nn

MOST_GROUPS = 32


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of a model with every BatchNorm replaced by GroupNorm.

    ``model`` is left as it is. The number of groups is the largest divisor of the channels that is
    at most 32; a BatchNorm1d, which may be given vectors, gets one group, since a group of one
    number says nothing. Scale and shift are kept where the layer has them, and whether they are
    frozen; running statistics are dropped, so the copy gives other scores than the model.

    >>> replace_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    changed = copy.deepcopy(model)
    if isinstance(changed, nn.modules.batchnorm._BatchNorm):
        return _group_norm(changed)
    # A layer that is used at several places stays one layer.
    made: dict[nn.Module, nn.GroupNorm] = {}
    for parent in list(changed.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                made.setdefault(layer, _group_norm(layer))
                setattr(parent, name, made[layer])
    return changed


def _group_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    most = 1 if isinstance(layer, nn.BatchNorm1d) else min(channels, MOST_GROUPS)
    groups = max(n for n in range(1, most + 1) if channels % n == 0)
    found = nn.GroupNorm(groups, channels, layer.eps, affine=False).train(layer.training)
    found.affine = layer.affine
    found.weight = layer.weight
    found.bias = layer.bias
    return found
