"""Close a round: the server takes what arrived, makes the next model, and writes down what
happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpfl.core.errors import PeerError
from dpfl.core.types import Aggregate, Cohort, Metrics, PlugState, Rows, State, Total, Who
from dpfl.engine.process import one_thread
from dpfl.plugs.channels import Summed, summed
from dpfl.rounds.client import staged
from dpfl.rounds.codec import FRAME_BYTES, decode_upload
from dpfl.rounds.enrol import Agreement, Plan, Run, Uplink
from dpfl.rounds.record import RoundRecord
from dpfl.rounds.release import combined


@one_thread()  # the same bits on every machine, and no fight over cores
def close_round(
    agreement: Agreement, state: State, plan: Plan, uplinks: Sequence[Uplink], run: Run
) -> tuple[State, RoundRecord]:
    """Take what arrived, make the next model, and write down what happened."""
    strategy = agreement.strategy
    messages, missing, broken = _unpack(agreement, plan, uplinks, run)
    record = RoundRecord(
        round=state.round,
        cohort=plan.cohort.ids,
        arrived=tuple(sorted(messages)),
        missing=missing,
        left=plan.unwilling,
        not_finite=tuple(sorted(broken)),
        bytes_up=sum(len(u.payload) for u in uplinks if u.payload is not None),
        payload_bytes_up=sum(
            len(u.payload) - FRAME_BYTES for u in uplinks if u.payload is not None
        ),
        bytes_down=sum(map(len, plan.downloads.values())),
    )
    if state.round < 0:
        kept = {client: m for client, m in messages.items() if client not in broken}
        state, metrics = combined(agreement, state, plan.cohort, kept)
        slot = f"release{record.round - agreement.first_round}"
        return state, replace(record, metrics={slot: metrics}, published=bool(kept))
    seed = run.public.child("round", state.round, "channel")
    on_air = dict(plan.shared.get("channel", {}))
    noise = run.secret("channel", state.round)
    arrived = strategy.channel.deliver(messages, on_air, seed, noise) if messages else {}
    if strategy.sums_only and isinstance(arrived, dict):
        # What is published depends on the sum alone: it is added up exactly, not row by row in
        # single precision.
        arrived = summed(arrived) if arrived else Summed(vector=_nothing(agreement, plan), ids=())
    ids = arrived.ids if isinstance(arrived, Summed) else tuple(sorted(arrived))
    missing.update({client: "lost on the way" for client in messages if client not in ids})
    # An upload that is not finite was replaced by zero: it carries no noise either.
    without_noise = sorted((set(plan.cohort.ids) - set(ids)) | set(broken))
    if agreement.amplified and isinstance(arrived, Summed):
        stand_ins = _stand_ins(agreement, plan, without_noise, run)
        arrived = replace(
            arrived, vector=arrived.vector + sum(stand_ins, torch.zeros_like(arrived.vector))
        )
    cohort = Cohort.of({client: plan.cohort.claims[client] for client in ids})
    received: Rows | Total = (
        _total(agreement, plan, cohort, arrived)
        if isinstance(arrived, Summed)
        else _rows(agreement, state, plan, cohort, arrived)
    )
    if isinstance(received, Rows):
        received, unusable = _without_non_finite(received)
        broken.extend(unusable)
    on_air_metrics = {"channel": strategy.channel.metrics(on_air)} if on_air else {}
    record = replace(
        record,
        arrived=ids,
        missing=missing,
        not_finite=tuple(sorted(broken)),
        metrics=on_air_metrics,
    )
    shares = len(plan.cohort) - len(without_noise)
    enough = shares >= strategy.shares_needed(agreement.terms, len(plan.cohort))
    if agreement.amplified or (enough and (ids or strategy.central_noise is not None)):
        return _aggregate(agreement, state, received, run, record)
    unchanged = replace(state, round=state.round + 1, starts={})
    return unchanged, replace(record, published=False)


def _unpack(
    agreement: Agreement, plan: Plan, uplinks: Sequence[Uplink], run: Run
) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Decode each upload once; whatever is not as agreed counts as missing, and says why."""
    messages: dict[str, Tensor] = {}
    missing = dict.fromkeys(plan.cohort.ids, "no answer")
    broken: list[str] = []
    length = None if agreement.strategy.stages else agreement.layout.size
    grid = agreement.strategy.upload_grid(max(1, len(plan.cohort)))
    if plan.round < 0:
        release = agreement.release(plan.round)
        length, grid = release.numbers(agreement.buffer_shapes[release.into]), None
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
            messages[uplink.client] = decode_upload(
                uplink.payload, length, run.name, plan.round, uplink.client, grid
            )
            if length is None and agreement.strategy.channel.sees_rows:
                _check_undone(agreement, plan, uplink.client, messages[uplink.client])
        except PeerError as error:
            messages.pop(uplink.client, None)
            missing[uplink.client] = str(error)
            continue
        missing[uplink.client] = ""
    rows = agreement.strategy.channel.sees_rows and not agreement.strategy.sums_only
    if plan.round < 0 or not rows:
        for client, message in messages.items():
            if not bool(torch.isfinite(message).all()):  # nobody could take it out of a sum again
                messages[client] = torch.zeros_like(message)
                broken.append(client)
    return messages, {client: reason for client, reason in missing.items() if reason}, broken


