"""Admission: whose budget a release concerns, and whether plan and filter admit it.

A release needs two things: a committed plan that has such a release left, and a budget of everyone
it concerns that admits it under the ledger's filter. Where whole plans count ("allotments"), the
second was decided when the plan was committed, and the answer is remembered.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpfl.core.types import Budget, Observer
from dpfl.privacy.costs import Charge, Delta, PrivacyCost, adjacency_of, speak_of, written
from dpfl.privacy.filters import Limit, Portion
from dpfl.privacy.ledger_reader import ALL, OWN, LedgerReader, Round

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
        return bool(self._plan_for(run, round_, charge, replayed=True))

    def _plan_for(self, run: str, round_: int, charge: Charge, replayed: bool) -> str | None:
        """Return the account whose plan covers a charge that every budget it concerns admits.

        The answer is "" if no plan has such a release left or a budget does not admit it, and None
        if there is no plan at all. A ``replayed`` charge does not count what its run charged from
        its round on.
        """
        owner = self._plan_left(run, round_, charge, replayed)
        if not owner:
            return owner
        keys = frozenset({(run, owner, str(charge.observer))})
        payers = self._payers(charge.account, keys)
        if self.rule.reserves:
            return owner if all(self._covers(payer, keys) for payer in payers) else ""
        rounds, before = int(round_ >= 0), (run, round_) if replayed else ALL
        return owner if all(self._admits(one, keys, rounds, before) for one in payers) else ""

    def _plan_left(self, run: str, round_: int, charge: Charge, replayed: bool) -> str | None:
        """Return whose plan has such a release left, "" if none has, None if there is no plan.

        Rounds are 0 or above, releases before round one below 0. A population's plan is used by
        what is charged to the population, and by each member for itself.
        """
        early = round_ < 0
        plans = f"""SELECT account, bill, releases FROM plans
            WHERE account IN {OWN} AND observer = :observer AND run = :run
            ORDER BY account <> :account, account"""
        used = f"""SELECT account, COUNT(*) FROM charges
            WHERE plan = :owner AND observer = :observer AND run = :run
            AND (:account = :owner OR account IN (:owner, :account))
            AND {"round < 0 AND bill = :bill" if early else "round >= 0"}
            AND (NOT :replayed OR round < :round) GROUP BY account"""
        place: dict[str, Any] = {"run": run, "round": round_, "replayed": replayed}
        place |= {"account": charge.account, "observer": charge.observer}
        place["bill"] = written(charge.cost)[0]
        found = self._rows(plans, **place)
        for owner, digest, releases in found:
            planned = self._cost(digest)
            allowed = releases if charge.cost == planned.of_round else 0
            if early:
                allowed = planned.of_releases.count(charge.cost)
            if allowed:
                counts = dict(self._rows(used, owner=owner, **place))
                if counts.pop(owner, 0) + max(counts.values(), default=0) < allowed:
                    return str(owner)
        return "" if found else None

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

    def _covers(self, payer: str, keys: PlanKeys) -> bool:
        """As :meth:`_admits` for whole plans: an answer stands until plans or budgets change."""
        ((version,),) = self._rows("PRAGMA data_version")
        if version != self._version:
            self._covered.clear()
            self._version = version
        if (payer, keys) not in self._covered:
            self._covered[payer, keys] = self._admits(payer, keys)
        return self._covered[payer, keys]

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
