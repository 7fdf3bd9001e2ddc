"""What can be read in a ledger without changing it: budgets, plans, charges and runs."""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from dpfl.core.errors import LedgerError
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import Spend
from dpfl.privacy.costs import AccountHistory, PrivacyCost, account_history
from dpfl.privacy.filters import Portion
from dpfl.privacy.ledger_file import LedgerFile

UNKNOWN = Spend(
    epsilon=math.inf,
    delta=1.0,
    adjacency=Adjacency.REPLACE_ONE,
    accountant="none: no delta is known",
)
OWN = "(SELECT :account UNION SELECT population FROM members WHERE account = :account)"
_GRANT = "SELECT observer, unit, epsilon, delta FROM grants WHERE account = ?"


@dataclass(frozen=True, kw_only=True)
class LedgerRun:
    """A run that a ledger knows, and when it was charged."""

    run: str
    title: str
    seeded: bool
    first: float | None  # seconds since 1970
    last: float | None
    last_round: int | None


@dataclass(frozen=True, kw_only=True)
class CommittedPlan:
    """A plan as stored, and how many of its releases one account has used."""

    run: str
    account: str  # the client's own, or one of its populations
    observer: Observer
    cost: PrivacyCost
    releases: int
    delta: float | None
    used: int

    def portion(self, *, whole: bool) -> Portion:
        """Return what counts: the whole plan, or what was used of it."""
        return Portion(
            cost=self.cost, count=self.releases if whole else self.used, delta=self.delta
        )


@dataclass(frozen=True, kw_only=True)
class PricedPlan(CommittedPlan):
    """A plan with its price under the ledger's filter; infinite where no delta is known."""

    epsilon: float
    priced_at: float | None  # the delta
    adjacency: Adjacency
    accountant: str