def _check_undone(agreement: Agreement, plan: Plan, client: str, message: Tensor) -> None:
    """Refuse a message that the stages' server halves cannot turn back into an update."""
    try:
        length = len(_undo(agreement, plan, message, _who(agreement, plan, client)))
    except (RuntimeError, IndexError):
        length = -1
    if length != agreement.layout.size:
        raise PeerError(
            f"upload of '{client}'", f"{len(message)} numbers are not what was agreed", "send those"
        )


def _who(agreement: Agreement, plan: Plan, client: str) -> Who:
    public = client in agreement.terms.public
    return Who(id=client, claims=plan.cohort.claims[client], drawn=len(plan.cohort), public=public)


def _undo(agreement: Agreement, plan: Plan, message: Tensor, who: Who | None) -> Tensor:
    for number, stage in reversed(list(enumerate(agreement.strategy.stages))):
        message = stage.server(message, dict(plan.shared.get(f"stage{number}", {})), who)
    return message


def _rows(
    agreement: Agreement, state: State, plan: Plan, cohort: Cohort, arrived: Mapping[str, Tensor]
) -> Rows:
    """Undo the stages and re-base every row on the global model, wherever its client started."""
    matrix = torch.zeros(len(cohort), agreement.layout.size)
    for i, client in enumerate(cohort.ids):
        matrix[i] = _undo(agreement, plan, arrived[client], _who(agreement, plan, client))
        if client in plan.starts:
            matrix[i] += plan.starts[client] - state.model
    return Rows(matrix=matrix, origin=state.model, cohort=cohort, layout=agreement.layout)


def _total(agreement: Agreement, plan: Plan, cohort: Cohort, arrived: Summed) -> Total:
    grid = agreement.strategy.upload_grid(max(1, len(plan.cohort)))
    # A sum of multiples of one step is one: what double precision lost on the way is put right.
    vector = arrived.vector if grid is None else grid.integers(arrived.vector).mul_(grid.step)
    return Total(
        vector=_undo(agreement, plan, vector, None), cohort=cohort, layout=agreement.layout
    )


def _stand_ins(agreement: Agreement, plan: Plan, absent: Sequence[str], run: Run) -> list[Tensor]:
    """What drawn clients that sent nothing would have sent had their updates been zero: their noise
    alone.

    Where the secrecy of the draw is counted on, a round that is not published, or that carries less
    noise, would tell that one of them was drawn, and a round that is published that none was. With
    stand-ins a client that says it is willing and then fails is a client whose update is zero, and
    the charge for the draw holds as it stands.
    """
    who = [_who(agreement, plan, client) for client in absent]
    rngs = {client: run.secret("stand-in", plan.round, client) for client in absent}
    zeros = [torch.zeros(agreement.layout.size)] * len(absent)
    return (
        [m.to(torch.float64) for m in staged(agreement.strategy, zeros, plan.shared, who, rngs)]
        if absent
        else []
    )


def _nothing(agreement: Agreement, plan: Plan) -> Tensor:
    """The sum of no messages: as long as a client's would have been."""
    message = torch.zeros(agreement.layout.size)
    for number, stage in enumerate(agreement.strategy.stages):
        if stage.acts_on_rows:
            message = stage.client_rows(message[None], dict(plan.shared.get(f"stage{number}", {})))[
                0
            ]
    return message.to(torch.float64)


