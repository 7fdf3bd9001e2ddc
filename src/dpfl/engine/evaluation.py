"""How good a model is on test records: for a simulation, or for a client's own eyes. No ledger
covers these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.engine.ghost_clipping import fast_layout
from dpfl.engine.one_by_one import on_copies
from dpfl.engine.process import one_thread
from dpfl.plugs.personal import Personal

AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a model is on test records. ``common_accuracy`` is that of the shared model, where
    clients are tested with models of their own.
    """

    accuracy: float
    loss: float
    common_accuracy: float | None = None


class Evaluation:
    """All clients' test records, and how a model is tried on them."""

    def __init__(
        self, *, model: nn.Module, layout: Layout, federation: Federation, device: str
    ) -> None:
        self._model, self._layout, self._device = model, layout, device
        self._inputs, self._shards = federation.inputs, federation.shards
        self._everyone = federation.test_set()

    def __call__(
        self, vector: Tensor, personal: Personal | None, private: Mapping[str, Tensor]
    ) -> Scores:
        """Accuracy and loss of the common model on all test records.

        Where parts of the model stay at clients, each client's own model is tested on its own test
        records, and the mean over records is reported; the common model alone beside it.
        """
        common = self._tested(vector, *self._everyone)
        if personal is None:
            return common
        accuracy = loss = 0.0
        for client, shard in self._shards.items():
            if count := len(shard.test_labels):
                own = personal.merge(vector, private.get(client), self._layout)
                found = self._tested(own, shard.test_features, shard.test_labels)
                accuracy, loss = accuracy + found.accuracy * count, loss + found.loss * count
        records = max(1, len(self._everyone[1]))
        return Scores(
            accuracy=accuracy / records, loss=loss / records, common_accuracy=common.accuracy
        )

    def _tested(self, vector: Tensor, features: Tensor, labels: Tensor) -> Scores:
        parameters = on_copies(self._model, self._layout.unflatten(vector.to(self._device)))
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad(), one_thread():
            parts = []
            for part in torch.split(features, AT_ONCE):
                batch = fast_layout(self._inputs(part.to(self._device)))
                parts.append(functional_call(self._model, parameters, (batch,)).cpu())
            outputs = torch.cat(parts)
            loss = F.cross_entropy(outputs, labels).item()
            accuracy = (outputs.argmax(1) == labels).float().mean().item()
        self._model.train(was_training)
        return Scores(accuracy=accuracy, loss=loss if math.isfinite(loss) else -1.0)
