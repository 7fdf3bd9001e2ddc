"""What one forward of a model leaves behind for the rules of its layers.

A forward hook keeps the input and output of every layer that learns and has a rule; recurrent and
attention layers are run by :mod:`dpfl.engine.recurrent` and :mod:`dpfl.engine.attention`. Frozen
layers are not looked at, and nothing is differentiated before the first layer that learns. What the
rules do not cover raises :class:`NotCovered`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.engine import layer_rules as rules
from dpfl.engine.attention import attend
from dpfl.engine.coverage import layers_with_rules, learned, rule_of
from dpfl.engine.layer_rules import LayerGradient, Tap
from dpfl.engine.recurrent import unroll
from dpfl.engine.shared import SHARES, Use, shared_gradients

Named = tuple[Mapping[str, str], LayerGradient]
"""A gradient by the names of a layer, and the names of those parameters in the layout."""


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


class TracedLayers:
    """The layers of a model that learn and have a rule, looked up once for many steps.

    ``names`` are theirs in the model, ``blocks`` those of their parameters in the layout, and
    ``users`` how many layers have each of these. ``in_place`` says that some layer changes what it
    is given.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = layers_with_rules(model)
        self.in_place = any(getattr(module, "inplace", False) for module in model.modules())
        parameters = {id(own): name for name, own in model.named_parameters()}
        self.blocks = {
            layer: {name: parameters[id(own)] for name, own in learned(layer).items()}
            for layer in self.names
        }
        self.users = Counter(block for names in self.blocks.values() for block in names.values())
        self._flattening = [module for module in model.modules() if type(module) is nn.Flatten]

    @contextmanager
    def slopes_channels_last(self) -> Iterator[None]:
        """Lay out gradients of what is flattened as the image is.

        Else torch copies larger ones back and forth.
        """

        def lay_out(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if arguments[0].requires_grad and arguments[0].ndim == 4:
                arguments[0].register_hook(channels_last)  # type: ignore[no-untyped-call]

        with ExitStack() as hooks:
            for module in self._flattening:
                hooks.enter_context(module.register_forward_pre_hook(lay_out))
            yield


class Trace:
    """What every layer with a rule was given in one forward, and what it gave.

    ``records`` is how many records the batch has.
    """

    def __init__(self, layers: TracedLayers, records: int) -> None:
        self._layers = layers
        self._records = records
        self._taps: dict[nn.Module, list[Tap]] = {}
        self._versions: list[tuple[Tensor, int]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the forward that is run inside; the model is left as it was."""
        with ExitStack() as hooks, self._layers.slopes_channels_last():
            for module in self._layers.names:
                if isinstance(module, nn.RNNBase):
                    module.forward = partial(self._unroll, module)
                    hooks.callback(delattr, module, "forward")
                elif isinstance(module, nn.MultiheadAttention):
                    module.forward = partial(self._attend, module)  # type: ignore[method-assign]
                    hooks.callback(delattr, module, "forward")
                else:
                    hooks.enter_context(module.register_forward_hook(self._keep))
            yield

    def _keep(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        name = self._layers.names[module]
        rule = rule_of(module)
        if not given or rule is None:
            raise NotCovered(f"layer '{name}' is called with named arguments")
        a = given[0]
        if type(module) is nn.Embedding and a.ndim > 1 and len(a) == 1:
            # Positions, the same for all records: each gets its own, and so its own gradient.
            a = a.expand(self._records, *a.shape[1:])
            output = output.expand(self._records, *output.shape[1:]).clone()
        if len(a) != self._records:
            raise NotCovered(f"layer '{name}' does not have the records on its first axis")
        output = output if output.requires_grad else output.requires_grad_()
        self._add(module, [Tap(partial(rule, module), [a.detach()], [output])])
        # torch raises a tensor's version whenever it is changed in place. It may have added a bias
        # in place itself: that is in the output's version already. An activation that works in
        # place on what follows gets a copy.
        kept = given[:1] if self._layers.in_place else (given[0], output)
        self._versions += [(tensor, tensor._version) for tensor in kept]
        return output.clone() if self._layers.in_place else output

    def _unroll(self, module: nn.RNNBase, x: Tensor, *state: Any) -> tuple[Tensor, Any]:
        if state or not isinstance(x, Tensor) or x.ndim != 3:
            name = self._layers.names[module]
            raise NotCovered(f"layer '{name}' is given a state, or packed or single texts")
        output, last, taps = unroll(module, x)
        self._add(module, taps)
        return output, last

    def _attend(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint: the mask says the same
    ) -> tuple[Tensor, Tensor | None]:
        given = (query, key, value)
        name = self._layers.names[module]
        axis = 0 if module.batch_first else 1
        if any(x.is_nested or x.ndim != 3 or x.shape[axis] != self._records for x in given):
            raise NotCovered(f"layer '{name}' is given nested or single sequences")
        if is_causal and attn_mask is None:
            raise NotCovered(f"layer '{name}' is given is_causal without a mask")
        output, weights, taps = attend(
            module,
            self._layers.blocks[module],
            given,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
        )
        self._add(module, taps)
        return output, weights

    def _add(self, module: nn.Module, taps: list[Tap]) -> None:
        if module in self._taps and type(module) not in SHARES:
            raise NotCovered(f"layer '{self._layers.names[module]}' is called twice")
        self._taps.setdefault(module, []).extend(taps)

    def wanted(self) -> list[Tensor]:
        """All tensors whose gradients are wanted."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise NotCovered("what a layer was given or gave was changed in place")
        return [tensor for taps in self._taps.values() for tap in taps for tensor in tap.wanted]

    def gradients(
        self, slopes: Sequence[Tensor | None], broken: Tensor | None = None
    ) -> tuple[list[Named], Tensor]:
        """Ask every layer's rule, with the gradients of the tensors that were wanted.

        Returns gradients by layer, and squared norms of whole gradients. Broken records are taken
        out first, because zero times infinity is not zero. The uses of a shared parameter are one
        gradient.
        """

        def whole(x: Tensor) -> Tensor:
            shape = (-1, *[1] * (x.ndim - 1))
            return x if broken is None else x.masked_fill(broken.reshape(shape), 0)

        found = iter(slopes)
        gradients = list[Named]()
        uses = list[Use]()
        for module, tap in ((module, tap) for module, taps in self._taps.items() for tap in taps):
            known = [slope for _ in tap.wanted if (slope := next(found)) is not None]
            if len(known) < len(tap.wanted):
                continue  # the layer has no part in the loss
            names = self._layers.blocks[module]
            given = [*map(whole, [*tap.given, *known])]
            if self._is_shared(module):
                uses.append(Use(module, names, *given))
            else:
                gradients.append((names, tap.rule(*given)))
        if uses:
            blocks = {block: block for block in self._layers.users}
            gradients += [(blocks, gradient) for gradient in shared_gradients(uses)]
        return gradients, rules.added(gradient.squares for _, gradient in gradients)

    def _is_shared(self, module: nn.Module) -> bool:
        """Whether a layer is called more than once, or another one has one of its parameters.

        Or gives it its name: the parts of a layer of the layout are clipped together.
        """
        blocks = self._layers.blocks[module].values()
        users = self._layers.users
        homes = {block.rpartition(".")[0] for block in blocks}
        several = type(module) in SHARES and (len(self._taps[module]) > 1 or len(homes) > 1)
        return several or any(users[block] > 1 for block in blocks)
