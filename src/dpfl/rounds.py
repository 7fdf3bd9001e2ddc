"""A round: open (server), client, close (server). The simulator calls the three in a loop, a deployment across a network.

Order of a round: eligibility; draw the cohort; **charge, durably**; only then noise and local work; deliver; undo the
stages; clean, weigh, noise, denoise, step. A client that abstains, fails or is lost is an ordinary outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl.client.member import Member
from dpfl.core.errors import PeerError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import (
    Claims,
    Cohort,
    Downlink,
    Metrics,
    Observer,
    Phase,
    Record,
    Rows,
    Shared,
    State,
    Terms,
    Total,
    Unit,
    Who,
)
from dpfl.privacy.ledger import Bill, Charge, Ledger
from dpfl.protocols import Engine, Job, Participant, Summed
from dpfl.strategy import Strategy
from dpfl.wire.payload import FRAME_BYTES, decode_download, decode_upload, encode_download, encode_upload


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What enrolment settles: the strategy, its terms, the layout of the model, and what everyone said of themselves."""

    strategy: Strategy
    terms: Terms
    layout: Layout
    claims: Mapping[str, Claims]

    def phases(self, participant: Participant) -> tuple[Phase, ...]:
        """Plan a participant's local work for one round."""
        return self.strategy.local.phases(self.terms, participant)

    def bill(self, observer: Observer, participant: Participant) -> Bill:
        """What a round costs this participant against this observer."""
        return self.strategy.bill(observer, self.phases(participant), participant.examples, self.terms)

    @property
    def bills_world(self) -> bool:
        """Whether the world is billed apart: not where the guarantee is made before anything leaves a client."""
        return self.strategy.unit is Unit.CLIENT and self.strategy.observer is not Observer.NOBODY

    def bills(self, participant: Participant) -> list[tuple[Bill, frozenset[Observer]]]:
        """All bills of a round, each with those who see what it pays for."""
        server = self.bill(Observer.SERVER, participant)
        if not self.bills_world:
            return [(server, frozenset({Observer.SERVER, Observer.WORLD}))]
        world = self.bill(Observer.WORLD, participant)
        return [(server, frozenset({Observer.SERVER})), (world, frozenset({Observer.WORLD}))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which run this is, where it is charged, and where its randomness comes from (None: the operating system)."""

    name: str
    ledger: Ledger
    seed: PublicSeed | None
    public: PublicSeed

    def secret(self, *labels: str | int) -> SecretRng:
        """Make the secret generator for a named purpose: seeded in a simulation, fresh from the system otherwise."""
        return SecretRng.from_system() if self.seed is None else SecretRng.simulated(self.seed.child(*labels))

    def draw_token(self, *labels: str | int) -> str:
        """Name the randomness a charge pays for; empty where it cannot be repeated."""
        return "" if self.seed is None else f"{self.seed.child(*labels).value:x}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the server decided when it opened the round."""

    round: int
    cohort: Cohort
    downloads: Mapping[str, bytes]
    shared: Mapping[str, Shared]
    starts: Mapping[str, Tensor]
    unwilling: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """What came back from a client: bytes, or the reason why there are none."""

    client: str
    payload: bytes | None
    reason: str = ""


def enrol(strategy: Strategy, claims: Mapping[str, Claims], rounds: int, layout: Layout) -> Agreement:
    """Settle the terms once, from claims alone."""
    population = len(claims)
    rate = strategy.selection.rate(population)
    epsilons = [claim.epsilon for claim in claims.values() if claim.epsilon > 0] or [math.inf]
    terms = Terms(
        rounds=rounds,
        population=population,
        expected_cohort=rate * population,
        participations=math.ceil(rounds * rate - 1e-9),
        smallest_epsilon=min(epsilons),
        largest_epsilon=max(epsilons),
    )
    terms = strategy.local.agree(terms, claims)
    for _, plug in strategy.slots():
        terms = plug.agree(terms, claims)
    return Agreement(strategy=strategy, terms=terms, layout=layout, claims=dict(claims))


def first_state(agreement: Agreement, model: Tensor) -> State:
    """Return the state before the first round."""
    plugs = {slot: plug.start(agreement.terms, agreement.layout) for slot, plug in agreement.strategy.slots()}
    return State(round=0, model=model, plugs=plugs)


# ---- open: the server -----------------------------------------------------------------------------------------------


def open_round(agreement: Agreement, state: State, run: Run, willing: Callable[[str], bool]) -> Plan:
    """Draw the cohort among the willing, charge the world's bill, and write one download per client.

    ``willing`` asks a client whether it can afford the round; the server itself knows no true budget.
    """
    strategy, terms = agreement.strategy, agreement.terms
    seed = run.public.child("round", state.round)
    candidates = sorted(agreement.claims)
    drawn: list[str] = []
    unwilling: list[str] = []
    size = strategy.selection.cohort_size(terms.population)
    for client in strategy.selection.order(candidates, seed.child("cohort")):
        if size is not None and len(drawn) == size:
            break
        (drawn if willing(client) else unwilling).append(client)
    over = not drawn and not any(willing(client) for client in candidates)
    if over:
        nothing = Cohort(ids=(), claims={})
        everyone = tuple(candidates)
        return Plan(
            round=state.round, cohort=nothing, downloads={}, shared={}, starts={}, unwilling=everyone, over=True
        )
    cohort = Cohort.of({client: agreement.claims[client] for client in drawn})
    _charge_world(
        agreement, run, state.round, cohort, [c for c in candidates if willing(c)] if _amplified(strategy) else []
    )
    shared = {}
    for slot, plug in strategy.slots():
        tensors = plug.open(dict(state.plugs.get(slot, {})), state.round, cohort, seed.child(slot))
        if tensors:
            shared[slot] = tensors
    common = encode_download(Downlink(round=state.round, start=state.model, shared=shared, drawn=len(cohort)))
    downloads = {}
    for client in cohort.ids:
        start = state.starts.get(client)
        if start is None:
            downloads[client] = common
        else:
            downloads[client] = encode_download(
                Downlink(round=state.round, start=start, shared=shared, drawn=len(cohort))
            )
    starts = {client: state.starts[client] for client in cohort.ids if client in state.starts}
    return Plan(
        round=state.round,
        cohort=cohort,
        downloads=downloads,
        shared=shared,
        starts=starts,
        unwilling=tuple(sorted(unwilling)),
    )


def _amplified(strategy: Strategy) -> bool:
    return strategy.observer is Observer.WORLD and strategy.amplifies(Observer.WORLD)


def _charge_world(agreement: Agreement, run: Run, round_: int, cohort: Cohort, eligible: list[str]) -> None:
    """Charge what the world will see, where that is not simply what the server sees.

    An amplified bill is charged to everyone eligible, drawn or not: the sampling is in the bill already.
    """
    if not agreement.bills_world:
        return
    bill = agreement.strategy.bill(Observer.WORLD, (), 1, agreement.terms)
    accounts = [run.ledger.population(eligible)] if eligible else list(cohort.ids)
    token = run.draw_token("central", round_)
    charges = [Charge(account=account, observer=Observer.WORLD, bill=bill, draw=token) for account in accounts]
    refused = run.ledger.charge(run.name, round_, charges)
    if refused:
        raise PrivacyRefusal(
            f"round {round_}", f"'{min(refused)}' was drawn but cannot pay", "ask willing() before drawing"
        )


# ---- client: the sites ----------------------------------------------------------------------------------------------


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
) -> list[Uplink]:
    """Local work and client stages of members that were admitted; the raw update never leaves this function."""
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
                start=downlinks[client].start,
                phases=agreement.phases(members[client].participant),
                features=members[client].shard.features,
                labels=members[client].shard.labels,
                rng=rngs[client].child("work"),
            )
            for client in block
        ]
        for job, after in zip(jobs, engine.run(model, agreement.layout, jobs), strict=True):
            uplinks.append(
                _upload(agreement, run_name, members[job.client], downlinks[job.client], after, rngs[job.client])
            )
    return sorted(uplinks, key=lambda uplink: uplink.client)


