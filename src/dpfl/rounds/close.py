"""Close a round: the server takes what arrived, makes the next model, and writes down what
happened.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpfl.core.threads import one_thread
from dpfl.core.types import State
from dpfl.rounds.aggregate import aggregate
from dpfl.rounds.arrival import Arrival
from dpfl.rounds.codec import FRAME_BYTES
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.exchange import Plan, Uplink
from dpfl.rounds.open import shared_with
from dpfl.rounds.record import RoundRecord
from dpfl.rounds.release import combined, combined_sum
from dpfl.rounds.sums import SumOfUploads


@one_thread()  # the same bits on every machine, and no fight over cores
def close_round(
    agreement: Agreement,
    state: State,
    plan: Plan,
    uplinks: Sequence[Uplink],
    run: Run,
    *,
    total: SumOfUploads | None = None,
) -> tuple[State, RoundRecord]:
    """Take what arrived, make the next model, and write down what happened.

    ``plan`` is what :func:`open_round` decided, ``uplinks`` what came back, in any order; a
    client of the cohort without one counts as silent. Returned are the state to go on with and
    the operator's record, which names clients and must not reach an adversary against whom
    sampling amplifies.

    ``total`` is what a deployed secure sum has left: the sum of the integers of some clients. No
    upload is decoded then; uplinks say why clients are missing, and how many bytes have come.

    Uploads that are not as agreed, and those that are not finite, count as missing or as zero; the
    operator's record names them, nothing that is published does. Where too few arrived to carry the
    noise that was charged, the model stays as it was.
    """
    if not plan.cohort.ids:  # a server that comes back finds no download that says what was shared
        plan = replace(plan, shared=shared_with(agreement, state, run, plan.cohort))
    arrival = Arrival.of(agreement, plan, uplinks, run, total)
    sent = [len(uplink.payload) for uplink in uplinks if uplink.payload is not None]
    record = RoundRecord(
        round=state.round,
        cohort=plan.cohort.ids,
        left=plan.unwilling,
        bytes_up=sum(sent),
        payload_bytes_up=sum(sent) - FRAME_BYTES * len(sent),
        bytes_down=sum(map(len, plan.downloads.values())),
    )
    if state.round < 0 and agreement.strategy.secure:
        arrived = arrival.added_up(state)
        state, metrics = combined_sum(agreement, state, plan.cohort, arrived)
        slot = f"release{record.round - agreement.first_round}"
        ids = arrived.ids
        return state, arrival.told(
            replace(record, metrics={slot: metrics}, published=bool(ids)), ids
        )
    if state.round < 0:
        finite = {c: m for c, m in arrival.messages.items() if c not in arrival.not_finite}
        state, metrics = combined(agreement, state, plan.cohort, finite)
        slot = f"release{record.round - agreement.first_round}"
        record = replace(record, metrics={slot: metrics}, published=bool(finite))
        return state, arrival.told(record, tuple(sorted(arrival.messages)))
    ids, received = arrival.received(state)
    record = arrival.told(record, ids)
    on_air = plan.shared.get("channel")
    if on_air:
        record = replace(record, metrics={"channel": agreement.strategy.channel.metrics(on_air)})
    needed = agreement.strategy.shares_needed(agreement.terms, len(plan.cohort))
    enough = len(plan.cohort) - len(arrival.without_noise(ids)) >= needed
    something = bool(ids) or agreement.strategy.central_noise is not None
    if agreement.amplified or (enough and something):
        return aggregate(agreement, state, received, run, record, plan.shared)
    return replace(state, round=state.round + 1, starts={}), replace(record, published=False)
