"""What a run commits to before its first release, who can afford its next round, and what a round
is charged.

A client's plan is its cost of one round, repeated as often as its budget allows and the run may ask
for. It is committed before the client's first release and depends on budgets and terms alone. Where
the secrecy of the draw is counted on, the world sees every round whoever is drawn: those clients
are planned and charged together, as populations.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.types import Observer
from dpfl.plugs.base import Participant
from dpfl.privacy.costs import Charge, PrivacyCost, PrivacyPlan
from dpfl.rounds.enrol import Agreement, Run, in_round
from dpfl.rounds.members import Member

ABSTAINS = "its budget does not cover another round"
Offer = tuple[PrivacyCost, frozenset[Observer], float | None]
"""What an account commits to, who sees it, and the share of delta that the plan is priced at."""

Admission = Callable[[int, Mapping[str, Member]], Mapping[str, str]]
"""Charges members for a round, before any noise is drawn; returns who abstains, and why."""


def charging(agreement: Agreement, run: Run) -> Admission:
    """Charge members to the ledger of a run: what a simulation passes for ``admit``.

    What the world sees is charged here where it differs from client to client; its plan must stand
    before the first charge against the server.
    """
    server = (0, Observer.SERVER)
    world = (1, Observer.WORLD)

    def admit(round_: int, members: Mapping[str, Member]) -> dict[str, str]:
        unpaid: set[str] = set()
        for place, observer in (world, server) if agreement.by_record else (server,):
            offers = {}
            for client in members.keys() - unpaid:
                member = members[client]
                delta = None if member.budget is None else member.budget.delta
                offers[client] = (*agreement.plans(member.participant)[place], delta)
            unpaid |= _charge(agreement, run, round_, observer, offers)
        return dict.fromkeys(sorted(unpaid), ABSTAINS)

    return admit


def charge_world(
    agreement: Agreement, run: Run, round_: int, drawn: Sequence[str], eligible: Sequence[str]
) -> None:
    """Charge what the world will see, where that is not simply what the server sees.

    An amplified cost is charged to everyone eligible, drawn or not: the sampling is in the cost
    already.
    """
    if not agreement.charges_world or agreement.by_record:
        return
    cost = agreement.strategy.cost(Observer.WORLD, (), 1, agreement.terms)
    accounts = {run.populations[client] for client in eligible} if agreement.amplified else drawn
    offers = dict.fromkeys(accounts, (cost, frozenset({Observer.WORLD}), None))
    unpaid = _charge(agreement, run, round_, Observer.WORLD, offers)
    check(
        not unpaid,
        f"round {round_}",
        f"{sorted(unpaid)} cannot pay",
        "ask willing() before drawing",
        PrivacyRefusal,
    )


def _charge(
    agreement: Agreement, run: Run, round_: int, observer: Observer, offers: Mapping[str, Offer]
) -> set[str]:
    """Commit the plans of those that have none yet, then charge the round; returns who could not
    pay.

    A plan holds as many rounds as the account's budget covers, up to all of them; an account whose
    budget covers no round gets no plan, and takes no part.
    """
    plans = []
    planned = run.planned(observer)
    most = agreement.terms.rounds
    for account, (cost, seen_by, delta) in sorted(offers.items()):
        if account not in planned:
            rounds = run.ledger.affordable_releases(account, cost, seen_by, most, delta=delta)
            plans.append((account, cost, rounds, delta))
    _commit(run, observer, plans)
    unplanned = offers.keys() - planned.keys()
    if observer is Observer.WORLD and unplanned and not agreement.by_record:
        return set(unplanned)  # the round cannot be: nobody is charged for it
    charges = []
    for account in sorted(offers.keys() & planned.keys()):
        world = observer is Observer.WORLD
        cost = in_round(offers[account][0], round_)
        labels = ("central", round_) if world else ("client", round_, account)
        # The randomness that a charge pays for; empty where it cannot be repeated.
        draw = "" if run.seed is None else f"{run.seed.child(*labels).value:x}"
        charges.append(Charge(account=account, observer=observer, cost=cost, draw=draw))
    refused = run.ledger.charge(run.name, round_, charges)
    return {*offers} - {charge.account for charge in charges} | refused


def _commit(
    run: Run, observer: Observer, offers: Iterable[tuple[str, PrivacyCost, int, float | None]]
) -> None:
    """Commit plans (account, cost, rounds, delta) that hold a round at least."""
    plans = [
        PrivacyPlan(account=account, observer=observer, cost=cost, releases=rounds, delta=delta)
        for account, cost, rounds, delta in offers
        if rounds > 0
    ]
    if plans:
        refused = run.ledger.commit(run.name, plans)
        made = {plan.account: plan.releases for plan in plans if plan.account not in refused}
        run.planned(observer).update(made)
        run.covered.difference_update(made)


def plan_world(agreement: Agreement, run: Run) -> dict[str, str]:
    """Commit, once, what the world will see of everyone; returns the account under which each
    client is charged.

    Clients whose budgets allow equally many rounds share an account. A client that can afford none
    has no account.
    """
    world = Observer.WORLD
    accounts = run.populations
    ledger = run.ledger
    if accounts or not agreement.amplified:
        return accounts
    if not run.planned(world):
        cost = agreement.strategy.cost(world, (), 1, agreement.terms)
        groups = defaultdict(list)
        for client in sorted(agreement.claims):
            most = ledger.affordable_releases(client, cost, {world}, agreement.terms.rounds)
            groups[most].append(client)
        groups.pop(0, None)
        offers = [
            (ledger.population(own), cost, most, None) for most, own in sorted(groups.items())
        ]
        _commit(run, world, offers)
    for account in run.planned(world):
        accounts.update(dict.fromkeys(ledger.members(account), account))
    return accounts


def can_go_on(
    agreement: Agreement, run: Run, round_: int, client: str, participant: Participant
) -> bool:
    """Whether a client's plans, or its budget where it has no plan yet, cover this round.

    The answer depends on budgets, terms and what was charged, never on records. A client is not
    asked again where its answer stands: while it has no plan of its own, and where whole plans are
    reserved when they are committed and its plans hold all rounds.
    """
    if client in run.covered:
        return True
    ledger = run.ledger
    stands = True
    for cost, seen_by in agreement.plans(participant):
        observer = Observer.SERVER if Observer.SERVER in seen_by else Observer.WORLD
        amplified = observer is Observer.WORLD and agreement.amplified
        account = plan_world(agreement, run).get(client, "") if amplified else client
        releases = run.planned(observer).get(account)
        if releases is None:
            key = (client, seen_by)
            ask = ledger.affordable_releases
            if amplified or run.once(key, ask, client, cost, seen_by, 1) < 1:
                return False
        elif ledger.filter != "allotments" or releases < agreement.terms.rounds:
            stands = False  # else every round of the plan is paid, and charged at most once
            which = round_, account, observer
            of_round = in_round(cost, round_)
            if not run.once(which, ledger.can_release, run.name, *which, of_round):
                return False
    if stands:
        run.covered.add(client)
    return True
