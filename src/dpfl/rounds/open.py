"""Open a round: the server draws among the willing, charges what the world will see, and writes
downloads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.random import PublicSeed
from dpfl.core.types import Cohort, Downlink, Observer, Shared, State
from dpfl.plugs.selection import Everyone
from dpfl.privacy.costs import Charge
from dpfl.rounds.codec import encode_download
from dpfl.rounds.enrol import Agreement, Plan, Run
from dpfl.rounds.plans import plan_members, plan_world

_NOBODY = "no client can afford another one"


def open_round(
    agreement: Agreement, state: State, run: Run, willing: Callable[[str], bool]
) -> Plan:
    """Draw the cohort among the willing, charge what the world will see, and write one download per
    client.

    ``state`` is what the server remembers; its round number says which round this is, and a
    negative one that it is a release before round one, for which everyone is asked. ``willing``
    asks a client whether it can afford the round; the server itself knows no true budget. The
    plan that is returned says who was drawn and what each of them is sent; where nobody can go
    on, ``over`` says why.

    *Formal guarantees.* Where the secrecy of the draw is counted on, everyone is asked before the
    draw, and the draw is among the willing: a round never fails because of who was drawn.
    Amplification is charged at the rate that holds for the least number of willing clients; with
    fewer the plan ends, and the model is kept.
    """
    strategy, terms = agreement.strategy, agreement.terms
    seed = run.round_seed(state.round)
    on_air = seed.child("channel")
    everyone = sorted(agreement.claims)
    candidates = [
        client for client in everyone if strategy.channel.reachable(client, state.round, on_air)
    ]
    if not candidates:  # nobody can be heard: the round passes, and releases nothing
        return Plan(round=state.round)
    plan_world(agreement, run)
    secret = run.secret("cohort", state.round).secret_seed()
    eligible: list[str] = []
    if agreement.amplified:
        answers = {client: client in run.populations and willing(client) for client in candidates}
        eligible = [client for client, yes in answers.items() if yes]
        unwilling = [client for client, yes in answers.items() if not yes]
        least = strategy.selection.least_willing(terms.population)
        if len(eligible) < least:
            few = f"{len(eligible)} of {len(everyone)} clients can afford another round"
            why = f"{few}, and the plan needs {least}" if eligible else _NOBODY
            return Plan(round=state.round, over=why, unwilling=tuple(unwilling))
        size = strategy.selection.cohort_size(terms.population)
        drawn = strategy.selection.order(eligible, secret)[:size]
    else:
        drawn, unwilling = _first_willing(agreement, candidates, secret, willing, state.round)
        if not drawn and not any(willing(client) for client in everyone):
            return Plan(round=state.round, over=_NOBODY, unwilling=tuple(everyone))
    cohort = Cohort.of({client: agreement.claims[client] for client in drawn})
    _charge_world(agreement, run, state.round, cohort, eligible)
    shared: dict[str, Shared] = {"buffers": dict(state.buffers)} if state.buffers else {}
    for slot, plug in strategy.slots():
        tensors = plug.open(dict(state.plugs.get(slot, {})), state.round, cohort, seed.child(slot))
        if tensors:
            shared[slot] = tensors
    common = Downlink(round=state.round, start=state.model, shared=shared, drawn=len(cohort))
    starts = {client: state.starts[client] for client in cohort.ids if client in state.starts}
    own = {c: encode_download(replace(common, start=start)) for c, start in starts.items()}
    return Plan(
        round=state.round,
        cohort=cohort,
        downloads={**dict.fromkeys(cohort.ids, encode_download(common)), **own},
        shared=shared,
        starts=starts,
        unwilling=tuple(sorted(unwilling)),
    )


def _first_willing(
    agreement: Agreement,
    candidates: Sequence[str],
    secret: PublicSeed,
    willing: Callable[[str], bool],
    round_: int,
) -> tuple[list[str], list[str]]:
    """Draw, and replace those who are not willing by the next in the order; only those who come up
    are asked. Everyone is asked for a release before round one.
    """
    selection = Everyone() if round_ < 0 else agreement.strategy.selection
    size = selection.cohort_size(agreement.terms.population)
    drawn: list[str] = []
    unwilling: list[str] = []
    for client in selection.order(candidates, secret):
        if len(drawn) == size:
            break
        (drawn if willing(client) else unwilling).append(client)
    return drawn, unwilling


def _charge_world(
    agreement: Agreement, run: Run, round_: int, cohort: Cohort, eligible: Sequence[str]
) -> None:
    """Charge what the world will see, where that is not simply what the server sees.

    An amplified cost is charged to everyone eligible, drawn or not: the sampling is in the cost
    already.
    """
    if not agreement.charges_world:
        return
    cost = agreement.strategy.cost(Observer.WORLD, (), 1, agreement.terms)
    if agreement.amplified:
        accounts = sorted({run.populations[client] for client in eligible})
    else:
        accounts = list(cohort.ids)
        seen = (cost, frozenset({Observer.WORLD}))
        plan_members(agreement, run, Observer.WORLD, dict.fromkeys(accounts, seen), {})
    token = run.draw_token("central", round_)
    charges = [
        Charge(account=account, observer=Observer.WORLD, cost=cost, draw=token)
        for account in accounts
    ]
    refused = run.ledger.charge(run.name, round_, charges)
    if refused:
        raise PrivacyRefusal(
            f"round {round_}",
            f"'{min(refused)}' was drawn but cannot pay",
            "ask willing() before drawing",
        )
