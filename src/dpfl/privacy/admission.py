"""Admission: whose budget a release concerns, and whether plan and filter admit it.

A release needs two things: a committed plan that has such a release left, and a budget of everyone
it concerns that admits it under the ledger's filter. Where whole plans count ("allotments"), the
second was decided when the plan was committed, and the answer is remembered.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dpfl.core.types import Budget, Observer
from dpfl.privacy.costs import PrivacyCost, account_history, written
from dpfl.privacy.filters import Limit, Portion
from dpfl.privacy.ledger_reader import OWN, LedgerReader

POPULATION = "population:"  # how the names of populations begin

PlanKey = tuple[str, str, str]  # run, account, observer
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


@dataclass(frozen=True)
class Release:
    """What is to be charged: rounds are 0 or above, releases before round one below 0.

    A ``replayed`` release does not count what its run charged from its round on.
    """

    run: str
    round: int
    account: str
    observer: str
    cost: PrivacyCost
    replayed: bool = False

    @property
    def early(self) -> bool:
        """Whether it is one of the releases before round one."""
        return self.round < 0


class Admission(LedgerReader):
    """The deciding half of :class:`dpfl.privacy.ledger.Ledger`: it answers, and writes nothing."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        super().__init__(connection, name)
        self._answers: dict[Question, int] = {}
        self._covered: dict[tuple[str, frozenset[PlanKey]], bool] = {}
        self._version = -1

    def affordable_releases(
        self,
        account: str,
        cost: PrivacyCost,
        seen_by: Iterable[Observer],
        most: int,
        *,
        delta: float | None = None,
    ) -> int:
        """How many rounds of this cost, up to ``most``, a new plan of the account could contain.

        Releases before round one count in full: 0 means that they do not fit together with one
        round. The limit is the account's own budget; the answer is ``most`` if it has none that
        those who see the release (``seen_by``) concern. ``delta`` is the plan's share under
        "allotments". Accounts with equal budgets and histories share one answer.
        """
        budget = self.budget_of(account)
        if budget is None or budget.observer is None or budget.observer not in set(seen_by):
            return most
        self._filter.check(account, cost)
        portions = tuple(self.portions(self.committed(account, budget.observer)))
        new = Portion(cost=cost, count=most, delta=delta)
        limit = _limit([*portions, new], budget)
        if limit is None or most < 1:
            return 0  # a record-level release says nothing of a client
        question = (portions, new, limit)
        if question not in self._answers:
            self._answers[question] = self._filter.most(portions, new, limit)
        return self._answers[question]

    def can_release(
        self, run: str, round_: int, account: str, observer: Observer, cost: PrivacyCost
    ) -> bool:
        """Whether a charge of this cost for this round would be accepted.

        What the run charged from this round on is left out: a replayed round does not count against
        itself.
        """
        release = Release(run, round_, account, str(observer), cost, replayed=True)
        owner = self._plan_left(release)
        return bool(owner) and self._paid(release, str(owner))

    def _plan_left(self, release: Release) -> str | None:
        """Return whose plan has such a release left, "" if none has, None if there is no plan.

        A population's plan is used by what is charged to the population, and by each member for
        itself.
        """
        plans = f"""SELECT account, bill, releases FROM plans
            WHERE account IN {OWN} AND observer = :observer AND run = :run
            ORDER BY account <> :account, account"""
        kind = "round < 0 AND bill = :bill" if release.early else "round >= 0"
        used = f"""SELECT account, COUNT(*) FROM charges
            WHERE plan = :owner AND observer = :observer AND run = :run
            AND (:account = :owner OR account IN (:owner, :account))
            AND {kind} AND (NOT :replayed OR round < :round) GROUP BY account"""
        place = {**vars(release), "cost": None, "bill": written(release.cost)[0]}
        found = self._rows(plans, **place)
        for owner, digest, releases in found:
            planned = self._cost(digest)
            allowed = releases if release.cost == planned.of_round else 0
            if release.early:
                allowed = planned.of_releases.count(release.cost)
            if allowed:
                counts = dict(self._rows(used, owner=owner, **place))
                if counts.pop(owner, 0) + max(counts.values(), default=0) < allowed:
                    return str(owner)
        return "" if found else None

    # -- budgets -----------------------------------------------------------------------------------

    def _paid(self, release: Release, owner: str) -> bool:
        """Whether every budget that a release of ``owner``'s plan concerns admits one more."""
        keys = frozenset({(release.run, owner, release.observer)})
        payers = self._payers(release.account, {release.observer})
        if not self._filter.reserves:
            return all(self._admits(payer, keys, release) for payer in payers)
        return all(self._covers(payer, keys) for payer in payers)

    def _payers(self, account: str, observers: set[str]) -> list[str]:
        """Whose budgets a release concerns: the account's own, or one of each kind of members.

        Members with equal budgets in the same populations, and with no plan or charge of their own
        that their budget is held against, have the same history.
        """
        if not account.startswith(POPULATION):
            return [account]
        rows = self._rows(_PAYERS, population=account, server=observers != {"world"})
        return [payer for (payer,) in rows] or [account]

    def _covers(self, payer: str, keys: frozenset[PlanKey]) -> bool:
        """As :meth:`_admits` for whole plans: an answer stands until plans or budgets change."""
        (version,) = self._one("PRAGMA data_version")
        if version != self._version:
            self._covered.clear()
            self._version = version
        if (payer, keys) not in self._covered:
            self._covered[payer, keys] = self._admits(payer, keys)
        return self._covered[payer, keys]

    def _admits(self, payer: str, keys: frozenset[PlanKey], release: Release | None = None) -> bool:
        """Whether one account's budget admits one more release of these plans, or all of them.

        Without a ``release``, it is a round that is asked for.
        """
        early = release is not None and release.early
        before = (release.run, release.round) if release and release.replayed else None
        budget = self.budget_of(payer)
        if budget is None or budget.observer is None:
            return True
        counted, concerned = [], False
        for plan in self.committed(payer, budget.observer, before=before):
            own = (plan.run, plan.account, str(plan.observer)) in keys
            concerned |= own
            used, released = plan.used + (own and not early), plan.early + (own and early)
            counted.append(replace(plan, used=used, early=released))
        if not concerned:
            return True  # the adversary of this budget does not see the release
        portions = self.portions(counted)
        limit = _limit(portions, budget)
        return limit is not None and self._filter.admits(portions, limit)


def _limit(portions: Sequence[Portion], budget: Budget) -> Limit | None:
    """Read a budget for these portions; None if they say nothing of its unit."""
    counted = account_history((portion.cost, portion.count) for portion in portions)
    if counted is None or budget.unit is None:
        return None
    adjacency = counted.adjacency_as(budget.unit)
    if adjacency is None:
        return None
    return Limit(epsilon=budget.epsilon, delta=budget.delta, adjacency=adjacency)