class LedgerReader(LedgerFile):
    """The reading half of :class:`dpfl.privacy.ledger.Ledger`."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        super().__init__(connection, name)
        self._parsed: dict[str, PrivacyCost] = {}

    # -- plans and privacy costs -------------------------------------------------------------------

    def committed(
        self, account: str, observer: Observer, *, before: tuple[str, int] | None = None
    ) -> list[CommittedPlan]:
        """Return the plans through which an adversary learns about an account, its own and its
        populations'.

        Against the world, a run counts by its world plans; a run without any counts by its server
        plans, because the world sees no more than the server. ``before`` (run, round) leaves out
        charges of that run from that round on.
        """
        run, round_ = before or (None, 0)
        seen = "p.observer = :observer"
        if observer is Observer.WORLD:
            seen = f"""(p.observer = 'world' OR (p.observer = 'server' AND NOT EXISTS (
                SELECT 1 FROM plans AS w
                WHERE w.account IN {OWN} AND w.observer = 'world' AND w.run = p.run)))"""
        query = f"""SELECT p.run, p.account, p.observer, p.bill, p.releases, p.delta,
                (SELECT COUNT(*) FROM charges AS c WHERE c.plan = p.account AND c.observer = p.observer
                AND c.run = p.run AND c.account IN (p.account, :account)
                AND (:run IS NULL OR NOT (c.run = :run AND c.round >= :round)))
            FROM plans AS p WHERE p.account IN {OWN} AND {seen} ORDER BY p.entry, p.run, p.account"""
        place = {"account": account, "observer": str(observer), "run": run, "round": round_}
        with self._guard():
            rows = self._connection.execute(query, place).fetchall()
        return [
            CommittedPlan(
                run=row[0],
                account=row[1],
                observer=Observer(row[2]),
                cost=self._bill(row[3]),
                releases=row[4],
                delta=row[5],
                used=row[6],
            )
            for row in rows
        ]

    def portions(self, plans: Iterable[CommittedPlan]) -> list[Portion]:
        """Return what the ledger's filter counts: whole plans, or what was used of them."""
        found = (plan.portion(whole=self._filter.reserves) for plan in plans)
        return [portion for portion in found if portion.count]

    def plans(self, account: str) -> list[PricedPlan]:
        """Return every plan that was committed for an account, with its price under the ledger's
        filter.

        Each is priced at its own share of delta or, if it has none, at the budget's; epsilon is
        computed afresh.
        """
        with self.snapshot():
            grant, found = self.budget_of(account), []
            for observer in (Observer.SERVER, Observer.WORLD, Observer.NOBODY):
                own = [
                    plan for plan in self.committed(account, observer) if plan.observer is observer
                ]
                tab = account_history(
                    (portion.cost, portion.count) for portion in self.portions(own)
                )
                found += [self._priced(plan, grant, tab) for plan in own]
        return found

    def _priced(
        self, plan: CommittedPlan, grant: Budget | None, tab: AccountHistory | None
    ) -> PricedPlan:
        portions = self.portions([plan])
        adjacency = plan.cost.adjacency if tab is None else tab.adjacency
        readable = (
            adjacency if tab is None or grant is None else tab.adjacency_as(grant.unit or tab.unit)
        )
        delta = plan.delta if plan.delta is not None else (grant.delta if grant else None)
        spent = Spend(
            epsilon=0.0, delta=delta or 1.0, adjacency=adjacency, accountant="nothing was charged"
        )
        if portions and delta is None:
            spent = UNKNOWN
        elif portions and delta is not None:
            spent = self._filter.spent(portions, delta, readable or adjacency)
        return PricedPlan(
            **vars(plan),
            epsilon=spent.epsilon if readable else math.inf,
            priced_at=delta,
            adjacency=readable or adjacency,
            accountant=spent.accountant,
        )

    def tab(self, account: str, observer: Observer) -> AccountHistory | None:
        """Everything charged to an account against an adversary, over all runs: a record, not a
        price.
        """
        return account_history(
            (plan.cost, plan.used) for plan in self.committed(account, observer) if plan.used
        )

    def _bill(self, digest: str) -> PrivacyCost:
        if digest not in self._parsed:
            with self._guard():
                row = self._connection.execute(
                    "SELECT body FROM bills WHERE digest = ?", (digest,)
                ).fetchone()
            if row is None or hashlib.sha256(row[0].encode()).hexdigest() != digest:
                raise LedgerError(
                    self._name,
                    f"privacy cost {digest[:12]} is missing or was changed",
                    "restore the ledger from a backup",
                )
            self._parsed[digest] = PrivacyCost.from_json(row[0])
        return self._parsed[digest]

    # -- accounts ----------------------------------------------------------------------------------

    def accounts(self) -> list[str]:
        """Every client with a budget, a plan or a charge; populations are listed by their members."""
        query = """SELECT account FROM grants UNION SELECT account FROM members
                   UNION SELECT account FROM plans WHERE account NOT IN (SELECT population FROM members)
                   UNION SELECT account FROM charges WHERE account NOT IN (SELECT population FROM members)"""
        with self._guard():
            return sorted(row[0] for row in self._connection.execute(query))

    def budgets(self) -> dict[str, Budget]:
        """What each account enforces."""
        with self._guard():
            rows = self._connection.execute(
                "SELECT account, observer, unit, epsilon, delta FROM grants"
            ).fetchall()
        return {row[0]: _budget(row[1:]) for row in rows}

    def budget_of(self, account: str) -> Budget | None:
        """What one account enforces, if it said so."""
        with self._guard():
            row = self._connection.execute(_GRANT, (account,)).fetchone()
        return None if row is None else _budget(row)

    def observers(self, account: str) -> list[Observer]:
        """Against whom the account was ever charged or, where a plan counts once it is committed,
        planned.
        """
        query = f"SELECT DISTINCT observer FROM charges WHERE account IN {OWN}"
        if self._filter.reserves:
            query += f" UNION SELECT observer FROM plans WHERE account IN {OWN}"
        with self._guard():
            return sorted(
                Observer(row[0]) for row in self._connection.execute(query, {"account": account})
            )

    def participations(self, account: str, observer: Observer) -> int:
        """How many rounds were charged to the account, itself or through a population."""
        query = f"SELECT COUNT(*) FROM charges WHERE observer = :observer AND account IN {OWN}"
        place = {"account": account, "observer": str(observer)}
        with self._guard():
            return int(self._connection.execute(query, place).fetchone()[0])

    def members(self, population: str) -> list[str]:
        """Return the accounts that a population stands for."""
        query = "SELECT account FROM members WHERE population = ? ORDER BY account"
        with self._guard():
            return [row[0] for row in self._connection.execute(query, (population,))]

    # -- runs --------------------------------------------------------------------------------------

    def charged(self, run: str, observer: Observer = Observer.SERVER) -> set[tuple[int, str]]:
        """Return every (round, account) that a run has charged against an observer."""
        query = "SELECT round, account FROM charges WHERE run = ? AND observer = ?"
        with self._guard():
            return set(self._connection.execute(query, (run, str(observer))).fetchall())

    def planned(self, run: str, observer: Observer) -> dict[str, int]:
        """Return how many rounds each account of a run has committed to at most, against an
        adversary.
        """
        query = "SELECT account, releases FROM plans WHERE run = ? AND observer = ?"
        with self._guard():
            return dict(self._connection.execute(query, (run, str(observer))).fetchall())

    def last_round(self, run: str) -> int | None:
        """Return the newest round of a run that was charged to anyone."""
        with self._guard():
            row = self._connection.execute(
                "SELECT MAX(round) FROM journal WHERE run = ?", (run,)
            ).fetchone()
        return None if row[0] is None else int(row[0])

    def titles(self) -> dict[str, str]:
        """Return every run and what it was called."""
        with self._guard():
            return dict(
                self._connection.execute("SELECT run, title FROM runs ORDER BY run").fetchall()
            )

    def studies(self) -> list[LedgerRun]:
        """Every run with its times, the oldest first."""
        query = """SELECT runs.run, title, seeded, MIN(at), MAX(at), MAX(round) FROM runs
                   LEFT JOIN journal ON journal.run = runs.run GROUP BY runs.run ORDER BY MIN(at), runs.run"""
        with self._guard():
            rows = self._connection.execute(query).fetchall()
        return [
            LedgerRun(
                run=run,
                title=title,
                seeded=bool(seeded),
                first=first,
                last=last,
                last_round=last_round,
            )
            for run, title, seeded, first, last, last_round in rows
        ]

    def seeded_runs(self) -> list[str]:
        """Runs whose noise anyone with the seed can reproduce."""
        with self._guard():
            return [
                row[0]
                for row in self._connection.execute(
                    "SELECT run FROM runs WHERE seeded ORDER BY run"
                )
            ]


def _budget(row: tuple[str, str, float, float]) -> Budget:
    return Budget(epsilon=row[2], delta=row[3], unit=Unit(row[1]), observer=Observer(row[0]))