def _upload(
    agreement: Agreement, run_name: str, member: Member, downlink: Downlink, after: Tensor, rng: SecretRng
) -> Uplink:
    message = after - downlink.start
    who = Who(id=member.id, claims=member.claims, drawn=downlink.drawn)
    for number, stage in enumerate(agreement.strategy.stages):
        shared = downlink.shared.get(f"stage{number}", {})
        message = stage.client(message, dict(shared), who, rng.child("stage", number))
    return Uplink(client=member.id, payload=encode_upload(message, run_name, downlink.round, member.id))


def client_rounds(
    agreement: Agreement, run: Run, plan: Plan, members: Mapping[str, Member], engine: Engine, model: nn.Module
) -> list[Uplink]:
    """Admit, then work: what a real site does with its one member, and a simulator with a whole cohort."""
    abstaining = admit(agreement, run, plan.round, members)
    active = {client: member for client, member in members.items() if client not in abstaining}
    downloads = {client: plan.downloads[client] for client in active}
    rngs = {client: run.secret("client", plan.round, client) for client in active}
    blocks = blocks_of(agreement, active, engine)
    uplinks = work(agreement, run.name, downloads, active, rngs, engine, model, blocks)
    return uplinks + [
        Uplink(client=client, payload=None, reason=reason) for client, reason in sorted(abstaining.items())
    ]


