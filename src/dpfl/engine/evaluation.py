"""How good a model is on test records.

For a simulation, or for a client's own eyes: no ledger covers these numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.engine.process import one_thread
from dpfl.engine.trace import channels_last
from dpfl.models.checks import in_mode, outputs_of
from dpfl.plugs.personal import Personal

_RECORDS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a model is on test records; ``loss`` is -1 where it is not finite.

    ``common_accuracy`` is that of the shared model, where clients are tested with their own models.
    """

    accuracy: float
    loss: float
    common_accuracy: float | None = None


class Evaluation:
    """All clients' test records, and how a model is tested on them.

    ``evaluate = Evaluation(model=..., layout=..., federation=..., device="cpu")`` is called with a
    flat vector, and returns :class:`Scores`. The model is left as it was.
    """

    def __init__(
        self, *, model: nn.Module, layout: Layout, federation: Federation, device: str
    ) -> None:
        self._model, self._layout, self._device = model, layout, device
        self._inputs, self._shards = federation.inputs, federation.shards
        self._everyone = federation.test_set()

    def __call__(
        self, vector: Tensor, personal: Personal | None, private: Mapping[str, Tensor]
    ) -> Scores:
        """Return accuracy and loss of the common model (``vector``) on all test records.

        Where parts of the model stay at clients (``personal``; their values are in ``private``, by
        client), each client's own model is tested on its own test records and the mean over records
        is reported, with the accuracy of the common model beside it.
        """
        common = self._scores(vector, *self._everyone)
        if personal is None:
            return common
        accuracy = loss = 0.0
        for client, shard in self._shards.items():
            if count := len(shard.test_labels):
                own = personal.merge(vector, private.get(client), self._layout)
                found = self._scores(own, shard.test_features, shard.test_labels)
                accuracy, loss = accuracy + found.accuracy * count, loss + found.loss * count
        records = max(1, len(self._everyone[1]))
        return Scores(
            accuracy=accuracy / records, loss=loss / records, common_accuracy=common.accuracy
        )

    def _scores(self, vector: Tensor, features: Tensor, labels: Tensor) -> Scores:
        parameters = self._layout.unflatten(vector.to(self._device))
        with torch.no_grad(), one_thread(), in_mode(self._model, training=False):
            parts = []
            for part in torch.split(features, _RECORDS_AT_ONCE):
                batch = channels_last(self._inputs(part.to(self._device)))
                parts.append(outputs_of(self._model, parameters, batch).cpu())
            outputs = torch.cat(parts)
            loss = F.cross_entropy(outputs, labels).item()
            accuracy = (outputs.argmax(1) == labels).float().mean().item()
        return Scores(accuracy=accuracy, loss=loss if math.isfinite(loss) else -1.0)
