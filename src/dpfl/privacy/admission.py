"""Admission: whose budget a release concerns, and whether plan and filter admit it.

A release needs two things: a committed plan that has such a release left, and a budget of everyone
it concerns that admits it under the ledger's filter. Where whole plans count ("allotments"), the
second was decided when the plan was committed, and the answer is remembered.
"""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpfl.core.types import Budget, Observer
from dpfl.privacy.chain import Row
from dpfl.privacy.costs import Charge, Delta, PrivacyCost, adjacency_of, speak_of, written
from dpfl.privacy.filters import Limit, Portion
from dpfl.privacy.ledger_reader import ALL, LedgerReader, Round

POPULATION = "population:"  # how the names of populations begin

Observers = Iterable[Observer]
PlanKeys = frozenset[tuple[str, str, str]]  # run, account, observer
Question = tuple[tuple[Portion, ...], Portion, Limit]

# Whether a member has plans, or charges, of its own that its budget is held against.
_HAS_OWN = """EXISTS (SELECT 1 FROM {} AS c WHERE c.account = m.account AND (
    c.observer = g.observer OR (g.observer = 'world' AND NOT EXISTS (
        SELECT 1 FROM plans AS w WHERE w.observer = 'world' AND w.run = c.run
        AND w.account IN (SELECT population FROM members WHERE account = m.account)))))"""
_PAYERS = f"""SELECT MIN(m.account) FROM members AS m JOIN grants AS g ON g.account = m.account
    WHERE m.population = :population AND (g.observer = 'world' OR :server)
    GROUP BY g.observer, g.unit, g.epsilon, g.delta,
        (SELECT GROUP_CONCAT(population) FROM (
            SELECT population FROM members WHERE account = m.account ORDER BY population)),
        CASE WHEN {_HAS_OWN.format("plans")} OR {_HAS_OWN.format("charges")} THEN m.account END"""


# The plans of a run for some accounts: an account's own first, then those of its populations.
_PLANS_OF = """SELECT a.value, p.account, p.bill, p.releases FROM json_each(:accounts) AS a
    JOIN plans AS p ON p.account = a.value AND p.observer = :observer AND p.run = :run
    UNION ALL SELECT * FROM (
        SELECT a.value, p.account, p.bill, p.releases FROM json_each(:accounts) AS a
        JOIN members AS m ON m.account = a.value
        JOIN plans AS p ON p.account = m.population AND p.observer = :observer AND p.run = :run
        ORDER BY p.account)"""
# What was charged to them, of each plan: to its own account, and to others for themselves.
_USED_OF = """SELECT plan, account, CASE WHEN round < 0 THEN bill END AS early, COUNT(*)
    FROM charges WHERE plan IN (SELECT value FROM json_each(:owners)) AND observer = :observer
    AND run = :run AND (plan IN (SELECT value FROM json_each(:accounts))
        OR account IN (SELECT value FROM json_each(:owners)))
    AND (round < 0) = (:round < 0) AND (NOT :replayed OR round < :round)
    GROUP BY plan, account, early"""

PlanOf = tuple[str, PrivacyCost, int]  # the account it was made for, what it costs, rounds
PlanUsed = tuple[str, str, str | None]  # account of the plan, adversary, cost of an early release


