"""Whose membership is guessed, and the statistics of each target that an adversary computes.

Where a method protects records, targets are records of one client; where it protects clients,
targets are clients. A target that is absent is replaced by nothing, as under zero-out adjacency.

Two statistics are computed of every target; both are larger where the target was there.
*Confidence* needs the published model alone: the logit of the probability of the true class, or
minus the loss. *Alignment* needs what the server sees: how much of what the target would contribute
is in it. The adversary knows the data, and neither coins nor noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfl.attacks.members.evidence import (
    Detector,
    arrived,
    batch_of,
    confidence,
    record_gradients,
    start_of,
    updates_without_noise,
)
from dpfl.attacks.observation import Observation, without
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.numerics.clipping import clip_factor
from dpfl.rounds import write_buffers
from dpfl.rounds.members import Member

MOST_KNOWN = 256
"""Other records of the client whose contribution stands for that of all of them."""


@dataclass(frozen=True, kw_only=True)
class RecordTargets:
    """Some training records of one client.

    ``places`` are their numbers. ``member`` holds all records of the client, in the form on which
    local work is done. With ``left_out`` an absent record is left out instead of being replaced by
    nothing: a method that protects nobody clips no record, and its model would not stay finite.
    """

    member: Member
    places: Tensor
    left_out: bool = False

    def __len__(self) -> int:
        return len(self.places)

    @property
    def clients(self) -> tuple[str, ...]:
        """The client that holds the targets."""
        return (self.member.id,)

    @property
    def _others(self) -> Tensor:
        """The numbers of records that are no targets."""
        free = torch.ones(self.member.shard.examples, dtype=torch.bool)
        free[self.places] = False
        return free.nonzero()[:, 0]

    def federation(self, whole: Federation, present: Tensor) -> Federation:
        """The ``whole`` federation without the targets that are not ``present``."""
        client = self.member.id
        shard = whole.shards[self.member.id]
        missing = torch.zeros(shard.examples, dtype=torch.bool)
        missing[self.places] = ~present
        if not self.left_out:
            return without(whole, {client: missing})
        tests = shard.test_features, shard.test_labels
        kept = Shard.of(shard.features[~missing], shard.labels[~missing], *tests)
        return replace(whole, shards={**whole.shards, client: kept})

    def confidence(self, seen: Observation) -> Tensor:
        """How sure the published model is of each target."""
        return confidence(seen, batch_of(self.member, self.places))

    def alignment(self, seen: Observation) -> Tensor:
        """How much of the targets' clipped gradients is in what the server sees.

        The gradients are those at the model that the client starts from.
        """
        client = self.member.id
        own = seen.simulation
        others = self._others
        used = others[:MOST_KNOWN]
        share = len(others) / max(1, len(used))
        batch = batch_of(self.member, torch.cat([self.places, used]))
        clips = [one.clip for one in own.agreement.phases(self.member.participant) if one.clip]
        detector = Detector(len(self))
        for round_ in seen.training:
            update = arrived(seen, round_, (client,)).get(client)
            if update is None:
                continue
            write_buffers(own.work.model, round_.state.buffers)
            start = start_of(round_, client)
            descents = -record_gradients(own.work.model, own.layout, start, batch)
            if clips:
                norms = torch.linalg.vector_norm(descents, dim=1, keepdim=True)
                descents *= clip_factor(norms, min(clips))
            known = descents[len(self) :].sum(dim=0) * share
            detector.add(descents[: len(self)], known, update)
        return detector.statistics()


@dataclass(frozen=True, kw_only=True)
class ClientTargets:
    """Whole clients, each with all of its records in the form on which local work is done."""

    members: Sequence[Member]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients themselves."""
        return tuple(member.id for member in self.members)

    def federation(self, whole: Federation, present: Tensor) -> Federation:
        """The ``whole`` federation in which clients that are not ``present`` send no change."""
        absent = [client for client, there in zip(self.clients, present, strict=True) if not there]
        sizes = {client: whole.shards[client].examples for client in absent}
        return without(whole, {c: torch.ones(n, dtype=torch.bool) for c, n in sizes.items()})

    def confidence(self, seen: Observation) -> Tensor:
        """How sure the published model is of each client's records, on average."""
        return torch.stack([confidence(seen, batch_of(one)).mean() for one in self.members])

    def alignment(self, seen: Observation) -> Tensor:
        """How well what the server sees is aligned with the clients' updates without noise.

        The adversary repeats local work on a candidate's records. Updates are clipped, so every
        round in which a client takes part counts alike.
        """
        products = torch.zeros(len(self), dtype=torch.float64)
        rounds = torch.zeros_like(products)
        places = {client: place for place, client in enumerate(self.clients)}
        for round_ in seen.training:
            came = arrived(seen, round_, self.clients)
            members = [one for one in self.members if one.id in came]
            updates = updates_without_noise(seen, round_, members)
            for member, update in zip(members, updates, strict=True):
                unit = update / torch.linalg.vector_norm(update).clamp_min(1e-30)
                products[places[member.id]] += unit @ came[member.id]
                rounds[places[member.id]] += 1
        return products / rounds.sqrt().clamp_min(1.0)


Targets = RecordTargets | ClientTargets
