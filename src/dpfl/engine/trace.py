"""What one forward of a model leaves behind for the rules of its layers.

A forward hook keeps the input and output of every layer that has a rule; recurrent layers are run
unrolled (:mod:`dpfl.engine.recurrent`). What the rules do not cover raises :class:`NotCovered`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.engine import layer_rules as rules
from dpfl.engine.convolutions import conv2d
from dpfl.engine.recurrent import Tap, can_unroll, unroll

RULES: dict[type[nn.Module], Callable[..., rules.LayerGradient]] = {
    nn.Linear: rules.linear,
    nn.Conv2d: conv2d,
    nn.Embedding: rules.embedding,
    nn.GroupNorm: rules.group_norm,
    nn.LayerNorm: rules.layer_norm,
}
"""The rule of each kind of layer: ``rule(layer, a, d)``."""


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


@contextmanager
def slopes_channels_last(model: nn.Module) -> Iterator[None]:
    """Lay out gradients of what is flattened as the image is.

    Else torch copies larger ones back and forth.
    """

    def lay_out(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments[0].requires_grad and arguments[0].ndim == 4:
            arguments[0].register_hook(channels_last)  # type: ignore[no-untyped-call]

    with ExitStack() as hooks:
        for module in model.modules():
            if type(module) is nn.Flatten:
                hooks.enter_context(module.register_forward_pre_hook(lay_out))
        yield


def layers_with_rules(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that have a rule, and their names."""
    modules = ((module, name) for name, module in model.named_modules())
    return {m: name for m, name in modules if type(m) in RULES or can_unroll(m)}


def can_ghost_clip(model: nn.Module) -> bool:
    """Whether every parameter belongs to a layer that has a rule."""
    layers = layers_with_rules(model)
    covered = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    return {id(p) for p in model.parameters()} == covered and not any(
        isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq)
        for layer in layers
    )


class Trace:
    """What every layer with a rule was given in one forward, and what it gave."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._names = model, layers_with_rules(model)
        self._in_place = any(getattr(module, "inplace", False) for module in model.modules())
        self._taps: dict[nn.Module, list[Tap]] = {}
        self._versions: list[tuple[Tensor, int]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward that is run inside; the model is left as it was."""
        with ExitStack() as hooks, slopes_channels_last(self._model):
            for module in self._names:
                if isinstance(module, nn.RNNBase):
                    module.forward = partial(self._unroll, module)
                    hooks.callback(delattr, module, "forward")
                else:
                    hooks.enter_context(module.register_forward_hook(self._keep))
            yield

    def _keep(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        output = output if output.requires_grad else output.requires_grad_()
        rule = partial(RULES[type(module)], module)
        self._add(module, [Tap(rule, [given[0].detach()], [output])])
        # torch raises a tensor's version whenever it is changed in place. It may have added a bias
        # in place itself: that is in the output's version already. An activation that works in
        # place on what follows gets a copy.
        kept = given[:1] if self._in_place else (given[0], output)
        self._versions += [(tensor, tensor._version) for tensor in kept]
        return output.clone() if self._in_place else None

    def _unroll(self, module: nn.RNNBase, x: Tensor, *state: Any) -> tuple[Tensor, Any]:
        if state or not isinstance(x, Tensor) or x.ndim != 3:
            name = self._names[module]
            raise NotCovered(f"layer '{name}' is given a state, or packed or single texts")
        output, last, taps = unroll(module, x)
        self._add(module, taps)
        return output, last

    def _add(self, module: nn.Module, taps: list[Tap]) -> None:
        if module in self._taps:
            raise NotCovered(f"layer '{self._names[module]}' is called twice")
        self._taps[module] = taps

    def wanted(self) -> list[Tensor]:
        """All tensors whose gradients are wanted."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise NotCovered("what a layer was given or gave was changed in place")
        return [tensor for taps in self._taps.values() for tap in taps for tensor in tap.wanted]

    def gradients(
        self, slopes: Sequence[Tensor | None], broken: Tensor | None = None
    ) -> tuple[list[tuple[str, rules.LayerGradient]], Tensor]:
        """Ask every layer's rule, with the gradients of the tensors that were wanted.

        Returns gradients by layer, and squared norms of whole gradients. Broken records are taken
        out first, because zero times infinity is not zero.
        """

        def whole(x: Tensor) -> Tensor:
            shape = (-1, *[1] * (x.ndim - 1))
            return x if broken is None else x.masked_fill(broken.reshape(shape), 0)

        found, gradients = iter(slopes), []
        for module, tap in ((module, tap) for module, taps in self._taps.items() for tap in taps):
            known = [slope for _ in tap.wanted if (slope := next(found)) is not None]
            if len(known) == len(tap.wanted):  # else the layer has no part in the loss
                gradient = tap.rule(*map(whole, [*tap.given, *known]))
                gradients.append((self._names[module], gradient))
        return gradients, rules.added(gradient.squares for _, gradient in gradients)
