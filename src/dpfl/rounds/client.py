"""The clients' part of a round, one path for everyone: a simulator, its workers, a Ray cluster
and a real site call :func:`client_round`. What differs is passed in: who charges, and where
secrets come from.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpfl.core.random import SecretRng
from dpfl.core.types import Downlink, Shared, Who
from dpfl.data.records import Records
from dpfl.engine.base import Engine, Job
from dpfl.rounds.codec import decode_download, encode_upload
from dpfl.rounds.enrol import Agreement
from dpfl.rounds.exchange import Uplink
from dpfl.rounds.members import Member
from dpfl.rounds.plans import Admission
from dpfl.rounds.release import release_answer, write_buffers
from dpfl.strategy import Strategy


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
    blocks: Sequence[Sequence[str]] | None = None,
) -> list[Uplink]:
    """One round of these members; the raw update never leaves this function.

    ``private`` holds the parts of the model that stay at the clients (PPSGD, CENTAUR); it is read,
    and replaced by what came of them. ``admit`` charges the members; left out, they were charged
    already, or are charged together with the answer. ``blocks`` are those of :func:`blocks_of`,
    where the members were cut into blocks before.
    """
    if not members:
        return []
    agreement = workshop.agreement
    private = {} if private is None else private
    payloads = {id(downloads[client]): downloads[client] for client in members}
    decoded = {i: decode_download(one, agreement.layout.size) for i, one in payloads.items()}
    common, *_ = decoded.values()  # downloads differ in where clients start, and in nothing else
    starts = {client: decoded[id(downloads[client])].start for client in members}
    round_ = common.round
    abstaining = {} if admit is None else admit(round_, members)
    active = {client: member for client, member in members.items() if client not in abstaining}
    rngs = {client: workshop.secret(round_, client) for client in active}
    write_buffers(workshop.model, common.shared.get("buffers", {}))
    sent: dict[str, Tensor] = {}
    if round_ < 0:
        for client, member in active.items():
            rng = rngs[client].child("release")
            asked = workshop.model, rng, common.drawn
            sent[client] = release_answer(agreement, round_, member, *asked)
    else:
        if blocks is None:
            blocks = blocks_of(agreement, active, workshop.engine)
        for block in blocks:
            own = [active[client] for client in block]
            sent |= _trained(workshop, own, common, starts, rngs, private)
    grid = agreement.upload_grid(round_, common.drawn)
    uplinks = [Uplink(client=c, payload=None, reason=why) for c, why in abstaining.items()]
    for client, message in sent.items():
        if agreement.strategy.secure and grid is not None:
            integers = grid.integers(message).to(torch.int64).numpy()
            agreement.sum_plan(round_, common.drawn).check_upload(integers, client)
        payload = encode_upload(message, workshop.run, round_, client, grid)
        uplinks.append(Uplink(client=client, payload=payload))
    return sorted(uplinks, key=lambda uplink: uplink.client)


def blocks_of(
    agreement: Agreement, members: Mapping[str, Member], engine: Engine
) -> list[list[str]]:
    """Cut members into the blocks that are computed together.

    A pure function of who takes part and of what they do: neither the number of workers nor the
    order in which they finish changes a bit of any result.
    """
    ids = sorted(members)
    if agreement.strategy.local.pooled:
        return [ids] if ids else []
    plans = [agreement.phases(members[client].participant) for client in ids]
    return [[ids[i] for i in block] for block in engine.blocks(plans)]


def _trained(
    workshop: Workshop,
    members: Sequence[Member],
    common: Downlink,
    starts: Mapping[str, Tensor],
    rngs: Mapping[str, SecretRng],
    private: MutableMapping[str, Tensor],
) -> dict[str, Tensor]:
    """Local work of one block, then client stages and the client's half of the channel.

    Clients of a block are computed together by the engine. A client with a personal part works on
    its own model; only the update of the shared part goes on from here.
    """
    agreement = workshop.agreement
    layout = workshop.agreement.layout
    strategy = agreement.strategy
    personal = agreement.strategy.personal
    jobs = []
    for member in members:
        start = starts[member.id]
        if personal is not None:
            start = personal.merge(start, private.get(member.id), layout)
        phases = strategy.local.in_cohort(agreement.phases(member.participant), common.drawn)
        jobs.append(
            Job(
                client=member.id,
                start=start,
                phases=tuple(phase.in_round(common.round) for phase in phases),
                features=member.shard.features,
                labels=member.shard.labels,
                rng=rngs[member.id].child("work"),
                inputs=member.inputs,
                task=member.task,
                live=member.shard.live,
                memory=member.shard.memory,
            )
        )
    pooled = [_pooled(jobs)] if strategy.local.pooled else jobs
    updates = []
    found = workshop.engine.run(workshop.model, layout, pooled)
    integers = strategy.local.grid(common.drawn)  # of local work that ends in them
    # What came of pooled records is everyone's.
    for job, after in zip(jobs, found if pooled is jobs else found * len(jobs), strict=True):
        start = starts[job.client]
        if personal is not None:
            after, private[job.client] = personal.split(start, job.start, after, layout)
        updates.append(after - start if integers is None else after * integers.step)
    who = [agreement.who(member.id, member.claims, common.drawn) for member in members]
    on_air = common.shared.get("channel", {})
    sent = {}
    for own, message in zip(who, staged(strategy, updates, common.shared, who, rngs), strict=True):
        sent[own.id] = strategy.channel.send(message, on_air, own, rngs[own.id].child("channel"))
    return sent


def _pooled(jobs: Sequence[Job]) -> Job:
    """One job on the records of all, as a curator whom all of them trust would do it."""
    first = jobs[0]
    phases = tuple(
        replace(one, rates=tuple(rate for job in jobs for rate in job.phases[number].rates))
        for number, one in enumerate(first.phases)
    )
    return replace(
        first,
        client=f"{first.client}' to '{jobs[-1].client}",
        phases=phases,
        features=torch.cat([job.features for job in jobs]),
        labels=torch.cat([job.labels for job in jobs]),
        live=_pooled_live(jobs),
    )


def _pooled_live(jobs: Sequence[Job]) -> Tensor | None:
    """Which of the records of all count; None where all do."""
    if all(job.live is None for job in jobs):
        return None
    return torch.cat([Records(job.features, job.labels, job.live).counted for job in jobs])


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
        together = shared.get(f"stage{number}", {})
        if stage.acts_on_rows:
            messages = list(stage.client_rows(torch.stack(messages), together))
            continue
        for i, client in enumerate(who):
            rng = rngs[client.id].child("stage", number)
            messages[i] = stage.client(messages[i], together, client, rng)
    return messages
