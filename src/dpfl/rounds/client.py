"""The clients' part of a round: each charges its own account, works, and sends only what was billed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor, nn

from dpfl.client.member import Member
from dpfl.core.random import SecretRng
from dpfl.core.types import Downlink, Observer, Who
from dpfl.privacy.bills import Charge
from dpfl.protocols import Engine, Job
from dpfl.rounds.agreement import Agreement, Plan, Run, Uplink
from dpfl.wire.payload import decode_download, encode_upload


def admit(agreement: Agreement, run: Run, round_: int, members: Mapping[str, Member]) -> dict[str, str]:
    """Each member checks and charges its own account, before any noise is drawn; returns who abstains, and why."""
    horizon = agreement.terms.rounds - round_
    charges = [
        Charge(
            account=member.id,
            observer=Observer.SERVER,
            bill=agreement.bill(Observer.SERVER, member.participant),
            draw=run.draw_token("client", round_, member.id),
        )
        for _, member in sorted(members.items())
    ]
    refused = run.ledger.charge(run.name, round_, charges, horizon=horizon)
    return dict.fromkeys(refused, "its budget does not cover another round")


def blocks_of(agreement: Agreement, members: Mapping[str, Member], engine: Engine) -> list[list[str]]:
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
    """Local work and client stages of members that were admitted; the raw update never leaves this function.

    ``private``: the parts of the model that stay at the clients (PPSGD, CENTAUR); read, and replaced by what came of them.
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
                    phase.in_round(downlinks[client].round) for phase in agreement.phases(members[client].participant)
                ),
                features=members[client].shard.features,
                labels=members[client].shard.labels,
                rng=rngs[client].child("work"),
                inputs=members[client].inputs,
            )
            for client in block
        ]
        for job, after in zip(jobs, engine.run(model, agreement.layout, jobs), strict=True):
            if personal is not None:
                shared = downlinks[job.client].start
                after, private[job.client] = personal.split(shared, job.start, after, agreement.layout)
            uplinks.append(
                _upload(agreement, run_name, members[job.client], downlinks[job.client], after, rngs[job.client])
            )
    return sorted(uplinks, key=lambda uplink: uplink.client)


def _upload(
    agreement: Agreement, run_name: str, member: Member, downlink: Downlink, after: Tensor, rng: SecretRng
) -> Uplink:
    message = after - downlink.start
    public = member.id in agreement.terms.public
    who = Who(id=member.id, claims=member.claims, drawn=downlink.drawn, public=public)
    for number, stage in enumerate(agreement.strategy.stages):
        shared = downlink.shared.get(f"stage{number}", {})
        message = stage.client(message, dict(shared), who, rng.child("stage", number))
    return Uplink(client=member.id, payload=encode_upload(message, run_name, downlink.round, member.id))


def client_rounds(
    agreement: Agreement,
    run: Run,
    plan: Plan,
    members: Mapping[str, Member],
    engine: Engine,
    model: nn.Module,
    private: MutableMapping[str, Tensor] | None = None,
) -> list[Uplink]:
    """Admit, then work: what a real site does with its one member, and a simulator with a whole cohort."""
    abstaining = admit(agreement, run, plan.round, members)
    active = {client: member for client, member in members.items() if client not in abstaining}
    downloads = {client: plan.downloads[client] for client in active}
    rngs = {client: run.secret("client", plan.round, client) for client in active}
    blocks = blocks_of(agreement, active, engine)
    uplinks = work(agreement, run.name, downloads, active, rngs, engine, model, blocks, private)
    return uplinks + [
        Uplink(client=client, payload=None, reason=reason) for client, reason in sorted(abstaining.items())
    ]
