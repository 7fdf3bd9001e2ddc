"""The ledger: what every account was planned for and charged, as stored events, in one SQLite file.

*Formal guarantees.* A run commits its plan before its first release, and every charge uses up one
planned release. A charge is committed (WAL, ``synchronous=FULL``) before :meth:`Ledger.charge`
returns, hence before anything it pays for is drawn or released. Reading, checking and inserting
happen in one ``BEGIN IMMEDIATE`` transaction, so no number of processes can exceed a budget
together. Nothing is ever refunded. Inside a plan the price is the PLD of the whole plan; across
plans, which may be chosen by looking at earlier outputs, a proven filter decides
(:mod:`dpfl.privacy.filters`). Epsilon is never stored: it is derived from the events each time. All
rows form a hash chain (:mod:`dpfl.privacy.chain`).

A charge's key is (run, round, account, observer). A second charge under the same key is a *replay*:
allowed, and free, only for the same bill with the same non-empty ``draw`` token, that is for a
simulation that will repeat the same bytes.

An account is a client, or a whole population that is always charged alike (one row for 100,000
clients). What the world sees is a function of what the server sees: a run without a plan against
the world counts there by its server plan.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence

from dpfl.core.errors import LedgerError
from dpfl.core.types import Budget, Observer, Unit
from dpfl.privacy.admission import POPULATION, Admission, written
from dpfl.privacy.chain import Entry, Row
from dpfl.privacy.costs import Charge, PrivacyPlan
from dpfl.privacy.filters import FilterName
from dpfl.privacy.ledger_file import FORMAT, backup
from dpfl.privacy.ledger_reader import OWN

__all__ = ["FORMAT", "FilterName", "Ledger", "PrivacyPlan", "backup"]

_KIN = """(SELECT :account UNION SELECT population FROM members WHERE account = :account
           UNION SELECT account FROM members WHERE population = :account)"""


class Ledger(Admission):
    """An open ledger. Use :meth:`create` once, :meth:`open` ever after: a missing file is refused."""

    # -- runs, budgets, populations ----------------------------------------------------------------

    def register(self, run: str, *, seeded: bool, title: str) -> None:
        """Name a run before it plans anything; naming it again is harmless if it is the same."""
        if not run:
            raise LedgerError(self._name, "a run without a name", "name it")
        with self._transaction() as entry:
            row = entry.connection.execute(
                "SELECT seeded FROM runs WHERE run = ?", (run,)
            ).fetchone()
            if row is None:
                entry.insert("runs", [(run, int(seeded), title)])
            elif bool(row[0]) != seeded:
                raise LedgerError(
                    self._name,
                    f"knows run {run} with another kind of randomness",
                    "give the run another name",
                )

    def set_budgets(self, budgets: Mapping[str, Budget], *, unit: Unit, observer: Observer) -> None:
        """Write down what each account enforces. A different budget for a known account is refused."""
        rows: list[Row] = [
            (
                account,
                str(budget.observer or observer),
                str(budget.unit or unit),
                budget.epsilon,
                budget.delta,
            )
            for account, budget in budgets.items()
        ]
        self._covered.clear()
        with self._transaction() as entry:
            query = "SELECT account, observer, unit, epsilon, delta FROM grants WHERE account = ?"
            new = []
            for row in rows:
                known = entry.connection.execute(query, row[:1]).fetchone()
                if known is None:
                    new.append(row)
                elif known != row:
                    raise LedgerError(
                        self._name,
                        f"the budget of '{row[0]}' was granted epsilon {known[3]} at delta {known[4]} per "
                        f"{known[2]} against the {known[1]}, not {row[3]} at {row[4]} per {row[2]} against "
                        f"the {row[1]}",
                        "put the budget back: in this ledger it is fixed for good",
                    )
            entry.insert("grants", new)

    def population(self, accounts: Sequence[str]) -> str:
        """Name the account of clients that are always charged alike; membership is stored once."""
        name = POPULATION + hashlib.sha256(json.dumps(sorted(accounts)).encode()).hexdigest()[:32]
        self._covered.clear()
        with self._transaction() as entry:
            query = "SELECT 1 FROM members WHERE population = ? LIMIT 1"
            if entry.connection.execute(query, (name,)).fetchone() is None:
                entry.insert("members", [(account, name) for account in dict.fromkeys(accounts)])
        return name

    # -- plans -------------------------------------------------------------------------------------

    def commit(self, run: str, plans: Sequence[PrivacyPlan]) -> frozenset[str]:
        """Fix, durably, what a run may release at most; returns the accounts whose budget cannot
        cover it.

        Nothing is committed of a returned account. The same plan again is free; another plan under
        the same run, account and observer is refused. Under "allotments" the whole price is taken
        now. Under the other filters nothing is reserved, and an account is returned if its budget
        does not cover even one release.
        """
        self._covered.clear()
        with self._transaction() as entry:
            if (
                entry.connection.execute("SELECT 1 FROM runs WHERE run = ?", (run,)).fetchone()
                is None
            ):
                raise LedgerError(
                    self._name, f"run {run} is not known", "register it before it plans anything"
                )
            accepted: dict[str, list[Row]] = {}
            refused: set[str] = set()
            # The world's plans come first: they decide whether a server plan also counts against
            # the world.
            for plan in sorted(plans, key=lambda plan: plan.observer is not Observer.WORLD):
                row = self._new_plan(entry, run, plan)
                if row is None or plan.account in refused:
                    continue
                entry.insert("plans", [row])
                accepted.setdefault(plan.account, []).append(row)
                if not self._plannable(entry, plan.account, accepted[plan.account]):
                    entry.retract("plans", accepted.pop(plan.account))
                    refused.add(plan.account)
            # Where a world plan was taken back, its members' server plans count against the world
            # after all.
            again = bool(refused)
            while again:
                failed = [
                    one for one, rows in accepted.items() if not self._plannable(entry, one, rows)
                ]
                for one in failed:
                    entry.retract("plans", accepted.pop(one))
                refused.update(failed)
                again = bool(failed)
        self._covered.clear()
        return frozenset(refused)

    def _new_plan(self, entry: Entry, run: str, plan: PrivacyPlan) -> Row | None:
        """Return the row of a plan that is not there yet; None if it is."""
        self._filter.check(plan.account, plan.cost)
        digest, body = written(plan.cost)
        entry.connection.execute("INSERT OR IGNORE INTO bills VALUES (?, ?)", (digest, body))
        row: Row = (run, plan.account, str(plan.observer), digest, plan.releases, plan.delta)
        query = (
            "SELECT bill, releases, delta FROM plans WHERE run = ? AND account = ? AND observer = ?"
        )
        known = entry.connection.execute(query, row[:3]).fetchone()
        if known is not None and known != row[3:]:
            raise LedgerError(
                self._name,
                f"run {run} has another plan for '{plan.account}' against the {plan.observer}",
                "keep to the plan, or begin another run: a plan is not changed once it is committed",
            )
        if known is None and plan.observer is Observer.WORLD:
            self._refuse_late_world_plan(entry.connection, run, plan.account)
        return row if known is None else None

    def _refuse_late_world_plan(
        self, connection: sqlite3.Connection, run: str, account: str
    ) -> None:
        """A world plan after releases to the server would lower what the world was taken to have
        seen.
        """
        place = {"account": account, "run": run}
        charged = (
            f"SELECT 1 FROM charges WHERE observer = 'server' AND run = :run AND account IN {_KIN}"
        )
        planned = (
            f"SELECT 1 FROM plans WHERE observer = 'world' AND run = :run AND account IN {OWN}"
        )
        if (
            connection.execute(charged, place).fetchone()
            and not connection.execute(planned, place).fetchone()
        ):
            raise LedgerError(
                self._name,
                f"run {run} was already charged to '{account}' against the server, which covers the world",
                "plan against the world before the first release, or not at all",
            )

    def _plannable(self, entry: Entry, account: str, rows: Sequence[Row]) -> bool:
        keys = frozenset((str(row[0]), str(row[1]), str(row[2])) for row in rows)
        payers = self._payers(entry.connection, account, {key[2] for key in keys})
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
        """Charge, durably and in one transaction; returns the accounts that were refused and
        charged nothing.

        Each charge uses up one release of a committed plan of the account or of one of its
        populations. Refused is who has no such release left, or is not admitted by the filter; an
        account without any plan is an error. ``also`` writes what belongs to the charge into the
        same transaction, if nobody was refused.
        """
        by_account: dict[str, list[Charge]] = {}
        for charge in charges:
            by_account.setdefault(charge.account, []).append(charge)
        refused, new = set(), False
        with self._transaction() as entry:
            for account, own in by_account.items():
                rows = self._accepted(entry.connection, run, round_, own)
                if rows is None:
                    refused.add(account)
                elif rows:
                    entry.insert("charges", rows)
                    new = True
            known = "SELECT 1 FROM journal WHERE run = ? AND round = ?"
            if new or entry.connection.execute(known, (run, round_)).fetchone() is None:
                entry.insert("journal", [(run, round_, time.time())])
            if also is not None and not refused:
                also(entry.connection)
        return frozenset(refused)

    def _accepted(
        self,
        connection: sqlite3.Connection,
        run: str,
        round_: int,
        charges: Sequence[Charge],
    ) -> list[Row] | None:
        """Return the rows that charge one account, without replays; None if any of them is refused."""
        rows: list[Row] = []
        for charge in charges:
            digest, observer = written(charge.cost)[0], str(charge.observer)
            if self._replayed(
                connection, (run, round_, charge.account, observer), (digest, charge.draw)
            ):
                continue
            plan = self._entry_left(run, charge.account, observer, digest)
            if plan is None:
                raise LedgerError(
                    self._name,
                    f"run {run} was not planned for '{charge.account}' against the {observer}",
                    "commit a plan before the first release",
                )
            keys = frozenset({(run, plan, observer)})
            payers = self._payers(connection, charge.account, {observer})
            if not plan or not all(self._pays(payer, keys) for payer in payers):
                return None
            rows.append((run, round_, charge.account, observer, plan, digest, charge.draw))
        return rows

    def _replayed(
        self,
        connection: sqlite3.Connection,
        key: tuple[str, int, str, str],
        release: tuple[str, str],
    ) -> bool:
        """Whether this very charge is there already; another one under its key is refused."""
        query = "SELECT bill, draw FROM charges WHERE run = ? AND round = ? AND account = ? AND observer = ?"
        known = connection.execute(query, key).fetchone()
        if known is not None and (release[1] == "" or known != release):
            raise LedgerError(
                self._name,
                f"round {key[1]} of run {key[0]} was already charged to '{key[2]}' for another release",
                "go on with the next round: a charged round is never repeated with fresh randomness",
            )
        return known is not None
