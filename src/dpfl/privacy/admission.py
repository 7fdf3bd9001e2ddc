"""Admission: whose budget a release touches, which plan it uses up, and whether the filter lets it
pass.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.costs import PrivacyCost, account_history
from dpfl.privacy.filters import Limit, Portion
from dpfl.privacy.ledger_reader import OWN, LedgerReader

POPULATION = "population:"
"""How the names of populations begin."""

PlanKey = tuple[str, str, str]  # run, account, observer


class Admission(LedgerReader):
    """The deciding half of :class:`dpfl.privacy.ledger.Ledger`: it answers, and writes nothing."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        super().__init__(connection, name)
        self._answers: dict[tuple[tuple[Portion, ...], Portion, Limit], int] = {}
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
        """How many releases of this bill, up to ``most``, a new plan of the account could contain.

        Within the account's own budget; ``most`` if it has none that this release concerns.
        ``delta`` is the plan's share under "allotments". Accounts with equal budgets and histories
        share one answer.
        """
        grant = self.budget_of(account)
        if grant is None or grant.unit is None or grant.observer not in set(seen_by):
            return most
        self._filter.check(account, cost)
        portions = tuple(self.portions(self.committed(account, grant.observer)))
        new = Portion(cost=cost, count=most, delta=delta)
        limit = _limit([*portions, new], grant, grant.unit)
        if limit is None or most < 1:
            return 0  # a record-level release says nothing of a client
        question = (portions, new, limit)
        if question not in self._answers:
            self._answers[question] = self._filter.most(portions, new, limit)
        return self._answers[question]

    def can_release(
        self, run: str, round_: int, account: str, observer: Observer, cost: PrivacyCost
    ) -> bool:
        """Whether a charge of this bill for this round would be accepted.

        What the run charged from this round on is left out: a replayed round does not count against
        itself.
        """
        with self._guard():
            plan = self._entry_left(run, account, str(observer), written(cost)[0], before=round_)
            if not plan:
                return False
            keys = frozenset({(run, plan, str(observer))})
            payers = self._payers(self._connection, account, {str(observer)})
            return all(self._pays(payer, keys, before=(run, round_)) for payer in payers)

    def _entry_left(
        self, run: str, account: str, observer: str, digest: str, *, before: int | None = None
    ) -> str | None:
        """Return whose plan has such a release left, "" if none has, None if there is no plan at
        all.

        A population's plan is used by what is charged to the population, and by each member for
        itself.
        """
        place = {"run": run, "account": account, "observer": observer, "before": before}
        plans = self._connection.execute(
            f"""SELECT account, bill, releases FROM plans WHERE account IN {OWN} AND observer = :observer
                AND run = :run ORDER BY account <> :account, account""",
            place,
        ).fetchall()
        for owner, cost, releases in plans:
            if cost == digest and self._used(owner, place) < releases:
                return str(owner)
        return "" if plans else None

    def _used(self, owner: str, place: Mapping[str, str | int | None]) -> int:
        """Count the releases used of a plan, for the account to be charged and for its members."""
        of_whom = "" if owner == place["account"] else "AND account IN (:owner, :account)"
        rows = self._connection.execute(
            f"""SELECT account, COUNT(*) FROM charges
                WHERE plan = :owner AND observer = :observer AND run = :run {of_whom}
                AND (:before IS NULL OR round < :before) GROUP BY account""",
            {**place, "owner": owner},
        )
        counts = dict(rows.fetchall())
        return int(counts.pop(owner, 0)) + max(counts.values(), default=0)

    # -- budgets -----------------------------------------------------------------------------------

    def _payers(
        self, connection: sqlite3.Connection, account: str, observers: set[str]
    ) -> list[str]:
        """Whose budgets a release concerns: the account's own, or one member of each kind in a
        population.

        Members with equal budgets in the same populations, and with no plan or charge of their own
        that their budget is held against, have the same history.
        """
        if not account.startswith(POPULATION):
            return [account]
        own = """EXISTS (SELECT 1 FROM {} AS c WHERE c.account = m.account AND (c.observer = g.observer
            OR (g.observer = 'world' AND NOT EXISTS (SELECT 1 FROM plans AS w WHERE w.observer = 'world'
                AND w.run = c.run AND w.account IN (
                    SELECT population FROM members WHERE account = m.account)))))"""
        members = connection.execute(
            f"""
            SELECT MIN(m.account) FROM members AS m JOIN grants AS g ON g.account = m.account
            WHERE m.population = :p AND (g.observer = 'world' OR :server)
            GROUP BY g.observer, g.unit, g.epsilon, g.delta,
                (SELECT GROUP_CONCAT(population) FROM (
                    SELECT population FROM members WHERE account = m.account ORDER BY population)),
                CASE WHEN {own.format("plans")} OR {own.format("charges")} THEN m.account END
            """,
            {"p": account, "server": observers != {"world"}},
        ).fetchall()
        return [row[0] for row in members] or [account]

    def _pays(
        self, payer: str, keys: frozenset[PlanKey], before: tuple[str, int] | None = None
    ) -> bool:
        """As :meth:`_admits`; where whole plans count, the answer stands until plans or budgets
        change.
        """
        if not self._filter.reserves:
            return self._admits(payer, keys, before)
        version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self._covered.clear()
            self._version = version
        if (payer, keys) not in self._covered:
            self._covered[payer, keys] = self._admits(payer, keys)
        return self._covered[payer, keys]

    def _admits(
        self, payer: str, keys: frozenset[PlanKey], before: tuple[str, int] | None = None
    ) -> bool:
        """Whether one account's own budget admits one more release of these plans, or the whole of
        them.
        """
        grant = self.budget_of(payer)
        if grant is None or grant.observer is None or grant.unit is None:
            return True
        seen = self.committed(payer, grant.observer, before=before)
        concerned = [(plan.run, plan.account, str(plan.observer)) in keys for plan in seen]
        if not any(concerned):
            return True  # the adversary of this budget does not see the release
        counted = [
            replace(plan, used=plan.used + own) for plan, own in zip(seen, concerned, strict=True)
        ]
        portions = self.portions(counted)
        limit = _limit(portions, grant, grant.unit)
        return limit is not None and self._filter.admits(portions, limit)


def _limit(portions: Sequence[Portion], grant: Budget, unit: Unit) -> Limit | None:
    """Read a budget for these portions; None if they say nothing of its unit."""
    tab = account_history((portion.cost, portion.count) for portion in portions)
    adjacency = None if tab is None else tab.adjacency_as(unit)
    return (
        None
        if adjacency is None
        else Limit(epsilon=grant.epsilon, delta=grant.delta, adjacency=adjacency)
    )


@lru_cache(maxsize=4096)
def written(cost: PrivacyCost) -> tuple[str, str]:
    """Return the digest under which a privacy cost is stored, and its text."""
    body = cost.to_json()
    return hashlib.sha256(body.encode()).hexdigest(), body
