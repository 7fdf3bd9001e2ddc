"""The clients' part of a round, one path for everyone: a simulator, its workers, a Ray cluster
and a real site call :func:`client_round`. What differs is passed in: who charges, and where
secrets come from.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl.core.random import SecretRng
from dpfl.core.types import Downlink, Observer, Shared, Who
from dpfl.engine.base import Engine, Job
from dpfl.privacy.costs import Charge
from dpfl.rounds.codec import decode_download, encode_upload
from dpfl.rounds.enrol import Agreement, Run, Uplink
from dpfl.rounds.members import Member
from dpfl.rounds.plans import plan_members
from dpfl.rounds.release import release_answer, write_buffers
from dpfl.strategy import Strategy

ABSTAINS = "its budget does not cover another round"
Admission = Callable[[int, Mapping[str, Member]], Mapping[str, str]]
"""Charges members for a round, before any noise is drawn; returns who abstains, and why."""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """What local work is done with: the agreement, the run's name, an engine and a model.

    ``secret`` makes the secret generator of a client for a round: from a simulation's seed, or from
    the operating system.
    """

    agreement: Agreement
    run: str
    engine: Engine
    model: nn.Module
    secret: Callable[[int, str], SecretRng]


def client_round(
    workshop: Workshop,
    downloads: Mapping[str, bytes],
    members: Mapping[str, Member],
    private: MutableMapping[str, Tensor] | None = None,
    *,
    admit: Admission | None = None,
) -> list[Uplink]:
    """One round of these members; the raw update never leaves this function.

    ``private`` holds the parts of the model that stay at the clients (PPSGD, CENTAUR); it is read,
    and replaced by what came of them. ``admit`` charges the members; left out, they were charged
    already, or are charged together with the answer.
    """
    if not members:
        return []
    private = {} if private is None else private
    decoded: dict[int, Downlink] = {}
    for client in members:
        payload = downloads[client]
        if id(payload) not in decoded:
            decoded[id(payload)] = decode_download(payload, workshop.agreement.layout.size)
    downlinks = {client: decoded[id(downloads[client])] for client in members}
    round_ = next(iter(downlinks.values())).round
    abstaining = {} if admit is None else admit(round_, members)
    active = {client: member for client, member in members.items() if client not in abstaining}
    rngs = {client: workshop.secret(round_, client) for client in active}
    uplinks = [Uplink(client=c, payload=None, reason=why) for c, why in abstaining.items()]
    if active:
        first = downlinks[next(iter(active))]
        write_buffers(workshop.model, first.shared.get("buffers", {}))
    if round_ < 0:
        uplinks += _releases(workshop, round_, active, rngs)
    else:
        for block in blocks_of(workshop.agreement, active, workshop.engine):
            own = [active[client] for client in block]
            uplinks += _trained(workshop, own, downlinks, rngs, private)
    return sorted(uplinks, key=lambda uplink: uplink.client)


def charging(agreement: Agreement, run: Run) -> Admission:
    """Charge members to the ledger of a run: what a simulation passes for ``admit``."""

    def admit(round_: int, members: Mapping[str, Member]) -> dict[str, str]:
        plans = {
            client: agreement.plan_against_server(member.participant)
            for client, member in members.items()
        }
        budgets = {client: member.budget for client, member in members.items()}
        plan_members(agreement, run, Observer.SERVER, plans, budgets)
        planned = run.planned(Observer.SERVER)
        charges = [
            Charge(
                account=client,
                observer=Observer.SERVER,
                cost=agreement.cost(Observer.SERVER, member.participant, round_),
                draw=run.draw_token("client", round_, client),
            )
            for client, member in sorted(members.items())
            if client in planned
        ]
        refused = run.ledger.charge(run.name, round_, charges)
        return dict.fromkeys([*refused, *(set(members) - set(planned))], ABSTAINS)

    return admit


def blocks_of(
    agreement: Agreement, members: Mapping[str, Member], engine: Engine
) -> list[list[str]]:
    """Cut members into the blocks that are computed together.

    A pure function of who takes part and of what they do: neither the number of workers nor the
    order in which they finish changes a bit of any result.
    """
    ids = sorted(members)
    plans = [agreement.phases(members[client].participant) for client in ids]
    return [[ids[i] for i in block] for block in engine.blocks(plans)]


def _releases(
    workshop: Workshop,
    round_: int,
    members: Mapping[str, Member],
    rngs: Mapping[str, SecretRng],
) -> list[Uplink]:
    """Answers to a release before round one."""
    uplinks = []
    for client, member in members.items():
        rng = rngs[client].child("release")
        answer = release_answer(workshop.agreement, round_, member, workshop.model, rng)
        payload = encode_upload(answer, workshop.run, round_, client)
        uplinks.append(Uplink(client=client, payload=payload))
    return uplinks


def _trained(
    workshop: Workshop,
    members: Sequence[Member],
    downlinks: Mapping[str, Downlink],
    rngs: Mapping[str, SecretRng],
    private: MutableMapping[str, Tensor],
) -> list[Uplink]:
    """Local work of one block, then client stages and the client's half of the channel.

    Clients of a block are computed together by the engine. A client with a personal part works on
    its own model; only the update of the shared part goes on from here.
    """
    agreement, personal = workshop.agreement, workshop.agreement.strategy.personal
    jobs = []
    for member in members:
        downlink = downlinks[member.id]
        start = downlink.start
        if personal is not None:
            start = personal.merge(start, private.get(member.id), agreement.layout)
        phases = agreement.phases(member.participant)
        jobs.append(
            Job(
                client=member.id,
                start=start,
                phases=tuple(phase.in_round(downlink.round) for phase in phases),
                features=member.shard.features,
                labels=member.shard.labels,
                rng=rngs[member.id].child("work"),
                inputs=member.inputs,
            )
        )
    updates = []
    results = workshop.engine.run(workshop.model, agreement.layout, jobs)
    for job, after in zip(jobs, results, strict=True):
        shared = downlinks[job.client].start
        if personal is not None:
            parts = personal.split(shared, job.start, after, agreement.layout)
            after, private[job.client] = parts
        updates.append(after - shared)
    return _sent(workshop, members, downlinks, updates, rngs)


def _sent(
    workshop: Workshop,
    members: Sequence[Member],
    downlinks: Mapping[str, Downlink],
    updates: list[Tensor],
    rngs: Mapping[str, SecretRng],
) -> list[Uplink]:
    strategy, public = workshop.agreement.strategy, workshop.agreement.terms.public
    who = [
        Who(id=m.id, claims=m.claims, drawn=downlinks[m.id].drawn, public=m.id in public)
        for m in members
    ]
    messages = staged(strategy, updates, downlinks[members[0].id].shared, who, rngs)
    uplinks = []
    for known, message in zip(who, messages, strict=True):
        downlink = downlinks[known.id]
        on_air, rng = dict(downlink.shared.get("channel", {})), rngs[known.id].child("channel")
        sent = strategy.channel.send(message, on_air, known, rng)
        grid = strategy.upload_grid(downlink.drawn)
        payload = encode_upload(sent, workshop.run, downlink.round, known.id, grid)
        uplinks.append(Uplink(client=known.id, payload=payload))
    return uplinks


def staged(
    strategy: Strategy,
    updates: Sequence[Tensor],
    shared: Mapping[str, Shared],
    who: Sequence[Who],
    rngs: Mapping[str, SecretRng],
) -> list[Tensor]:
    """Send updates through the client stages of a round; what needs no secret is done for all of
    them at once.
    """
    messages = list(updates)
    for number, stage in enumerate(strategy.stages):
        together = dict(shared.get(f"stage{number}", {}))
        if stage.acts_on_rows:
            messages = list(stage.client_rows(torch.stack(messages), together))
            continue
        for i, client in enumerate(who):
            rng = rngs[client.id].child("stage", number)
            messages[i] = stage.client(messages[i], together, client, rng)
    return messages
