"""What can be read in a ledger without changing it: budgets, plans, charges and runs.

Every method asks the database. To see several answers as of one moment, read them inside
``with ledger.snapshot():``. An account is a client or a population; what concerns a client is what
was planned for or charged to itself and its populations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.chain import require
from dpfl.privacy.costs import PrivacyCost, adjacency_of, speak_of, written
from dpfl.privacy.events import History, merged
from dpfl.privacy.filters import Portion
from dpfl.privacy.ledger_file import LedgerFile

# The account itself and the populations that it belongs to.
OWN = "(SELECT :account UNION SELECT population FROM members WHERE account = :account)"

Round = tuple[str | None, int]  # run, round
ALL: Round = (None, 0)


@dataclass(frozen=True)
class LedgerRun:
    """A run that a ledger knows; ``first`` and ``last`` are seconds since 1970."""

    run: str
    title: str
    seeded: bool
    first: float | None
    last: float | None
    last_round: int | None


@dataclass(frozen=True)
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
    early: int


@dataclass(frozen=True)
class PricedPlan(CommittedPlan):
    """A plan with its price at the delta ``priced_at``; infinite where no delta is known."""

    epsilon: float
    priced_at: float | None


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
        self, account: str, observer: Observer, before: Round = ALL
    ) -> list[CommittedPlan]:
        """Return the plans through which an adversary learns about an account.

        They are its own and its populations'. Against the world, a run counts by its world plans; a
        run without any counts by its server plans, because the world sees no more than the server.
        ``before`` leaves out charges of that run from that round on.
        """
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
        place = {"account": account, "observer": observer, "run": before[0], "round": before[1]}
        return [
            CommittedPlan(run, owner, Observer(against), self._cost(digest), *rest)
            for run, owner, against, digest, *rest in self._rows(query, **place)
        ]

    def portions(self, plans: Iterable[CommittedPlan]) -> list[Portion]:
        """Return what the ledger's filter counts: whole plans, or what was used of them.

        Releases before round one count all together as soon as anything was charged.
        """
        whole = self.rule.reserves
        return [
            Portion(cost=plan.cost, count=plan.releases if whole else plan.used, delta=plan.delta)
            for plan in plans
            if whole or plan.used or plan.early
        ]

    def plans(self, account: str) -> list[PricedPlan]:
        """Return every plan that was committed for an account, with its price under the filter.

        Each is priced at its own share of delta or, if it has none, at the budget's; epsilon is
        computed afresh.
        """
        with self.snapshot():
            budget = self.budget_of(account)
            found = []
            unit = budget.unit if budget else None
            for observer in Observer:
                plans = self.committed(account, observer)
                own = [plan for plan in plans if plan.observer is observer]
                costs = [one.cost for one in self.portions(own)]
                for plan in own:
                    delta = budget.delta if budget and plan.delta is None else plan.delta
                    portions = self.portions([plan])
                    epsilon = math.inf
                    if speak_of(costs, unit) and (delta or not portions):
                        at = delta or 1.0
                        adjacency = adjacency_of(costs, unit)
                        epsilon = self.rule.spent(portions, at, adjacency).epsilon
                    found.append(PricedPlan(**vars(plan), epsilon=epsilon, priced_at=delta))
        return found

    def history(self, account: str, observer: Observer) -> History:
        """Everything charged to an account against an adversary, over all runs.

        This is a record, not a price. A plan's releases before round one count all together.
        """
        plans = [plan for plan in self.committed(account, observer) if plan.used or plan.early]
        return merged(event for plan in plans for event in plan.cost.times(plan.used))

    def _cost(self, digest: str) -> PrivacyCost:
        if digest not in self._costs:
            bodies = self._select("body", "bills", digest=digest)
            cost = PrivacyCost.from_json(bodies[0][0] if bodies else "")
            require(written(cost)[0] == digest, self._name, f"cost {digest[:12]} was changed")
            self._costs[digest] = cost
        return self._costs[digest]

    # -- accounts ----------------------------------------------------------------------------------

    def accounts(self) -> list[str]:
        """Every client with a budget, a plan or a charge; populations by their members."""
        query = """SELECT account FROM grants UNION SELECT account FROM members
            UNION SELECT account FROM (SELECT account FROM plans UNION SELECT account FROM charges)
                WHERE account NOT IN (SELECT population FROM members)"""
        return sorted(account for (account,) in self._rows(query))

    def budget_of(self, account: str) -> Budget | None:
        """What an account enforces, if it said so; it names its unit and its adversary."""
        if account not in self._budgets:
            columns = "epsilon, delta, unit, observer"
            for epsilon, delta, unit, against in self._select(columns, "grants", account=account):
                observer = Observer(against)
                budget = Budget(epsilon=epsilon, delta=delta, unit=Unit(unit), observer=observer)
                self._budgets[account] = budget
        return self._budgets.get(account)

    def observers(self, account: str) -> list[Observer]:
        """Against whom the account was charged or, where whole plans count, planned."""
        query = f"SELECT DISTINCT observer FROM charges WHERE account IN {OWN}"
        if self.rule.reserves:
            query += f" UNION SELECT observer FROM plans WHERE account IN {OWN}"
        return sorted(Observer(name) for (name,) in self._rows(query, account=account))

    def participations(self, account: str, observer: Observer) -> int:
        """How many rounds were charged to the account, itself or through a population."""
        query = f"""SELECT COUNT(*) FROM charges
            WHERE observer = :observer AND account IN {OWN} AND round >= 0"""
        return int(self._rows(query, account=account, observer=observer)[0][0])

    def members(self, population: str) -> list[str]:
        """Return the accounts that a population stands for."""
        rows = self._select("account", "members", population=population)
        return sorted(account for (account,) in rows)

    # -- runs --------------------------------------------------------------------------------------

    def charged(self, run: str, observer: Observer = Observer.SERVER) -> set[tuple[int, str]]:
        """Return every (round, account) that a run has charged against an adversary."""
        return set(self._select("round, account", "charges", run=run, observer=observer))

    def planned(self, run: str, observer: Observer) -> dict[str, int]:
        """Return how many rounds each account of a run is planned for, against an adversary."""
        return dict(self._select("account, releases", "plans", run=run, observer=observer))

    def studies(self) -> list[LedgerRun]:
        """Every run with its times, the oldest first."""
        query = """SELECT runs.run, title, seeded, MIN(at), MAX(at),
                MAX(CASE WHEN round >= 0 THEN round END) FROM runs
            LEFT JOIN journal ON journal.run = runs.run
            GROUP BY runs.run ORDER BY MIN(at), runs.run"""
        rows = self._rows(query)
        return [LedgerRun(run, title, bool(seeded), *rest) for run, title, seeded, *rest in rows]

    def last_charged(self, run: str) -> int | None:
        """Return the newest round of a run that was charged to anyone; a negative one is a release
        before round one.
        """
        ((newest,),) = self._rows("SELECT MAX(round) FROM journal WHERE run = :run", run=run)
        return None if newest is None else int(newest)

    def titles(self) -> dict[str, str]:
        """Return every run and what it was called."""
        return dict(sorted((one.run, one.title) for one in self.studies()))

    def seeded_runs(self) -> list[str]:
        """Runs whose noise anyone with the seed can reproduce."""
        return sorted(one.run for one in self.studies() if one.seeded)
