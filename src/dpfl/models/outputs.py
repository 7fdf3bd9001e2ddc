"""Apply a model with given parameters, and leave nothing in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def outputs_of(model: nn.Module, parameters: dict[str, Tensor], features: Tensor) -> Any:
    """What a model with these parameters gives for a batch.

    Frozen parameters are the model's own. What a layer writes into a buffer stays in a copy. Of an
    output object with ``logits``, as Hugging Face's models give, those are taken.
    """
    device = features.device
    own = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    frozen = (pair for pair in model.named_parameters() if pair[0] not in parameters)
    own |= {name: tensor.to(device) for name, tensor in frozen if tensor.device != device}
    with _every_layer_called():
        found = functional_call(model, {**own, **parameters}, (features,))
    return found if isinstance(found, Tensor) else getattr(found, "logits", found)


@contextmanager
def _every_layer_called() -> Iterator[None]:
    """Switch off torch's fused transformer layers, which pass over the layers they consist of."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