# ---- close: the server ----------------------------------------------------------------------------------------------


def close_round(
    agreement: Agreement, state: State, plan: Plan, uplinks: Sequence[Uplink], run: Run
) -> tuple[State, Record]:
    """Take what arrived, make the next model, and write down what happened."""
    strategy = agreement.strategy
    messages, missing, broken = _unpack(agreement, plan, uplinks, run)
    seed = run.public.child("round", state.round, "channel")
    arrived = strategy.channel.deliver(messages, dict(plan.shared.get("channel", {})), seed) if messages else {}
    ids = arrived.ids if isinstance(arrived, Summed) else tuple(sorted(arrived))
    missing.update({client: "lost on the way" for client in messages if client not in ids})
    cohort = Cohort.of({client: plan.cohort.claims[client] for client in ids})
    received: Rows | Total = (
        _total(agreement, plan, cohort, arrived)
        if isinstance(arrived, Summed)
        else _rows(agreement, state, plan, cohort, arrived)
    )
    if isinstance(received, Rows):
        received, unusable = _without_non_finite(received)
        broken.extend(unusable)
    operator: dict[str, object] = {
        "cohort": list(plan.cohort.ids),
        "arrived": list(ids),
        "missing": missing,
        "left": list(plan.unwilling),
        "not_finite": sorted(broken),
        "bytes_up": sum(len(u.payload) for u in uplinks if u.payload is not None),
        "payload_bytes_up": sum(len(u.payload) - FRAME_BYTES for u in uplinks if u.payload is not None),
        "bytes_down": sum(map(len, plan.downloads.values())),
    }
    enough = len(ids) >= strategy.shares_needed(agreement.terms)
    if (ids or strategy.central_noise is not None) and enough:
        model, plugs, told = _aggregate(agreement, state, received, run)
        operator |= told
    else:
        model, plugs = state.model, dict(state.plugs)
        operator["published"] = "nothing: too few uploads arrived"
    public = {"round": state.round}
    next_state = State(round=state.round + 1, model=model, plugs=plugs)
    return next_state, Record(round=state.round, operator=operator, public=public)


