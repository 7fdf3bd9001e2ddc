"""Open a round: the server draws among the willing, charges what the world will see, and writes downloads."""

from __future__ import annotations

from collections.abc import Callable

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Cohort, Downlink, Observer, State
from dpfl.privacy.bills import Charge
from dpfl.rounds.agreement import Agreement, Plan, Run
from dpfl.wire.payload import encode_download


def open_round(agreement: Agreement, state: State, run: Run, willing: Callable[[str], bool]) -> Plan:
    """Draw the cohort among the willing, charge the world's bill, and write one download per client.

    ``willing`` asks a client whether it can afford the round; the server itself knows no true budget.
    """
    strategy, terms = agreement.strategy, agreement.terms
    seed = run.public.child("round", state.round)
    on_air = seed.child("channel")
    candidates = [c for c in sorted(agreement.claims) if strategy.channel.reachable(c, state.round, on_air)]
    if not candidates:  # nobody can be heard: the round passes, and releases nothing
        return Plan(round=state.round, cohort=Cohort(ids=(), claims={}), downloads={}, shared={}, starts={})
    # Who is drawn is a secret: where sampling is billed as amplification, a public draw would amplify nothing.
    order = strategy.selection.order(candidates, run.secret("cohort", state.round).secret_seed())
    size = strategy.selection.cohort_size(terms.population)
    if size is not None and agreement.amplified:
        order = order[:size]  # the billed rate is size / population: the unwilling are missed, not replaced
    drawn: list[str] = []
    unwilling: list[str] = []
    for client in order:
        if size is not None and len(drawn) == size:
            break
        (drawn if willing(client) else unwilling).append(client)
    over = not drawn and not any(willing(client) for client in sorted(agreement.claims))
    if over:
        nothing = Cohort(ids=(), claims={})
        everyone = tuple(sorted(agreement.claims))
        return Plan(
            round=state.round, cohort=nothing, downloads={}, shared={}, starts={}, unwilling=everyone, over=True
        )
    cohort = Cohort.of({client: agreement.claims[client] for client in drawn})
    eligible = [client for client in candidates if willing(client)] if agreement.amplified else []
    _charge_world(agreement, run, state.round, cohort, eligible)
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
