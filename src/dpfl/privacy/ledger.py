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
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.admission import POPULATION, Admission, OpenPlans
from dpfl.privacy.chain import Entry, Row, Value
from dpfl.privacy.costs import Charge, PrivacyPlan, written
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger_file import backup
from dpfl.privacy.ledger_reader import OWN

__all__ = ["Ledger", "backup", "open_ledger"]

Columns = dict[str, Value]
_KIN = """(SELECT :account UNION SELECT population FROM members WHERE account = :account
           UNION SELECT account FROM members WHERE population = :account)"""

_BUDGET = "epsilon {epsilon} at delta {delta} per {unit} against the {observer}"


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
        self._require(bool(run), "a run without a name", "name it")
        problem = f"knows run {run} with another kind of randomness"
        with self._transaction() as entry:
            if self._is_new("runs", {"run": run}, {"seeded": seeded}, problem, "name it otherwise"):
                entry.insert("runs", [(run, seeded, title)])

    def set_budgets(self, budgets: Mapping[str, Budget], *, unit: Unit, observer: Observer) -> None:
        """Write down what each account enforces; another budget for a known account is refused.

        ``unit`` and ``observer`` are taken where a budget does not name its own.
        """
        remedy = "put the budget back: in this ledger it is fixed for good"
        self._covered.clear()
        with self._transaction() as entry:
            new: list[Row] = []
            for account, budget in budgets.items():
                against = budget.observer or observer
                per = budget.unit or unit
                own = Budget(epsilon=budget.epsilon, delta=budget.delta, unit=per, observer=against)
                known = self.budget_of(account)
                before, asked = (_BUDGET.format(**vars(one)) for one in (known or own, own))
                problem = f"the budget of '{account}' is {before}, not {asked}"
                self._require(known in (None, own), problem, remedy)
                if known is None:
                    new.append((account, against, per, own.epsilon, own.delta))
            entry.insert("grants", new)

    def population(self, accounts: Sequence[str]) -> str:
        """Name the account of clients that are always charged alike; membership is stored once.

        Equal sets of clients give equal names, in whatever order they are listed.
        """
        name = POPULATION + hashlib.sha256(json.dumps(sorted(accounts)).encode()).hexdigest()[:32]
        self._covered.clear()
        with self._transaction() as entry:
            if not self.members(name):
                entry.insert("members", [(account, name) for account in dict.fromkeys(accounts)])
        return name

    def _is_new(self, table: str, key: Columns, values: Columns, problem: str, remedy: str) -> bool:
        """Whether a row is not there yet; the same key with other values is refused."""
        known = self._select(", ".join(values), table, **key)
        self._require(known in ([], [tuple(values.values())]), problem, remedy)
        return not known

    # -- plans -------------------------------------------------------------------------------------

    def commit(self, run: str, plans: Sequence[PrivacyPlan]) -> frozenset[str]:
        """Fix, durably, what a run may release at most.

        Returns the accounts whose budget cannot cover their plans; nothing is committed of those.
        The same plan again is free; another plan under the same run, account and observer is
        refused. Under "allotments" the whole price is taken now. Under the other filters nothing is
        reserved, and an account is returned if its budget does not cover one round together with
        all releases before round one.
        """
        if any(plan.account.startswith(POPULATION) for plan in plans):
            self._covered.clear()
        with self._transaction() as entry:
            known = bool(self._select("1", "runs", run=run))
            self._require(known, f"run {run} is not known", "register it before it plans anything")
            whole = {plan.cost for plan in plans}
            parts = {part for cost in whole for part in (cost.of_round, *cost.of_releases)}
            texts = [written(cost) for cost in whole | parts]
            entry.connection.executemany("INSERT OR IGNORE INTO bills VALUES (?, ?)", texts)
            accepted: dict[str, list[Row]] = {}
            refused: set[str] = set()

            def take_back(accounts: Iterable[str]) -> bool:
                """Take back what is not payable of these; whether there was anything."""
                failed = [one for one in accounts if not self._plannable(one, accepted[one])]
                for row in [row for one in failed for row in accepted.pop(one)]:
                    entry.retract_plan(row)
                refused.update(failed)
                return bool(failed)

            # World plans first: they decide whether a server plan also counts against the world.
            for plan in sorted(plans, key=lambda plan: plan.observer is not Observer.WORLD):
                row = self._new_plan(entry, run, plan)
                if row is not None and plan.account not in refused:
                    entry.insert("plans", [row])
                    accepted.setdefault(plan.account, []).append(row)
                    take_back([plan.account])
            # Where a world plan was taken back, the server plans of its members count against the
            # world after all.
            while refused and take_back(list(accepted)):
                pass
        return frozenset(refused)

    def _new_plan(self, entry: Entry, run: str, plan: PrivacyPlan) -> Row | None:
        """Return the row of a plan that is not there yet; None if it is."""
        self.rule.check(plan.account, plan.cost)
        self._refuse_another_unit(plan)
        key: Columns = {"run": run, "account": plan.account, "observer": plan.observer}
        digest, _ = written(plan.cost)
        values: Columns = {"bill": digest, "releases": plan.releases, "delta": plan.delta}
        problem = f"run {run} has another plan for '{plan.account}' against the {plan.observer}"
        if not self._is_new(
            "plans", key, values, problem, "keep to the plan, or begin another run"
        ):
            return None
        if plan.observer is Observer.WORLD:
            self._refuse_late_world_plan(run, plan.account)
        return (*key.values(), *values.values())

    def _refuse_another_unit(self, plan: PrivacyPlan) -> None:
        """An account is charged per record or per person, never both: the two do not add up."""
        unit = plan.cost.unit
        account = plan.account
        if not unit.of_data:
            return
        rows = self._rows(
            f"SELECT DISTINCT bill FROM plans WHERE account IN {OWN}", account=account
        )
        known = {self._cost(digest).unit for (digest,) in rows}
        if budget := self.budget_of(account):
            known.add(budget.unit or unit)
        other = next((one for one in sorted(known) if one.of_data and one is not unit), unit)
        problem = f"'{account}' is accounted per {other}, and this run protects each {unit}"
        remedy = "use another ledger: an epsilon of one unit says nothing of the other"
        self._require(other is unit, problem, remedy)

    def _refuse_late_world_plan(self, run: str, account: str) -> None:
        """A world plan after releases to the server would lower what the world has seen."""
        query = f"""SELECT 1 FROM charges
            WHERE observer = 'server' AND run = :run AND account IN {_KIN} AND NOT EXISTS (
                SELECT 1 FROM plans
                WHERE observer = 'world' AND run = :run AND account IN {OWN})"""
        late = self._rows(query + " LIMIT 1", run=run, account=account)
        problem = f"run {run} was already charged to '{account}' against the server and the world"
        self._require(not late, problem, "plan against the world before the first release")

    def _plannable(self, account: str, rows: Sequence[Row]) -> bool:
        keys = frozenset((str(run), str(owner), str(against)) for run, owner, against, *_ in rows)
        return all(self._admits(payer, keys) for payer in self._payers(account, keys))

    # -- charges -----------------------------------------------------------------------------------

    def charge(self, run: str, round_: int, charges: Sequence[Charge]) -> frozenset[str]:
        """Charge, durably and in one transaction; returns the accounts that were refused.

        Each charge uses up one release of a committed plan of the account or of one of its
        populations. A refused account is charged nothing: it has no such release left, or the
        filter does not admit it. An account without any plan is an error.
        """
        with self._transaction() as entry:
            return frozenset(self._charge(entry, run, round_, charges))

    def _charge(self, entry: Entry, run: str, round_: int, charges: Sequence[Charge]) -> set[str]:
        """Charge inside a transaction, which may write more that belongs to the charges."""
        by_account: dict[str, list[Charge]] = {}
        for charge in charges:
            by_account.setdefault(charge.account, []).append(charge)
        open_plans = self._open_plans(run, round_, charges, replayed=False)
        query = """SELECT account, observer, bill, draw FROM charges
            WHERE account IN (SELECT value FROM json_each(:accounts))
            AND observer IN (SELECT value FROM json_each(:observers))
            AND run = :run AND round = :round"""
        paid: dict[tuple[str, str], Row] = {}
        if open_plans.newest is not None and open_plans.newest >= round_:
            accounts = json.dumps(list(by_account))
            observers = json.dumps(list(Observer))
            values = {"run": run, "round": round_, "accounts": accounts, "observers": observers}
            for account, observer, *cost_and_draw in self._rows(query, **values):
                paid[account, observer] = tuple(cost_and_draw)
        refused = set()
        for account, own in by_account.items():
            rows = self._accepted(own, open_plans, paid)
            if rows is None:
                refused.add(account)
            else:
                entry.insert("charges", rows)
                open_plans.use(rows)
        if entry.rows["charges"] or not self._select("1", "journal", run=run, round=round_):
            entry.insert("journal", [(run, round_, time.time())])
        return refused

    def _accepted(
        self,
        charges: Sequence[Charge],
        open_plans: OpenPlans,
        paid: Mapping[tuple[str, str], Row],
    ) -> list[Row] | None:
        """Return the rows that charge one account, without replays; None if any is refused.

        ``paid`` are cost and draw of what was charged for this round before.
        """
        run = open_plans.run
        round_ = open_plans.round
        rows: list[Row] = []
        for charge in charges:
            account = charge.account
            observer = charge.observer
            digest = written(charge.cost)[0]
            if (account, observer) in paid:
                # What is drawn anew has no token, and is never the charge that is there.
                problem = f"round {round_} of run {run} was already charged to '{account}'"
                same = charge.draw != "" and paid[account, observer] == (digest, charge.draw)
                self._require(same, problem, "go on with the next round")
                continue
            owner = self._plan_for(charge, open_plans)
            problem = f"run {run} was not planned for '{account}' against the {observer}"
            self._require(owner is not None, problem, "commit a plan before the first release")
            if not owner:
                return None
            rows.append((run, round_, account, observer, owner, digest, charge.draw))
        return rows


def open_ledger(path: Path | str | None, new: bool, rule: FilterName) -> Ledger:
    """Open a ledger file that spans runs, or make one in memory if there is no path.

    A file that is not there is refused, since it may have been mislaid, unless it is ``new``;
    ``rule`` is the filter of a new one.
    """
    if path is None:
        return Ledger.create(":memory:", "memory")
    check(
        new or Path(path).exists(),
        str(path),
        "there is no ledger",
        "check the path, or say new_ledger=True for its first run",
        LedgerError,
    )
    return Ledger.create(path, uuid.uuid4().hex, filter=rule) if new else Ledger.open(path)
