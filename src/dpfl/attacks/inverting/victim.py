"""The client whose upload is inverted, and a small federation around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import DataError, unknown_name
from dpfl.core.types import ClientSettings, Plain
from dpfl.data.federation import Federation
from dpfl.data.inputs import Pixels, Tokens
from dpfl.data.records import Shard
from dpfl.datasets.named import load_dataset
from dpfl.runs.experiment import Experiment, for_method


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The client whose upload is inverted, and the federation around it.

    ``originals`` are its records between 0 and 1, ``low`` and ``high`` the ends of the range as the
    model takes them, ``picture`` the shape in which a record is an image.
    """

    client: str
    federation: Federation
    originals: Tensor
    labels: Tensor
    low: Tensor
    high: Tensor
    picture: tuple[int, ...]
    model_name: str
    data_folder: Path | None

    @classmethod
    def of(
        cls,
        values: Plain,
        method: str,
        records: Sequence[int],
        client: str | None,
        data_folder: Path | None,
    ) -> Victim:
        """Take these records, from the data set or from the client's own file."""
        experiment = Experiment.from_options(for_method(values, method))
        federation = experiment.federation(data_folder)
        _check_task(federation)
        name = federation.ids[0] if client is None else client
        if name not in federation.ids:
            raise unknown_name("inversion", "client", name, federation.ids)
        own = federation.shards[name]
        features = own.features
        labels = own.labels
        if experiment.data.name is not None:
            dataset = load_dataset(experiment.data.name, data_folder).as_task(federation.task)
            features = dataset.features
            labels = dataset.labels
        most = len(labels)
        check(
            max(records) < most,
            "inversion",
            f"there is no record {max(records)}",
            f"name some of 0 to {most - 1}",
            DataError,
        )
        chosen = torch.tensor(list(records))
        target = features[chosen], labels[chosen]
        low, high = _range(federation, features)
        taken = federation.inputs(target[0]).float()
        span = (high - low).clamp_min(1e-12)
        return cls(
            client=name,
            federation=_small(federation, name, *target),
            originals=((taken - low) / span).clamp(0, 1),
            labels=target[1],
            low=low,
            high=high,
            picture=_picture(federation),
            model_name=experiment.model.name,
            data_folder=data_folder,
        )


def _check_task(federation: Federation) -> None:
    """Refuse what has no gradient in its records, or no classes."""
    tokens = isinstance(federation.inputs, Tokens)
    check(
        not tokens,
        "inversion",
        "records are tokens, which no gradient moves",
        "use a data set of numbers or images",
    )
    check(
        federation.task.softmax and federation.task.plain,
        "inversion",
        f"the task is {federation.task.name}",
        "use a classification of records",
    )


def _range(federation: Federation, features: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the range of a record's values, which are public: bytes, or as in the data."""
    one = features[:1]
    if isinstance(federation.inputs, Pixels):
        ends = torch.zeros_like(one), torch.full_like(one, 255)
    else:
        finite = features[:10_000].flatten(1)
        shape = one.shape
        if _picture(federation):  # all pixels have one range
            least, most = torch.aminmax(finite)
            ends = torch.full_like(one, float(least)), torch.full_like(one, float(most))
        else:
            ends = finite.min(dim=0).values.view(shape), finite.max(dim=0).values.view(shape)
    low, high = (federation.inputs(end)[0].float() for end in ends)
    return low, high


def _picture(federation: Federation) -> tuple[int, ...]:
    shape = federation.record_shape
    if len(shape) == 3:
        return shape
    return tuple(getattr(federation.inputs, "picture", ()))


def _small(federation: Federation, client: str, features: Tensor, labels: Tensor) -> Federation:
    """The federation in which everyone holds as many records as the victim."""
    count = len(labels)
    shards = {}
    for name, own in federation.shards.items():
        x, y = (features, labels) if name == client else (own.features[:count], own.labels[:count])
        shards[name] = Shard.of(x.clone(), y.clone(), own.test_features, own.test_labels)
    settings = ClientSettings(batch_size=count, local_steps=1)
    return replace(federation, shards=shards, client_settings=dict.fromkeys(shards, settings))
