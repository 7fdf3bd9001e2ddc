"""Which layers have a rule for per-record gradients, and which are computed the slow way."""

from collections import Counter
from collections.abc import Callable

from torch import nn

from dpfl.engine import layer_rules as rules, normalisation as norms
from dpfl.engine.attention import can_attend
from dpfl.engine.convolutions import convolution
from dpfl.engine.recurrent import can_unroll
from dpfl.engine.shared import SHARES

Rule = Callable[..., rules.LayerGradient]

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: rules.linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: rules.embedding,
    nn.GroupNorm: norms.group_norm,
    nn.LayerNorm: norms.layer_norm,
    nn.RMSNorm: norms.rms_norm,
    nn.BatchNorm1d: norms.batch_norm,
    nn.BatchNorm2d: norms.batch_norm,
    nn.BatchNorm3d: norms.batch_norm,
    nn.InstanceNorm1d: norms.instance_norm,
    nn.InstanceNorm2d: norms.instance_norm,
    nn.InstanceNorm3d: norms.instance_norm,
}
"""The rule of each kind of layer: ``rule(layer, a, d)``."""


def rule_of(layer: nn.Module) -> Rule | None:
    """The rule of a layer that is called with one input, or None."""
    return RULES.get(type(layer))


def learned(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a layer that are not frozen, by the names that its rule gives them."""
    named = layer.named_parameters(recurse=isinstance(layer, nn.MultiheadAttention))
    return {name: own for name, own in named if own.requires_grad}


def layers_with_rules(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that learn and have a rule, and their names."""
    return {
        layer: name
        for name, layer in model.named_modules()
        if (rule_of(layer) or can_unroll(layer) or can_attend(layer)) and learned(layer)
    }


def slow_layers(model: nn.Module) -> dict[str, str]:
    """The layers without a rule, by name, and why: they make DP-SGD slow, never wrong.

    With one of them, per-record gradients of the whole model are written out. Frozen layers need no
    rule.

    >>> slow_layers(nn.Sequential(nn.Linear(4, 4), nn.PReLU()))
    {'1': 'PReLU has no rule for per-record gradients'}
    """
    layers = layers_with_rules(model)
    users = Counter(id(own) for layer in layers for own in learned(layer).values())
    # The output projection of an attention layer is part of it.
    attention = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    parts: dict[nn.Module, str] = {module.out_proj: "" for module in attention}
    found = {}
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        own = learned(layer) if layer in layers else {}
        free = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if layer not in layers | parts and any(id(p) not in users for p in free):
            found[name] = f"{kind} has no rule for per-record gradients"
        elif any(users[id(p)] > 1 for p in own.values()) and type(layer) not in SHARES:
            found[name] = f"{kind} shares a parameter with another layer"
        elif own and (getattr(layer, "max_norm", None) or getattr(layer, "scale_grad_by_freq", 0)):
            found[name] = f"{kind} rescales its rows (max_norm, scale_grad_by_freq)"
        elif own and isinstance(layer, nn.MultiheadAttention) and not layer.batch_first:
            found[name] = f"{kind} has positions on its first axis; use batch_first=True"
    return found


def can_ghost_clip(model: nn.Module) -> bool:
    """Whether every learned parameter belongs to a layer that has a rule."""
    return not slow_layers(model)
