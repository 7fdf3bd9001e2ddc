"""What can be read in a ledger without changing it: budgets, plans, charges and runs.

Every method asks the database. To see several answers as of one moment, read them inside
``with ledger.snapshot():``. An account is a client or a population; what concerns a client is what
was planned for or charged to itself and its populations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.core.types import Adjacency, Budget, Observer, Unit
from dpfl.privacy.accountant import Spend
from dpfl.privacy.costs import AccountHistory, PrivacyCost, account_history, written
from dpfl.privacy.filters import Portion
from dpfl.privacy.ledger_file import LedgerFile

UNKNOWN = Spend(
    epsilon=math.inf,
    delta=1.0,
    adjacency=Adjacency.REPLACE_ONE,
    accountant="none: no delta is known",
)
# The account itself and the populations that it belongs to.
OWN = "(SELECT :account UNION SELECT population FROM members WHERE account = :account)"
_NOT_A_POPULATION = "account NOT IN (SELECT population FROM members)"


@dataclass(frozen=True, kw_only=True)
class LedgerRun:
    """A run that a ledger knows; ``first`` and ``last`` are seconds since 1970."""

    run: str
    title: str
    seeded: bool
    first: float | None
    last: float | None
    last_round: int | None


@dataclass(frozen=True, kw_only=True)
class CommittedPlan:
    """A plan as stored, and what one account has used of it.

    ``account`` is the client's own, or one of its populations. ``used`` counts rounds, ``early``
    the releases before round one.
    """

    run: str
    account: str
    observer: Observer
    cost: PrivacyCost
    releases: int
    delta: float | None
    used: int
    early: int = 0

    def portion(self, *, whole: bool) -> Portion:
        """Return what counts: the whole plan, or what was used of it.

        Releases before round one count all together as soon as anything was charged.
        """
        count = self.releases if whole else self.used
        return Portion(cost=self.cost, count=count, delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class PricedPlan(CommittedPlan):
    """A plan with its price at the delta ``priced_at``; infinite where no delta is known."""

    epsilon: float
    priced_at: float | None
    adjacency: Adjacency
    accountant: str


class LedgerReader(LedgerFile):
    """The reading half of :class:`dpfl.privacy.ledger.Ledger`.

    >>> from dpfl.privacy.ledger import Ledger
    >>> ledger = Ledger.create(":memory:", "north")
    >>> budget = Budget(epsilon=1.0, delta=1e-5)
    >>> ledger.set_budgets({"north": budget}, unit=Unit.RECORD, observer=Observer.SERVER)
    >>> ledger.budget_of("north").epsilon, ledger.accounts(), ledger.observers("north")
    (1.0, ['north'], [])
    """

    # -- plans and privacy costs -------------------------------------------------------------------

    def committed(
        self, account: str, observer: Observer, *, before: tuple[str, int] | None = None
    ) -> list[CommittedPlan]:
        """Return the plans through which an adversary learns about an account.

        They are its own and its populations'. Against the world, a run counts by its world plans; a
        run without any counts by its server plans, because the world sees no more than the server.
        ``before`` (run, round) leaves out charges of that run from that round on.
        """
        run, round_ = before or (None, 0)
        seen = "p.observer = :observer"
        if observer is Observer.WORLD:
            seen = f"""(p.observer = 'world' OR (p.observer = 'server' AND NOT EXISTS (
                SELECT 1 FROM plans AS w
                WHERE w.account IN {OWN} AND w.observer = 'world' AND w.run = p.run)))"""
        charged = """(SELECT COUNT(*) FROM charges AS c
            WHERE c.plan = p.account AND c.observer = p.observer AND c.run = p.run
            AND c.account IN (p.account, :account)
            AND (:run IS NULL OR NOT (c.run = :run AND c.round >= :round)) AND c.round"""
        query = f"""SELECT p.run, p.account, p.observer, p.bill, p.releases, p.delta,
            {charged} >= 0), {charged} < 0)
            FROM plans AS p WHERE p.account IN {OWN} AND {seen}
            ORDER BY p.entry, p.run, p.account"""
        rows = self._rows(query, account=account, observer=str(observer), run=run, round=round_)
        return [
            CommittedPlan(
                run=run,
                account=owner,
                observer=Observer(against),
                cost=self._cost(digest),
                releases=releases,
                delta=delta,
                used=used,
                early=early,
            )
            for run, owner, against, digest, releases, delta, used, early in rows
        ]

    def portions(self, plans: Iterable[CommittedPlan]) -> list[Portion]:
        """Return what the ledger's filter counts: whole plans, or what was used of them."""
        whole = self._filter.reserves
        return [plan.portion(whole=whole) for plan in plans if whole or plan.used or plan.early]

    def plans(self, account: str) -> list[PricedPlan]:
        """Return every plan that was committed for an account, with its price under the filter.

        Each is priced at its own share of delta or, if it has none, at the budget's; epsilon is
        computed afresh.
        """
        with self.snapshot():
            budget, found = self.budget_of(account), []
            for observer in (Observer.SERVER, Observer.WORLD, Observer.NOBODY):
                plans = self.committed(account, observer)
                own = [plan for plan in plans if plan.observer is observer]
                counted = account_history((p.cost, p.count) for p in self.portions(own))
                found += [self._priced(plan, budget, counted) for plan in own]
        return found

    def _priced(
        self, plan: CommittedPlan, budget: Budget | None, counted: AccountHistory | None
    ) -> PricedPlan:
        portions = self.portions([plan])
        adjacency = plan.cost.adjacency
        readable: Adjacency | None = adjacency
        if counted is not None:
            unit = budget.unit if budget and budget.unit else counted.unit
            readable = counted.adjacency if budget is None else counted.adjacency_as(unit)
            adjacency = readable or counted.adjacency
        delta = plan.delta if plan.delta is not None else (budget.delta if budget else None)
        epsilon, accountant = 0.0, "nothing was charged"
        if portions:
            spent = UNKNOWN if delta is None else self._filter.spent(portions, delta, adjacency)
            epsilon, accountant = spent.epsilon, spent.accountant
        return PricedPlan(
            **vars(plan),
            epsilon=epsilon if readable else math.inf,
            priced_at=delta,
            adjacency=adjacency,
            accountant=accountant,
        )

    def history(self, account: str, observer: Observer) -> AccountHistory | None:
        """Everything charged to an account against an adversary, over all runs.

        This is a record, not a price. A plan's releases before round one count all together.
        """
        plans = self.committed(account, observer)
        return account_history((plan.cost, plan.used) for plan in plans if plan.used or plan.early)

    def _cost(self, digest: str) -> PrivacyCost:
        if digest not in self._costs:
            row = self._one("SELECT body FROM bills WHERE digest = :digest", digest=digest)
            cost = None if row is None else PrivacyCost.from_json(row[0])
            intact = cost is not None and written(cost)[0] == digest
            problem = f"privacy cost {digest[:12]} is missing or was changed"
            check(intact, self._name, problem, "restore the ledger from a backup", LedgerError)
            assert cost is not None
            self._costs[digest] = cost
        return self._costs[digest]

    # -- accounts ----------------------------------------------------------------------------------

    def accounts(self) -> list[str]:
        """Every client with a budget, a plan or a charge; populations by their members."""
        query = f"""SELECT account FROM grants UNION SELECT account FROM members
            UNION SELECT account FROM plans WHERE {_NOT_A_POPULATION}
            UNION SELECT account FROM charges WHERE {_NOT_A_POPULATION}"""
        return sorted(account for (account,) in self._rows(query))

    def budgets(self) -> dict[str, Budget]:
        """What each account enforces."""
        rows = self._rows("SELECT account, observer, unit, epsilon, delta FROM grants")
        return {account: _budget(*values) for account, *values in rows}

    def budget_of(self, account: str) -> Budget | None:
        """What one account enforces, if it said so."""
        query = "SELECT observer, unit, epsilon, delta FROM grants WHERE account = :account"
        row = self._one(query, account=account)
        return None if row is None else _budget(*row)

    def observers(self, account: str) -> list[Observer]:
        """Against whom the account was charged or, where whole plans count, planned."""
        query = f"SELECT DISTINCT observer FROM charges WHERE account IN {OWN}"
        if self._filter.reserves:
            query += f" UNION SELECT observer FROM plans WHERE account IN {OWN}"
        return sorted(Observer(name) for (name,) in self._rows(query, account=account))

    def participations(self, account: str, observer: Observer) -> int:
        """How many rounds were charged to the account, itself or through a population."""
        query = f"""SELECT COUNT(*) FROM charges
            WHERE observer = :observer AND account IN {OWN} AND round >= 0"""
        return int(self._one(query, account=account, observer=str(observer))[0])

    def members(self, population: str) -> list[str]:
        """Return the accounts that a population stands for."""
        query = "SELECT account FROM members WHERE population = :name ORDER BY account"
        return [account for (account,) in self._rows(query, name=population)]

    # -- runs --------------------------------------------------------------------------------------

    def charged(self, run: str, observer: Observer = Observer.SERVER) -> set[tuple[int, str]]:
        """Return every (round, account) that a run has charged against an adversary."""
        query = "SELECT round, account FROM charges WHERE run = :run AND observer = :observer"
        return set(self._rows(query, run=run, observer=str(observer)))

    def planned(self, run: str, observer: Observer) -> dict[str, int]:
        """Return how many rounds each account of a run is planned for, against an adversary."""
        query = "SELECT account, releases FROM plans WHERE run = :run AND observer = :observer"
        return dict(self._rows(query, run=run, observer=str(observer)))

    def last_round(self, run: str) -> int | None:
        """Return the newest round of a run that was charged to anyone."""
        query = "SELECT MAX(round) FROM journal WHERE run = :run AND round >= 0"
        (found,) = self._one(query, run=run)
        return None if found is None else int(found)

    def titles(self) -> dict[str, str]:
        """Return every run and what it was called."""
        return dict(self._rows("SELECT run, title FROM runs ORDER BY run"))

    def studies(self) -> list[LedgerRun]:
        """Every run with its times, the oldest first."""
        query = """SELECT runs.run, title, seeded, MIN(at), MAX(at),
                MAX(CASE WHEN round >= 0 THEN round END) FROM runs
            LEFT JOIN journal ON journal.run = runs.run
            GROUP BY runs.run ORDER BY MIN(at), runs.run"""
        names = LedgerRun.__dataclass_fields__
        found = (dict(zip(names, row, strict=True)) for row in self._rows(query))
        return [LedgerRun(**{**row, "seeded": bool(row["seeded"])}) for row in found]

    def seeded_runs(self) -> list[str]:
        """Runs whose noise anyone with the seed can reproduce."""
        return [run for (run,) in self._rows("SELECT run FROM runs WHERE seeded ORDER BY run")]


def _budget(observer: str, unit: str, epsilon: float, delta: float) -> Budget:
    return Budget(epsilon=epsilon, delta=delta, unit=Unit(unit), observer=Observer(observer))