def _unpack(
    agreement: Agreement, plan: Plan, uplinks: Sequence[Uplink], run: Run
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Decode each upload once; whatever is not as agreed counts as missing, and says why."""
    messages: dict[str, Tensor] = {}
    missing = dict.fromkeys(plan.cohort.ids, "no answer")
    broken: list[str] = []
    length = None if agreement.strategy.stages else agreement.layout.size
    for uplink in uplinks:
        if uplink.client not in missing or uplink.client in messages:
            raise PeerError(
                f"upload of '{uplink.client}'",
                "was not asked for, or came twice",
                "send each upload once, to its own round",
            )
        if uplink.payload is None:
            missing[uplink.client] = uplink.reason
            continue
        try:
            messages[uplink.client] = decode_upload(uplink.payload, length, run.name, plan.round, uplink.client)
        except PeerError as error:
            missing[uplink.client] = str(error)
            continue
        missing[uplink.client] = ""
    if not agreement.strategy.channel.sees_rows:
        for client, message in messages.items():
            if not bool(torch.isfinite(message).all()):  # nobody could take it out of a sum again
                messages[client] = torch.zeros_like(message)
                broken.append(client)
    return messages, {client: reason for client, reason in missing.items() if reason}, broken


def _undo(agreement: Agreement, plan: Plan, message: Tensor, who: Who | None) -> Tensor:
    for number, stage in reversed(list(enumerate(agreement.strategy.stages))):
        message = stage.server(message, dict(plan.shared.get(f"stage{number}", {})), who)
    return message


def _rows(agreement: Agreement, state: State, plan: Plan, cohort: Cohort, arrived: Mapping[str, Tensor]) -> Rows:
    """Undo the stages and re-base every row on the global model, wherever its client started."""
    matrix = torch.zeros(len(cohort), agreement.layout.size)
    for i, client in enumerate(cohort.ids):
        who = Who(id=client, claims=cohort.claims[client], drawn=len(plan.cohort))
        matrix[i] = _undo(agreement, plan, arrived[client], who)
        if client in plan.starts:
            matrix[i] += plan.starts[client] - state.model
    return Rows(matrix=matrix, origin=state.model, cohort=cohort, layout=agreement.layout)


def _total(agreement: Agreement, plan: Plan, cohort: Cohort, arrived: Summed) -> Total:
    return Total(vector=_undo(agreement, plan, arrived.vector, None), cohort=cohort, layout=agreement.layout)


def _without_non_finite(rows: Rows) -> tuple[Rows, list[str]]:
    """An update that is not finite contributes zero; only the person running the server is told whose it was."""
    finite = torch.isfinite(rows.matrix).all(dim=1)
    if bool(finite.all()):
        return rows, []
    matrix = torch.where(finite[:, None], rows.matrix, torch.zeros_like(rows.matrix))
    names = [client for client, good in zip(rows.cohort.ids, finite.tolist(), strict=True) if not good]
    return Rows(matrix=matrix, origin=rows.origin, cohort=rows.cohort, layout=rows.layout), names


def _aggregate(
    agreement: Agreement, state: State, received: Rows | Total, run: Run
) -> tuple[Tensor, dict[str, dict[str, Tensor]], dict[str, object]]:
    strategy = agreement.strategy
    plugs = {slot: dict(tensors) for slot, tensors in state.plugs.items()}
    metrics: dict[str, Metrics] = {}
    for number, stage in enumerate(strategy.stages):
        plugs[f"stage{number}"] = stage.learn(plugs.get(f"stage{number}", {}), received)
    # clean
    if strategy.clean is not None and isinstance(received, Rows):
        matrix, plugs["clean"], metrics["clean"] = strategy.clean(plugs.get("clean", {}), received, state.round)
        received = Rows(matrix=matrix, origin=received.origin, cohort=received.cohort, layout=received.layout)
    # weigh
    weights, plugs["weights"], metrics["weights"] = strategy.weights(plugs.get("weights", {}), received, state.round)
    if isinstance(received, Rows):
        aggregate = weights @ received.matrix
    else:
        aggregate = (weights[0] if len(weights) else 0.0) * received.vector
    # central noise, denoise, step
    if strategy.central_noise is not None:
        bound = strategy.published_bound(strategy.local.exposure((), 1), agreement.terms)
        aggregate = strategy.central_noise.add(aggregate, bound, run.secret("central", state.round))
    for denoiser in strategy.denoise:
        aggregate = denoiser(aggregate, agreement.layout)
    told: dict[str, object] = {
        "weights": {client: float(w) for client, w in zip(received.cohort.ids, weights.tolist(), strict=True)},
        "update_norm": float(torch.linalg.vector_norm(aggregate)),
        **{f"{slot}_metrics": told for slot, told in metrics.items() if told},
    }
    return strategy.step(state.model, aggregate), plugs, told