def _without_non_finite(rows: Rows) -> tuple[Rows, list[str]]:
    """An update that is not finite contributes zero; only the person running the server is told
    whose it was.
    """
    finite = torch.isfinite(rows.matrix).all(dim=1)
    if bool(finite.all()):
        return rows, []
    matrix = torch.where(finite[:, None], rows.matrix, torch.zeros_like(rows.matrix))
    names = [
        client for client, good in zip(rows.cohort.ids, finite.tolist(), strict=True) if not good
    ]
    return Rows(matrix=matrix, origin=rows.origin, cohort=rows.cohort, layout=rows.layout), names


def _aggregate(
    agreement: Agreement, state: State, received: Rows | Total, run: Run, record: RoundRecord
) -> tuple[State, RoundRecord]:
    """Clean, weigh, add central noise, denoise, step."""
    strategy = agreement.strategy
    plugs = {slot: dict(state.plugs.get(slot, {})) for slot, _ in strategy.slots()}
    metrics: dict[str, Metrics] = {}
    for number, stage in enumerate(strategy.stages):
        plugs[f"stage{number}"] = stage.learn(plugs[f"stage{number}"], received)
    # clean
    if strategy.clean is not None and isinstance(received, Rows):
        matrix, plugs["clean"], metrics["clean"] = strategy.clean(
            plugs["clean"], received, state.round
        )
        received = Rows(
            matrix=matrix, origin=received.origin, cohort=received.cohort, layout=received.layout
        )
    starts = _personal_starts(agreement, state, received)
    # weigh, central noise
    weights, plugs["weights"], metrics["weights"] = strategy.weights(
        plugs["weights"], received, state.round
    )
    if isinstance(received, Rows):
        vector, noise = weights @ received.matrix, None
    else:
        weight = _weight_of_sum(agreement, weights)
        vector, noise = _noisy_total(agreement, received, weight, plugs, metrics, run, state.round)
    # denoise, step
    aggregate = Aggregate(
        vector=vector, model=state.model, layout=agreement.layout, round=state.round
    )
    for slot, denoiser in ((f"denoise{n}", d) for n, d in enumerate(strategy.denoise)):
        if noise is not None and denoiser.linear:  # what is left of the noise
            noise = denoiser(plugs[slot], replace(aggregate, vector=noise))[0]
            metrics["noise"]["norm_after"] = float(torch.linalg.vector_norm(noise))
        vector, plugs[slot], metrics[slot] = denoiser(plugs[slot], aggregate)
        aggregate = replace(aggregate, vector=vector)
    model, plugs["step"], metrics["step"] = strategy.step(plugs["step"], aggregate)
    weighed = zip(received.cohort.ids, weights.tolist(), strict=True)
    record = replace(
        record,
        weights={client: float(weight) for client, weight in weighed},
        update_norm=float(torch.linalg.vector_norm(aggregate.vector)),
        metrics={**record.metrics, **{slot: own for slot, own in metrics.items() if own}},
    )
    moved = replace(state, round=state.round + 1, model=model, starts=starts, plugs=plugs)
    return moved, record


def _weight_of_sum(agreement: Agreement, weights: Tensor) -> float:
    """The one weight of a sum: a constant that the cost rests on, or the mean's."""
    if agreement.strategy.weights.constant:
        return agreement.strategy.weights.value(agreement.terms)
    return float(weights[0]) if len(weights) else 0.0


def _noisy_total(
    agreement: Agreement,
    received: Total,
    weight: float,
    plugs: dict[str, PlugState],
    metrics: dict[str, Metrics],
    run: Run,
    round_: int,
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum, with central noise where the strategy has it; and that noise, for the
    operator's record.
    """
    central, total = agreement.strategy.central_noise, received.vector.to(torch.float64)
    if central is None:
        return (weight * total).to(torch.float32), None
    bound = agreement.strategy.contribution_bound(agreement.terms)
    secret = run.secret("central", round_)
    noisy, plugs["noise"], found = central.add(plugs["noise"], total, bound, secret)
    numbers = ((k, v) for k, v in found.items() if isinstance(v, int | float))
    metrics["noise"] = {**found, **{name: weight * value for name, value in numbers}}
    noise = (weight * (noisy - total)).to(torch.float32)
    return (weight * noisy).to(torch.float32), noise


def _personal_starts(
    agreement: Agreement, state: State, received: Rows | Total
) -> dict[str, Tensor]:
    """Where each client of the cohort starts next time, if its cleaned row says so; everyone else
    from the common model.
    """
    clean = agreement.strategy.clean
    if clean is None or not isinstance(received, Rows) or not clean.personal_starts(state.round):
        return {}
    rows = received.origin + received.matrix
    return {client: rows[i].clone() for i, client in enumerate(received.cohort.ids)}
