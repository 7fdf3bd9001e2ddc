"""Open a round: the server draws among the willing, charges what the world will see, and writes
downloads.
"""

from collections.abc import Callable
from dataclasses import replace

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Cohort, Downlink, Shared, State
from dpfl.plugs.selection import Everyone
from dpfl.rounds.codec import encode_download
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.exchange import Plan
from dpfl.rounds.plans import charge_world, plan_world

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
    strategy = agreement.strategy
    round_ = state.round
    seed = run.round_seed(round_)
    everyone = sorted(agreement.claims)
    on_air = seed.child("channel")
    eligible = [c for c in everyone if strategy.channel.reachable(c, round_, on_air)]
    if not eligible:  # nobody can be heard: the round passes, and releases nothing
        return Plan(round=round_)
    accounts = plan_world(agreement, run)
    secret = run.secret("cohort", round_).secret_seed()
    drawn: list[str] = []
    unwilling: list[str] = []
    if agreement.amplified:
        asked = eligible
        eligible = [c for c in eligible if c in accounts and willing(c)]
        unwilling = sorted(set(asked) - set(eligible))
        least = strategy.selection.least_willing(agreement.terms.population)
        if len(eligible) < least:
            few = f"{len(eligible)} of {len(everyone)} clients can take another round"
            why = f"{few}, and the plan needs {least}" if eligible else _NOBODY
            return Plan(round=round_, over=why, unwilling=tuple(unwilling))
    selection = Everyone() if round_ < 0 else strategy.selection
    size = selection.cohort_size(agreement.terms.population)
    for client in selection.order(eligible, secret):  # the next replaces who is not willing
        if len(drawn) == size:
            break
        (drawn if agreement.amplified or willing(client) else unwilling).append(client)
    if not (agreement.amplified or drawn or any(map(willing, everyone))):
        return Plan(round=round_, over=_NOBODY, unwilling=tuple(everyone))
    try:
        strategy.channel.group(len(drawn))
    except PrivacyRefusal as refusal:  # too many have left to hide those who are still there
        return Plan(round=round_, over=str(refusal), unwilling=tuple(sorted(unwilling)))
    cohort = Cohort.of({client: agreement.claims[client] for client in drawn})
    charge_world(agreement, run, round_, cohort.ids, eligible)
    shared = shared_with(agreement, state, run, cohort)
    common = Downlink(round=round_, start=state.model, shared=shared, drawn=len(cohort))
    starts = {client: state.starts[client] for client in cohort.ids if client in state.starts}
    own = {c: encode_download(replace(common, start=start)) for c, start in starts.items()}
    return Plan(
        round=round_,
        cohort=cohort,
        downloads={**dict.fromkeys(cohort.ids, encode_download(common)), **own},
        shared=shared,
        starts=starts,
        unwilling=tuple(sorted(unwilling)),
    )


def shared_with(agreement: Agreement, state: State, run: Run, cohort: Cohort) -> dict[str, Shared]:
    """What the plugs share with a cohort in the round that the state is in, by slot."""
    shared: dict[str, Shared] = {"buffers": dict(state.buffers)} if state.buffers else {}
    for slot, plug in agreement.strategy.slots():
        seed = run.round_seed(state.round).child(slot)
        tensors = plug.open(dict(state.plugs.get(slot, {})), state.round, cohort, seed)
        if tensors:
            shared[slot] = tensors
    return shared
