"""Public features in place of records: computed once, and not in every round."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpfl.data.federation import Federation
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.data.records import Records, Shard, Span, check_data
from dpfl.models.checks import in_mode
from dpfl.models.per_record import rows_of
from dpfl.models.separation import mixing
from dpfl.tasks import CLASSIFICATION


def with_features(federation: Federation, features: nn.Module | None) -> Federation:
    """Return the same federation with public ``features`` of its records in their place.

    They are computed in evaluation mode. A client whose features are not finite numbers, or are
    longer than the map's ``bound``, is refused by name. Records that are no numbers themselves
    stand for nothing, and so do their features.
    """
    if features is None:
        return federation
    made: dict[int, Records] = {}
    with in_mode(features, training=False):
        for records, spans in _storages(federation.shards).values():
            make = partial(_featured, features, federation.inputs)
            made[id(records)] = records.mapped(make, spans)
    shards = {}
    bound = float(getattr(features, "bound", torch.inf))
    for client, own in federation.shards.items():
        train = made[id(own.train)]
        test = made[id(own.test)]
        shards[client] = shard = replace(own, train=train, test=test)
        pairs = (own.features, shard.features), (own.test_features, shard.test_features)
        for raw, featured in pairs:
            x = featured[torch.isfinite(raw).flatten(1).all(dim=1)]
            check_data(
                bool(torch.isfinite(x).all()),
                f"client '{client}'",
                "has features that are not finite numbers",
                "check its records",
            )
            longest = float(torch.linalg.vector_norm(x, dim=1).max()) if len(x) else 0.0
            check_data(
                longest <= bound * (1 + 1e-4),
                f"client '{client}'",
                f"has features of norm {longest:.4g}, beyond the declared {bound:g}",
                "let the map keep its bound",
            )
    return replace(federation, shards=shards, inputs=NUMBERS)


def _storages(shards: Mapping[str, Shard]) -> dict[int, tuple[Records, list[Span]]]:
    """Every storage of records, with the stretches that clients hold of it."""
    found: dict[int, tuple[Records, list[Span]]] = {}
    for shard in shards.values():
        for records, span in ((shard.train, shard.span), (shard.test, shard.test_span)):
            found.setdefault(id(records), (records, []))[1].append(span)
    return found


def _featured(features: nn.Module, inputs: Inputs, raw: Tensor) -> Tensor:
    """Public features of stored records."""
    batch = inputs(raw)
    if mixing(features, CLASSIFICATION, inputs, tuple(raw.shape[1:])) is None:
        made: Tensor = features(batch).flatten(1)
        return made
    return rows_of(lambda x: [features(x).flatten(1)], (batch,))
