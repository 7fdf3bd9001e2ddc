"""What a run commits to before its first release, and who can afford its next round.

A client's plan is its cost of one round, repeated as often as its budget allows and the run may ask
for. It is committed before the client's first release and depends on budgets and terms alone. Where
the secrecy of the draw is counted on, the world sees every round whoever is drawn: those clients
are planned and charged together, as populations.
"""

from collections.abc import Mapping

from dpfl.core.types import Budget, Observer
from dpfl.plugs.base import Participant
from dpfl.privacy.costs import PrivacyPlan
from dpfl.rounds.enrol import Agreement, Run, Seen


def plan_members(
    agreement: Agreement,
    run: Run,
    observer: Observer,
    costs: Mapping[str, Seen],
    budgets: Mapping[str, Budget | None],
) -> None:
    """Commit the plans of those that have none yet.

    ``costs`` says what each account commits to and who sees it, ``budgets`` whose share of delta
    the plan is priced at. A plan holds as many rounds as the account's budget covers, up to all
    of them; an account whose budget covers no round gets no plan, and takes no part.
    """
    planned = run.planned(observer)
    plans = []
    for client, (cost, seen_by) in sorted(costs.items()):
        if client in planned:
            continue
        budget = budgets.get(client)
        share = None if budget is None else budget.delta
        releases = run.ledger.affordable_releases(
            client, cost, seen_by, agreement.terms.rounds, delta=share
        )
        if releases > 0:
            plans.append(
                PrivacyPlan(
                    account=client, observer=observer, cost=cost, releases=releases, delta=share
                )
            )
    refused = run.ledger.commit(run.name, plans)
    planned.update({plan.account: plan.releases for plan in plans if plan.account not in refused})


def plan_world(agreement: Agreement, run: Run) -> dict[str, str]:
    """Commit, once, what the world will see of everyone; returns the account under which each
    client is charged.

    Clients whose budgets allow equally many rounds share an account. A client that can afford none
    has no account.
    """
    accounts = run.populations
    if accounts or not agreement.amplified:
        return accounts
    planned = run.planned(Observer.WORLD)
    if not planned:
        cost = agreement.strategy.cost(Observer.WORLD, (), 1, agreement.terms)
        groups: dict[int, list[str]] = {}
        for client in sorted(agreement.claims):
            releases = run.ledger.affordable_releases(
                client, cost, {Observer.WORLD}, agreement.terms.rounds
            )
            groups.setdefault(releases, []).append(client)
        plans = [
            PrivacyPlan(
                account=run.ledger.population(group),
                observer=Observer.WORLD,
                cost=cost,
                releases=releases,
            )
            for releases, group in sorted(groups.items())
            if releases > 0
        ]
        refused = run.ledger.commit(run.name, plans)
        planned.update(
            {plan.account: plan.releases for plan in plans if plan.account not in refused}
        )
    for account in planned:
        accounts.update(dict.fromkeys(run.ledger.members(account), account))
    return accounts


def can_go_on(
    agreement: Agreement, run: Run, round_: int, client: str, participant: Participant
) -> bool:
    """Whether a client's plans, or its budget where it has no plan yet, cover this round.

    The answer depends on budgets, terms and what was charged, never on records. Where whole plans
    are reserved when they are committed, a client whose plans hold all rounds is not asked again.
    """
    if client in run.covered:
        return True
    every_round = run.ledger.filter == "allotments"
    for plan, seen_by in agreement.plans(participant):
        observer = Observer.SERVER if Observer.SERVER in seen_by else Observer.WORLD
        amplified = observer is Observer.WORLD and agreement.amplified
        account = plan_world(agreement, run).get(client, "") if amplified else client
        releases = run.planned(observer).get(account)
        if every_round and (releases or 0) >= agreement.terms.rounds:
            continue  # a round is charged at most once
        every_round = False
        if releases is None:
            good = not amplified and run.affordable_at_first(client, plan, seen_by)
        else:
            cost = agreement.cost(observer, participant, round_)
            good = run.still_planned(round_, account, observer, cost)
        if not good:
            return False
    if every_round:
        run.covered.add(client)
    return True
