"""The ledger: what every account was planned for and charged, as stored events, in one SQLite file.

*Formal guarantees.* A run commits its plan before its first release, and every charge uses up one
planned release. A charge is committed (WAL, ``synchronous=FULL``) before :meth:`Ledger.charge`
returns, hence before anything it pays for is drawn or released. Reading, checking and inserting
happen in one ``BEGIN IMMEDIATE`` transaction, so no number of processes can exceed a budget
together. Nothing is ever refunded. Inside a plan the price is the PLD of the whole plan; across
plans, which may be chosen by looking at earlier outputs, a proven filter decides
(:mod:`dpfl.privacy.filters`). Epsilon is never stored: it is derived from the events each time. All
rows form a hash chain (:mod:`dpfl.privacy.chain`).

A charge's key is (run, round, account, observer). Releases before round one have the rounds -R to
-1. A second charge under the same key is a *replay*: allowed, and free, only for the same cost with
the same non-empty ``draw`` token, that is for a simulation that will repeat the same bytes.

An account is a client, or a whole population that is always charged alike (one row for 100,000
clients). What the world sees is a function of what the server sees: a run without a plan against
the world counts there by its server plan.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.admission import POPULATION, Admission, Release
from dpfl.privacy.chain import Entry, Row
from dpfl.privacy.costs import Charge, PrivacyPlan, written
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger_file import backup
from dpfl.privacy.ledger_reader import OWN
from dpfl.privacy.ledger_schema import FORMAT

__all__ = ["FORMAT", "FilterName", "Ledger", "PrivacyPlan", "backup"]

_KIN = """(SELECT :account UNION SELECT population FROM members WHERE account = :account
           UNION SELECT account FROM members WHERE population = :account)"""


class Ledger(Admission):
    """An open ledger. Use :meth:`create` once, :meth:`open` ever after: a missing file is refused.

    >>> from dpfl.core.types import Adjacency
    >>> from dpfl.privacy.costs import PrivacyCost
    >>> from dpfl.privacy.events import Event
    >>> ledger = Ledger.create(":memory:", "example")
    >>> ledger.register("run", seeded=True, title="an example")
    >>> events = (Event(noise_multiplier=10.0),)
    >>> cost = PrivacyCost(unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, events=events)
    >>> plan = PrivacyPlan(account="a", observer=Observer.SERVER, cost=cost, releases=1)
    >>> ledger.commit("run", [plan])
    frozenset()
    >>> charge = Charge(account="a", observer=Observer.SERVER, cost=cost)
    >>> ledger.charge("run", 0, [charge]), ledger.charge("run", 1, [charge])
    (frozenset(), frozenset({'a'}))
    """

    # -- runs, budgets, populations ----------------------------------------------------------------

    def register(self, run: str, *, seeded: bool, title: str) -> None:
        """Name a run before it plans anything; naming it again is harmless if it is the same.

        ``seeded`` says that anyone who knows the seed can reproduce its noise.
        """
        check(bool(run), self._name, "a run without a name", "name it", LedgerError)
        with self._transaction() as entry:
            row = self._one("SELECT seeded FROM runs WHERE run = :run", run=run)
            problem = f"knows run {run} with another kind of randomness"
            same = row is None or bool(row[0]) == seeded
            check(same, self._name, problem, "give the run another name", LedgerError)
            if row is None:
                entry.insert("runs", [(run, int(seeded), title)])

    def set_budgets(self, budgets: Mapping[str, Budget], *, unit: Unit, observer: Observer) -> None:
        """Write down what each account enforces; another budget for a known account is refused.

        ``unit`` and ``observer`` are taken where a budget does not name its own.
        """
        query = "SELECT observer, unit, epsilon, delta FROM grants WHERE account = :account"
        self._covered.clear()
        with self._transaction() as entry:
            new: list[Row] = []
            for account, budget in budgets.items():
                against, per = str(budget.observer or observer), str(budget.unit or unit)
                row = (against, per, budget.epsilon, budget.delta)
                known = self._one(query, account=account)
                problem = f"the budget of '{account}' is {_words(known or row)}, not {_words(row)}"
                remedy = "put the budget back: in this ledger it is fixed for good"
                check(known in (None, row), self._name, problem, remedy, LedgerError)
                if known is None:
                    new.append((account, *row))
            entry.insert("grants", new)

    def population(self, accounts: Sequence[str]) -> str:
        """Name the account of clients that are always charged alike; membership is stored once.

        Equal sets of clients give equal names, in whatever order they are listed.
        """
        name = POPULATION + hashlib.sha256(json.dumps(sorted(accounts)).encode()).hexdigest()[:32]
        self._covered.clear()
        with self._transaction() as entry:
            if not self._one("SELECT 1 FROM members WHERE population = :name LIMIT 1", name=name):
                entry.insert("members", [(account, name) for account in dict.fromkeys(accounts)])
        return name

    # -- plans -------------------------------------------------------------------------------------

    def commit(self, run: str, plans: Sequence[PrivacyPlan]) -> frozenset[str]:
        """Fix, durably, what a run may release at most.

        Returns the accounts whose budget cannot cover their plans; nothing is committed of those.
        The same plan again is free; another plan under the same run, account and observer is
        refused. Under "allotments" the whole price is taken now. Under the other filters nothing is
        reserved, and an account is returned if its budget does not cover one round together with
        all releases before round one.
        """
        self._covered.clear()
        with self._transaction() as entry:
            known = self._one("SELECT 1 FROM runs WHERE run = :run", run=run) is not None
            remedy = "register it before it plans anything"
            check(known, self._name, f"run {run} is not known", remedy, LedgerError)
            accepted: dict[str, list[Row]] = {}
            refused: set[str] = set()

            def take_back(accounts: Sequence[str]) -> None:
                for account in accounts:
                    entry.retract("plans", accepted.pop(account))
                refused.update(accounts)

            # World plans first: they decide whether a server plan also counts against the world.
            for plan in sorted(plans, key=lambda plan: plan.observer is not Observer.WORLD):
                row = self._new_plan(entry, run, plan)
                if row is None or plan.account in refused:
                    continue
                entry.insert("plans", [row])
                accepted.setdefault(plan.account, []).append(row)
                if not self._plannable(plan.account, accepted[plan.account]):
                    take_back([plan.account])
            # Where a world plan was taken back, the server plans of its members count against the
            # world after all.
            failed = list(refused)
            while failed:
                failed = [one for one, rows in accepted.items() if not self._plannable(one, rows)]
                take_back(failed)
        self._covered.clear()
        return frozenset(refused)

    def _new_plan(self, entry: Entry, run: str, plan: PrivacyPlan) -> Row | None:
        """Return the row of a plan that is not there yet; None if it is."""
        self._filter.check(plan.account, plan.cost)
        costs = (plan.cost, plan.cost.of_round, *plan.cost.of_releases)
        rows = [written(cost) for cost in costs]
        entry.connection.executemany("INSERT OR IGNORE INTO bills VALUES (?, ?)", rows)
        key = {"run": run, "account": plan.account, "observer": str(plan.observer)}
        values = (rows[0][0], plan.releases, plan.delta)
        query = """SELECT bill, releases, delta FROM plans
            WHERE run = :run AND account = :account AND observer = :observer"""
        known = self._one(query, **key)
        problem = f"run {run} has another plan for '{plan.account}' against the {plan.observer}"
        remedy = "keep to the plan, or begin another run: a committed plan is not changed"
        check(known in (None, values), self._name, problem, remedy, LedgerError)
        if known is None and plan.observer is Observer.WORLD:
            self._refuse_late_world_plan(run, plan.account)
        return (*key.values(), *values) if known is None else None

    def _refuse_late_world_plan(self, run: str, account: str) -> None:
        """A world plan after releases to the server would lower what the world has seen."""
        charged = f"""SELECT 1 FROM charges
            WHERE observer = 'server' AND run = :run AND account IN {_KIN}"""
        planned = f"""SELECT 1 FROM plans
            WHERE observer = 'world' AND run = :run AND account IN {OWN}"""
        place = {"run": run, "account": account}
        late = self._one(charged, **place) is not None and self._one(planned, **place) is None
        problem = f"run {run} was already charged to '{account}' against the server and the world"
        remedy = "plan against the world before the first release, or not at all"
        check(not late, self._name, problem, remedy, LedgerError)

    def _plannable(self, account: str, rows: Sequence[Row]) -> bool:
        keys = frozenset((str(run), str(owner), str(against)) for run, owner, against, *_ in rows)
        payers = self._payers(account, {against for _, _, against in keys})
        return all(self._admits(payer, keys) for payer in payers)

    # -- charges -----------------------------------------------------------------------------------

    def charge(
        self,
        run: str,
        round_: int,
        charges: Sequence[Charge],
        *,
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> frozenset[str]:
        """Charge, durably and in one transaction; returns the accounts that were refused.

        Each charge uses up one release of a committed plan of the account or of one of its
        populations. A refused account is charged nothing: it has no such release left, or the
        filter does not admit it. An account without any plan is an error. ``also`` writes what
        belongs to the charge into the same transaction, if nobody was refused.
        """
        by_account: dict[str, list[Charge]] = {}
        for charge in charges:
            by_account.setdefault(charge.account, []).append(charge)
        refused, new = set(), False
        with self._transaction() as entry:
            for account, own in by_account.items():
                rows = self._accepted(run, round_, own)
                if rows is None:
                    refused.add(account)
                elif rows:
                    entry.insert("charges", rows)
                    new = True
            known = "SELECT 1 FROM journal WHERE run = :run AND round = :round"
            if new or self._one(known, run=run, round=round_) is None:
                entry.insert("journal", [(run, round_, time.time())])
            if also is not None and not refused:
                also(entry.connection)
        return frozenset(refused)

    def _accepted(self, run: str, round_: int, charges: Sequence[Charge]) -> list[Row] | None:
        """Return the rows that charge one account, without replays; None if any is refused."""
        rows: list[Row] = []
        for charge in charges:
            if self._replayed(run, round_, charge):
                continue
            account, observer = charge.account, str(charge.observer)
            release = Release(run, round_, account, observer, charge.cost)
            owner = self._plan_left(release)
            problem = f"run {run} was not planned for '{account}' against the {observer}"
            remedy = "commit a plan before the first release"
            check(owner is not None, self._name, problem, remedy, LedgerError)
            if not owner or not self._paid(release, owner):
                return None
            digest = written(charge.cost)[0]
            rows.append((run, round_, account, observer, owner, digest, charge.draw))
        return rows

    def _replayed(self, run: str, round_: int, charge: Charge) -> bool:
        """Whether this very charge is there already; another one under its key is refused."""
        query = """SELECT bill, draw FROM charges WHERE run = :run AND round = :round
            AND account = :account AND observer = :observer"""
        place = {"account": charge.account, "observer": str(charge.observer)}
        known = self._one(query, run=run, round=round_, **place)
        same = charge.draw != "" and known == (written(charge.cost)[0], charge.draw)
        problem = f"round {round_} of run {run} was already charged to '{charge.account}'"
        remedy = "go on with the next round: a charged round is not repeated with fresh randomness"
        check(known is None or same, self._name, problem, remedy, LedgerError)
        return known is not None


def _words(row: tuple[str, str, float, float]) -> str:
    observer, unit, epsilon, delta = row
    return f"epsilon {epsilon} at delta {delta} per {unit} against the {observer}"
