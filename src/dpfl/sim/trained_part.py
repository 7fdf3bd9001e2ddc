"""The part of a model that is trained, and what it is trained and tested on.

Of a model on public features only the rest is trained, on features that are computed once, when
they are first needed.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from dpfl.core.layout import Layout
from dpfl.data.federation import Federation
from dpfl.engine.evaluation import Evaluation
from dpfl.models.featured import with_features
from dpfl.models.preconditioning import split_features
from dpfl.rounds.members import Member


class TrainedPart:
    """The ``model`` without public features; ``members`` and ``evaluation`` have these instead of
    records.

    Parameters and buffers are those of the model that was given, under the same names.
    """

    def __init__(
        self, *, model: nn.Module, layout: Layout, federation: Federation, device: str
    ) -> None:
        self._features, self.model = split_features(model, federation.task)
        self._layout = layout
        self._federation = federation
        self._device = device
        self._evaluation: Evaluation | None = None
        if self._features is None:
            self._evaluation = self._evaluating()  # refuses test records that cannot be scored

    def _evaluating(self) -> Evaluation:
        model = self.model
        layout = self._layout
        device = self._device
        return Evaluation(model=model, layout=layout, federation=self._federation, device=device)

    def _compute_features(self) -> None:
        if self._features is not None:
            self._federation = with_features(self._federation, self._features)
            self._features = None

    @property
    def evaluation(self) -> Evaluation:
        """How models are tested on all test records."""
        if self._evaluation is None:
            self._compute_features()
            self._evaluation = self._evaluating()
        return self._evaluation

    def members(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """The members with the records that local work is done on."""
        self._compute_features()
        shards = self._federation.shards
        inputs = self._federation.inputs
        return {c: replace(m, shard=shards[c], inputs=inputs) for c, m in members.items()}