@dataclass
class OpenPlans:
    """What a run has planned for some accounts, and used of it, as of one round.

    ``newest`` is the newest round that anyone was charged for. ``plans`` are by account and
    adversary; ``used`` counts what each account was charged of a plan, where that may decide.
    """

    run: str
    round: int
    replayed: bool
    newest: int | None
    plans: dict[tuple[str, str], list[PlanOf]] = field(default_factory=dict)
    used: dict[PlanUsed, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def before(self) -> Round:
        """Where what is counted ends: before the round of the run, if that is replayed."""
        return (self.run, self.round) if self.replayed else ALL

    def owner(self, charge: Charge) -> str | None:
        """Return whose plan has such a release left, "" if none has, None if there is no plan.

        A plan of a population is used by what is charged to the population, and by each member for
        itself.
        """
        account = charge.account
        digest = written(charge.cost)[0]
        plans = self.plans.get((account, charge.observer))
        for owner, cost, releases in plans or ():
            allowed = releases if charge.cost == cost.of_round else 0
            if self.round < 0:
                allowed = cost.of_releases.count(charge.cost)
            used = self.used[self._key(owner, charge.observer, digest)]
            others = used.keys() - {owner} if account == owner else {account} - {owner}
            if used[owner] + max((used[other] for other in others), default=0) < allowed:
                return owner
        return None if plans is None else ""

    def use(self, rows: Sequence[Row]) -> None:
        """Count charges that were accepted."""
        for _, _, account, observer, owner, digest, _ in rows:
            self.used[self._key(str(owner), str(observer), str(digest))][str(account)] += 1

    def _key(self, owner: str, observer: str, digest: str) -> PlanUsed:
        return owner, observer, digest if self.round < 0 else None


class Admission(LedgerReader):
    """The deciding half of :class:`dpfl.privacy.ledger.Ledger`: it answers, and writes nothing."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        super().__init__(connection, name)
        self._answers: dict[Question, int] = {}
        self._covered: dict[tuple[str, PlanKeys], bool] = {}
        self._version = -1

    def affordable_releases(
        self, account: str, cost: PrivacyCost, seen_by: Observers, most: int, delta: Delta = None
    ) -> int:
        """How many rounds of this cost, up to ``most``, a new plan of the account could contain.

        Releases before round one count in full: 0 means that they do not fit together with one
        round. The limit is the account's own budget; the answer is ``most`` if it has none that
        those who see the release (``seen_by``) concern. ``delta`` is the plan's share under
        "allotments". Accounts with equal budgets and histories share one answer.
        """
        budget = self.budget_of(account)
        if budget is None or budget.observer is None or budget.observer not in seen_by:
            return most
        self.rule.check(account, cost)
        portions = tuple(self.portions(self.committed(account, budget.observer)))
        new = Portion(cost=cost, count=most, delta=delta)
        limit = _limit([*portions, new], budget)
        if limit is None or most < 1:
            return 0  # a record-level release says nothing of a client
        question = (portions, new, limit)
        if question not in self._answers:
            self._answers[question] = self.rule.most(portions, new, limit)
        return self._answers[question]

    def can_release(
        self, run: str, round_: int, account: str, observer: Observer, cost: PrivacyCost
    ) -> bool:
        """Whether a charge of this cost for this round would be accepted.

        What the run charged from this round on is left out: a replayed round does not count against
        itself.
        """
        charge = Charge(account=account, observer=observer, cost=cost)
        open_plans = self._open_plans(run, round_, [charge], replayed=True)
        return bool(self._plan_for(charge, open_plans))

    def _plan_for(self, charge: Charge, open_plans: OpenPlans) -> str | None:
        """Return the account whose plan covers a charge that every budget it concerns admits.

        The answer is "" if no plan has such a release left or a budget does not admit it, and None
        if there is no plan at all.
        """
        run = open_plans.run
        round_ = open_plans.round
        before = open_plans.before
        owner = open_plans.owner(charge)
        if not owner:
            return owner
        keys = frozenset({(run, owner, str(charge.observer))})
        if self.rule.reserves:
            # An answer stands until budgets or members change: no plan is committed that does not
            # fit beside those that were committed before.
            question = charge.account, keys
            if question not in self._covered:
                payers = self._payers(*question)
                self._covered[question] = all(self._admits(payer, keys) for payer in payers)
            return owner if self._covered[question] else ""
        rounds = int(round_ >= 0)
        payers = self._payers(charge.account, keys)
        return owner if all(self._admits(payer, keys, rounds, before) for payer in payers) else ""

    def _open_plans(
        self, run: str, round_: int, charges: Sequence[Charge], *, replayed: bool
    ) -> OpenPlans:
        """Read what a run has planned for the accounts of some charges, and used of it.

        A round that is ``replayed`` does not count what the run charged from that round on. Rounds
        are 0 or above, releases before round one below 0.
        """
        ((version,),) = self._rows("PRAGMA data_version")
        if version != self._version:  # another process has written
            self._covered.clear()
            self._version = version
        newest = self.last_charged(run)
        open_plans = OpenPlans(run, round_, replayed, newest)
        for observer in {charge.observer for charge in charges}:
            accounts = {one.account for one in charges if one.observer == observer}
            place: dict[str, Any] = {"run": run, "round": round_, "replayed": replayed}
            place |= {"observer": observer, "accounts": json.dumps(sorted(accounts))}
            uncertain = round_ < 0
            for account, owner, digest, releases in self._rows(_PLANS_OF, **place):
                plan = owner, self._cost(digest), releases
                open_plans.plans.setdefault((account, observer), []).append(plan)
                accounts.add(owner)
                # An account's own plan is charged at most once a round, and every round that is
                # charged is in the journal: no more rounds than those up to the newest are used.
                alone = owner == account and not owner.startswith(POPULATION)
                uncertain |= not alone or newest is None or newest + 1 >= releases
            if newest is None or not uncertain:
                continue
            place["owners"] = json.dumps(sorted(accounts))
            for owner, account, early, count in self._rows(_USED_OF, **place):
                open_plans.used[owner, observer, early][account] = count
        return open_plans

    # -- budgets -----------------------------------------------------------------------------------

    def _payers(self, account: str, keys: PlanKeys) -> list[str]:
        """Whose budgets a release concerns: the account's own, or one of each kind of members.

        Members with equal budgets in the same populations, and with no plan or charge of their own
        that their budget is held against, have the same history.
        """
        if not account.startswith(POPULATION):
            return [account]
        server = any(observer != "world" for _, _, observer in keys)
        rows = self._rows(_PAYERS, population=account, server=server)
        return [payer for (payer,) in rows] or [account]

    def _admits(self, payer: str, keys: PlanKeys, rounds: int = 1, before: Round = ALL) -> bool:
        """Whether one account's budget admits one more round of these plans, or all of them.

        ``rounds`` 0 asks for a release before round one; ``before`` is that of :meth:`committed`.
        """
        budget = self.budget_of(payer)
        if budget is None or budget.observer is None:
            return True
        plans = self.committed(payer, budget.observer, before)
        own = [plan for plan in plans if (plan.run, plan.account, plan.observer) in keys]
        if not own:
            return True  # the adversary of this budget does not see the release
        others = [plan for plan in plans if plan not in own]
        asked = [replace(plan, used=plan.used + rounds, early=1) for plan in own]
        portions = self.portions([*others, *asked])
        limit = _limit(portions, budget)
        return limit is not None and self.rule.admits(portions, limit)


def _limit(portions: Sequence[Portion], budget: Budget) -> Limit | None:
    """Read a budget for these portions; None if they say nothing of its unit."""
    costs = [portion.cost for portion in portions]
    if not speak_of(costs, budget.unit):
        return None
    adjacency = adjacency_of(costs, budget.unit)
    return Limit(epsilon=budget.epsilon, delta=budget.delta, adjacency=adjacency)
