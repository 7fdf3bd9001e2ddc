"""The clients' part of a round: each charges its own account, works, and sends only what was
billed.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from dpfl.core.random import SecretRng
from dpfl.core.types import Downlink, Observer, Shared, Who
from dpfl.engine.base import Engine, Job
from dpfl.privacy.costs import Charge
from dpfl.rounds.codec import decode_download, encode_upload
from dpfl.rounds.enrol import Agreement, Plan, Run, Uplink
from dpfl.rounds.members import Member
from dpfl.rounds.plans import plan_members
from dpfl.strategy import Strategy


def admit(
    agreement: Agreement, run: Run, round_: int, members: Mapping[str, Member]
) -> dict[str, str]:
    """Each member checks and charges its own account, before any noise is drawn; returns who
    abstains, and why.
    """
    costs = {
        client: agreement.cost_against_server(member.participant)
        for client, member in members.items()
    }
    plan_members(
        agreement,
        run,
        Observer.SERVER,
        costs,
        {client: member.budget for client, member in members.items()},
    )
    planned = run.planned(Observer.SERVER)
    charges = [
        Charge(
            account=member.id,
            observer=Observer.SERVER,
            cost=agreement.cost(Observer.SERVER, member.participant),
            draw=run.draw_token("client", round_, member.id),
        )
        for client, member in sorted(members.items())
        if client in planned
    ]
    refused = run.ledger.charge(run.name, round_, charges)
    return dict.fromkeys(
        [*refused, *(set(members) - set(planned))], "its budget does not cover another round"
    )


def blocks_of(
    agreement: Agreement, members: Mapping[str, Member], engine: Engine
) -> list[list[str]]:
    """Cut members into the blocks that are computed together: a pure function of who takes part."""
    ids = sorted(members)
    plans = [agreement.phases(members[client].participant) for client in ids]
    return [[ids[i] for i in block] for block in engine.blocks(plans)]


def work(
    agreement: Agreement,
    run_name: str,
    downloads: Mapping[str, bytes],
    members: Mapping[str, Member],
    rngs: Mapping[str, SecretRng],
    engine: Engine,
    model: nn.Module,
    blocks: Sequence[Sequence[str]],
    private: MutableMapping[str, Tensor] | None = None,
) -> list[Uplink]:
    """Local work and client stages of members that were admitted; the raw update never leaves this
    function.

    ``private``: the parts of the model that stay at the clients (PPSGD, CENTAUR); read, and
    replaced by what came of them.
    """
    personal, private = agreement.strategy.personal, {} if private is None else private
    decoded: dict[int, Downlink] = {}
    downlinks = {}
    for client, payload in downloads.items():
        if id(payload) not in decoded:
            decoded[id(payload)] = decode_download(payload, agreement.layout.size)
        downlinks[client] = decoded[id(payload)]
    uplinks = []
    for block in blocks:
        jobs = [
            Job(
                client=client,
                start=downlinks[client].start
                if personal is None
                else personal.merge(downlinks[client].start, private.get(client), agreement.layout),
                phases=tuple(
                    phase.in_round(downlinks[client].round)
                    for phase in agreement.phases(members[client].participant)
                ),
                features=members[client].shard.features,
                labels=members[client].shard.labels,
                rng=rngs[client].child("work"),
                inputs=members[client].inputs,
            )
            for client in block
        ]
        updates = []
        for job, after in zip(jobs, engine.run(model, agreement.layout, jobs), strict=True):
            shared = downlinks[job.client].start
            if personal is not None:
                after, private[job.client] = personal.split(
                    shared, job.start, after, agreement.layout
                )
            updates.append(after - shared)
        uplinks += _uploads(
            agreement, run_name, [members[client] for client in block], downlinks, updates, rngs
        )
    return sorted(uplinks, key=lambda uplink: uplink.client)


def _uploads(
    agreement: Agreement,
    run_name: str,
    members: Sequence[Member],
    downlinks: Mapping[str, Downlink],
    messages: list[Tensor],
    rngs: Mapping[str, SecretRng],
) -> list[Uplink]:
    """Client stages, and the client's half of the channel; what needs no secret is done for all
    members at once.
    """
    strategy = agreement.strategy
    who = [
        Who(
            id=m.id,
            claims=m.claims,
            drawn=downlinks[m.id].drawn,
            public=m.id in agreement.terms.public,
        )
        for m in members
    ]
    messages = staged(strategy, messages, downlinks[members[0].id].shared, who, rngs)
    uplinks = []
    for member, known, message in zip(members, who, messages, strict=True):
        downlink = downlinks[member.id]
        sent = strategy.channel.send(
            message, _shared(downlink, "channel"), known, rngs[member.id].child("channel")
        )
        grid = strategy.upload_grid(downlink.drawn)
        payload = encode_upload(sent, run_name, downlink.round, member.id, grid)
        uplinks.append(Uplink(client=member.id, payload=payload))
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
            messages[i] = stage.client(
                messages[i], together, client, rngs[client.id].child("stage", number)
            )
    return messages


def _shared(downlink: Downlink, slot: str) -> Shared:
    return dict(downlink.shared.get(slot, {}))


def client_rounds(
    agreement: Agreement,
    run: Run,
    plan: Plan,
    members: Mapping[str, Member],
    engine: Engine,
    model: nn.Module,
    private: MutableMapping[str, Tensor] | None = None,
) -> list[Uplink]:
    """Admit, then work: what a real site does with its one member, and a simulator with a whole
    cohort.
    """
    abstaining = admit(agreement, run, plan.round, members)
    active = {client: member for client, member in members.items() if client not in abstaining}
    downloads = {client: plan.downloads[client] for client in active}
    rngs = {client: run.secret("client", plan.round, client) for client in active}
    blocks = blocks_of(agreement, active, engine)
    uplinks = work(agreement, run.name, downloads, active, rngs, engine, model, blocks, private)
    return uplinks + [
        Uplink(client=client, payload=None, reason=reason)
        for client, reason in sorted(abstaining.items())
    ]
