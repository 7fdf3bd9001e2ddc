"""How good a model is on test records.

For a simulation, or for a client's own eyes: no ledger covers these numbers.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import DataError
from dpfl.core.layout import Layout
from dpfl.core.threads import one_thread
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.engine.trace import channels_last
from dpfl.models.checks import in_mode, outputs_of
from dpfl.models.separation import structure
from dpfl.plugs.personal import Personal
from dpfl.tasks import MetricWords

_RECORDS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How good a model is on test records.

    ``value`` is the task's ranking metric, named by ``metric``; ``loss`` is -1 where it is not
    finite. ``common`` is the value of the shared model, where clients are tested with their own
    models. At the end of a run there is more: all ``metrics``, the value of each client whose own
    test records define it (``by_client``), and the ``confusion`` matrix of the classes.
    """

    metric: str = "accuracy"
    value: float
    loss: float
    common: float | None = None
    higher_is_better: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    by_client: Mapping[str, float] = field(default_factory=dict)
    confusion: tuple[tuple[int, ...], ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of right predictions; NaN for a task that has none."""
        other = self.metrics.get("accuracy", math.nan)
        return self.value if self.metric == "accuracy" else other

    @property
    def words(self) -> MetricWords:
        """How the metric's values are shown."""
        return MetricWords(self.metric)

    @property
    def worst(self) -> tuple[str, float] | None:
        """The client that is served worst, and its value."""
        sign = 1 if self.higher_is_better else -1
        clients = sorted(self.by_client.items(), key=lambda pair: (sign * pair[1], pair[0]))
        return clients[0] if clients else None

    def over_clients(self) -> str:
        """Smallest, median and largest of the clients' values, and who is served worst."""
        if self.worst is None or len(self.by_client) < 2:
            return ""
        known, (client, value) = sorted(self.by_client.values()), self.worst
        ends = (known[0], statistics.median(known), known[-1])
        spread = " / ".join(map(self.words.number, ends))
        return f"{spread}  (smallest / median / largest); worst: {client}, {self.words.show(value)}"

    def other_metrics(self) -> str:
        """All metrics but the one that ranks, in words."""
        others = {k: v for k, v in self.metrics.items() if k not in (self.metric, "loss")}
        told = ((MetricWords(name), value) for name, value in others.items())
        return ", ".join(f"{words.words} {words.show(value)}" for words, value in told)

    @property
    def by_class(self) -> tuple[float | None, ...]:
        """Of each class, the share of its records that is recognised; None where it has none."""
        counts = [(row[i], sum(row)) for i, row in enumerate(self.confusion)]
        return tuple(right / there if there else None for right, there in counts)

    def to_dict(self) -> Plain:
        """Return plain values: the metric stands under its own name."""
        told: Plain = {self.metric: self.value, "loss": self.loss}
        if self.common is not None:
            told[f"common_{self.metric}"] = self.common
        if self.metric != "accuracy":
            told |= {"metric": self.metric, "higher_is_better": self.higher_is_better}
        if self.metrics:
            told["details"] = {
                "metrics": dict(self.metrics),
                "by_client": dict(self.by_client),
                "confusion": [list(row) for row in self.confusion],
            }
        return told

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scores | None:
        """Read back what :meth:`to_dict` wrote; None where nothing was measured."""
        metric = str(values.get("metric", "accuracy"))
        more = values.get("details", {})
        if metric not in values:
            return None
        return cls(
            metric=metric,
            value=float(values[metric]),
            loss=float(values["loss"]),
            common=values.get(f"common_{metric}"),
            higher_is_better=bool(values.get("higher_is_better", True)),
            metrics=more.get("metrics", {}),
            by_client=more.get("by_client", {}),
            confusion=tuple(tuple(row) for row in more.get("confusion", ())),
        )


class Evaluation:
    """All clients' test records, and how a model is tested on them.

    ``evaluate = Evaluation(model=..., layout=..., federation=..., device="cpu")`` is called with a
    flat vector, and returns :class:`Scores`. The model is left as it was. ``lacking`` says which
    kind of record the test records do not have ("positive"), None if they have all.
    """

    def __init__(
        self, *, model: nn.Module, layout: Layout, federation: Federation, device: str
    ) -> None:
        self._model = model
        self._layout = layout
        self._device = device
        self._inputs = federation.inputs
        self._shards = {c: shard.without_blanks() for c, shard in federation.shards.items()}
        self._ids = federation.ids
        self.task = federation.task
        self._everyone = federation.test_set()
        self.lacking = self.task.missing_from_test(self._everyone[1])
        check(
            self.lacking is None or self.task.metric not in ("auc", "average_precision"),
            "test records",
            f"hold no {self.lacking} record, and {self.task.metric} needs some",
            "choose another seed or metric, or a stratified split",
            DataError,
        )

    @one_thread()  # the same numbers on every machine
    def __call__(
        self,
        vector: Tensor,
        personal: Personal | None,
        private: Mapping[str, Tensor],
        *,
        details: bool = False,
    ) -> Scores:
        """Return the ranking metric and the loss of the common model (``vector``) on all test
        records.

        Where parts of the model stay at clients (``personal``; their values are in ``private``, by
        client), each client's own model is tested on its own test records, and all predictions
        together are scored, with the value of the common model beside it. ``details`` asks for all
        metrics, and for each client's value.
        """
        features, targets = self._everyone
        outputs = self._outputs(vector, features)
        common = None
        if personal is not None:
            common = self._score(outputs, targets)
            parts = [outputs[:0]]
            for client in self._ids:
                own = personal.merge(vector, private.get(client), self._layout)
                parts.append(self._outputs(own, self._shards[client].test_features))
            outputs = torch.cat(parts)
        loss = self.task.losses(outputs, targets).mean().item()
        return Scores(
            metric=self.task.metric,
            value=self._score(outputs, targets),
            loss=loss if math.isfinite(loss) else -1.0,
            common=common,
            higher_is_better=self.task.higher_is_better,
            **(self._details(outputs, targets) if details else {}),
        )

    def _details(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        sizes = [len(self._shards[client].test_labels) for client in self._ids]
        by_client = {}
        pieces = zip(self._ids, *(torch.split(x, sizes) for x in (outputs, targets)), strict=True)
        for client, own, wanted in pieces:
            value = self._score(own, wanted) if len(wanted) else math.nan
            if math.isfinite(value):
                by_client[client] = value
        confusion = self.task.by_class(outputs, targets) if len(targets) else ()
        metrics = self.task.scores(outputs, targets) if len(targets) else {}
        return {"metrics": metrics, "by_client": by_client, "confusion": confusion}

    def _score(self, outputs: Tensor, targets: Tensor) -> float:
        return self.task.score(outputs, targets)

    def _outputs(self, vector: Tensor, features: Tensor) -> Tensor:
        """What a model gives for these records, in evaluation mode."""
        model = self._model
        if structure(model, self.task, self._inputs) is not None:  # it may keep what it sees here
            model = copy.deepcopy(model)
        run = partial(outputs_of, model, self._layout.unflatten(vector.to(self._device)))
        with torch.no_grad(), in_mode(model, training=False):
            parts = []
            for part in torch.split(features, _RECORDS_AT_ONCE):
                batch = channels_last(self._inputs(part.to(self._device)))
                parts.append(self.task.outputs(run, batch).cpu())
            return torch.cat(parts)
