"""The rules of layers that normalise: a scale and a shift after the normalised input.

Statistics are those of each record, or constants that the layer keeps (a layer in evaluation mode).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.engine.layer_rules import LayerGradient, learns, rows


def group_norm(layer: nn.GroupNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per channel, over groups of channels of a record."""
    return _per_channel(layer, F.group_norm(a, layer.num_groups, eps=layer.eps), d)


def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, a: Tensor, d: Tensor
) -> LayerGradient:
    """Scale and shift per channel, over each channel of a record or with kept statistics."""
    if layer.track_running_stats:
        return batch_norm(layer, a, d)
    return _per_channel(layer, F.instance_norm(a, eps=layer.eps), d)


def batch_norm(layer: nn.modules.batchnorm._NormBase, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per channel, with kept statistics."""
    assert layer.running_mean is not None and layer.running_var is not None
    mean = layer.running_mean.to(a.device)
    var = layer.running_var.to(a.device)
    return _per_channel(layer, F.batch_norm(a, mean, var, eps=layer.eps), d)


def _per_channel(layer: nn.Module, normalised: Tensor, d: Tensor) -> LayerGradient:
    shape = (*d.shape[:2], -1)
    shift = rows(d.reshape(shape).sum(dim=2)) if learns(layer.bias) else None
    scale = (d * normalised).reshape(shape).sum(dim=2) if learns(layer.weight) else None
    return LayerGradient.of(weight=None if scale is None else rows(scale), bias=shift)


def layer_norm(layer: nn.LayerNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale and shift per entry of the normalised shape; leading axes are positions."""
    return _per_entry(layer, F.layer_norm(a, layer.normalized_shape, eps=layer.eps), d)


def rms_norm(layer: nn.RMSNorm, a: Tensor, d: Tensor) -> LayerGradient:
    """Scale per entry of the normalised shape; leading axes are positions."""
    return _per_entry(layer, F.rms_norm(a, list(layer.normalized_shape), eps=layer.eps), d)


def _per_entry(layer: nn.Module, normalised: Tensor, d: Tensor) -> LayerGradient:
    shape = (len(d), -1, layer.get_parameter("weight").numel())
    bias = getattr(layer, "bias", None)
    shift = rows(d.reshape(shape).sum(dim=1)) if learns(bias) else None
    scale = (d * normalised).reshape(shape).sum(dim=1) if learns(layer.weight) else None
    return LayerGradient.of(weight=None if scale is None else rows(scale), bias=shift)
