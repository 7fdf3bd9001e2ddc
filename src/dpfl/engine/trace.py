"""What one forward of a model leaves behind for the rules of its layers.

A forward hook keeps the input and output of every layer that has a rule; recurrent layers are run
unrolled (:mod:`dpfl.engine.recurrent`). What the rules do not cover raises :class:`NotCovered`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.engine.layer_rules import RULES
from dpfl.engine.recurrent import Tap, can_unroll, unroll


class NotCovered(Exception):
    """The model does something that the layers' rules do not cover."""


def channels_last(tensor: Tensor) -> Tensor:
    """Lay out images and kernels with channels last; other tensors stay as they are.

    Pooling and convolution are several times faster that way on a CPU.
    """
    if tensor.ndim != 4:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    # One channel is contiguous either way, and torch takes it for channels first.
    _, channels, height, width = tensor.shape
    strides = (height * width, 1, width, 1)
    return tensor.as_strided(tensor.shape, strides) if channels == 1 else tensor


@dataclass(frozen=True)
class Layers:
    """What is looked up in a model once for many steps.

    ``names`` of the layers that have a rule; ``flattens``, the layers that flatten images;
    ``in_place``, whether some layer works in place; ``tied``, whether layers share parameters.
    """

    names: dict[nn.Module, str]
    flattens: list[nn.Module]
    in_place: bool
    tied: bool

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Look at a model as it is now."""
        modules = {module: name for name, module in model.named_modules()}
        parameters = list(model.named_parameters(remove_duplicate=False))
        return cls(
            {m: name for m, name in modules.items() if type(m) in RULES or can_unroll(m)},
            [module for module in modules if type(module) is nn.Flatten],
            any(getattr(module, "inplace", False) for module in modules),
            len(list(model.parameters())) < len(parameters),
        )

    @contextmanager
    def slopes_channels_last(self) -> Iterator[None]:
        """Lay out gradients of what is flattened as the image is.

        Else torch copies larger ones back and forth.
        """

        def lay_out(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if arguments[0].requires_grad and arguments[0].ndim == 4:
                arguments[0].register_hook(channels_last)  # type: ignore[no-untyped-call]

        with ExitStack() as hooks:
            for module in self.flattens:
                hooks.enter_context(module.register_forward_pre_hook(lay_out))
            yield


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input and output, and their versions then.

    torch raises a tensor's version whenever it is changed in place.
    """

    input: Tensor
    output: Tensor
    input_version: int
    output_version: int


@dataclass
class Trace:
    """Every layer's call, or taps where it is recurrent, of one forward."""

    layers: Layers
    calls: dict[nn.Module, Call] = field(default_factory=dict)
    taps: dict[nn.Module, list[Tap]] = field(default_factory=dict)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward that is run inside; the model is left as it was."""
        with ExitStack() as hooks, self.layers.slopes_channels_last():
            for module in self.layers.names:
                if isinstance(module, nn.RNNBase):
                    module.forward = partial(self._unroll, module)
                    hooks.callback(delattr, module, "forward")
                else:
                    hooks.enter_context(module.register_forward_hook(self._keep))
            yield

    def _keep(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        self._called_once(module)
        output = output if output.requires_grad else output.requires_grad_()
        # torch itself may have added a bias in place: that is in the output's version already.
        versions = given[0]._version, output._version
        self.calls[module] = Call(given[0].detach(), output, *versions)
        # An activation that works in place on what follows gets a copy.
        return output.clone() if self.layers.in_place else None

    def _unroll(self, module: nn.RNNBase, x: Tensor, *state: Any) -> tuple[Tensor, Any]:
        self._called_once(module)
        if state or not isinstance(x, Tensor) or x.ndim != 3:
            name = self.layers.names[module]
            raise NotCovered(f"layer '{name}' is given a state, or packed or single texts")
        output, last, self.taps[module] = unroll(module, x)
        return output, last

    def _called_once(self, module: nn.Module) -> None:
        if module in self.calls or module in self.taps:
            raise NotCovered(f"layer '{self.layers.names[module]}' is called twice")

    def wanted(self) -> list[Tensor]:
        """All tensors whose gradients are wanted: outputs of calls, then gates of taps."""
        calls = self.calls.values()
        if not self.layers.in_place and any(c.output._version != c.output_version for c in calls):
            raise NotCovered("a layer's output was changed in place")
        if any(call.input._version != call.input_version for call in calls):
            raise NotCovered("a layer's input was changed in place after it was read")
        gates = [gate for taps in self.taps.values() for tap in taps for gate in tap.gates]
        return [*(call.output for call in calls), *gates]
