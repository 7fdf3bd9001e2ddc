"""Ledgers of dpfl 0.1, for reading only.

Version 0.1 added noise that was computed in floating point. Such noise has holes, so the epsilons
of its ledgers are not guaranteed: whoever opens one sees the flag ``FLOAT_NOISE``. It also charged
without plans. What a run charged to an account counts as one plan of exactly these rounds, and the
prices of the runs are added up.
"""

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.privacy.chain import Entry, Row
from dpfl.privacy.costs import PrivacyCost, account_history, written
from dpfl.privacy.flags import Flag, RaisedFlag

FORMAT = "dpfl-ledger-1"
# Server charges that the world sees as well, although the run charged other rounds to the world.
_MIXED = """
SELECT 1 FROM charges AS c WHERE observer = 'server' AND EXISTS (
    SELECT 1 FROM charges AS w WHERE w.run = c.run AND w.observer = 'world' AND (
        w.account = c.account
        OR w.account IN (SELECT population FROM members WHERE account = c.account)))
AND NOT EXISTS (
    SELECT 1 FROM charges AS w WHERE w.run = c.run AND w.round = c.round AND w.observer = 'world'
    AND (w.account = c.account
        OR w.account IN (SELECT population FROM members WHERE account = c.account)))
"""


def refusal(found: str) -> tuple[str, str]:
    """Say why a ledger of this format is not opened, and what to do."""
    if found == FORMAT:
        problem = f"has format {found} of dpfl 0.1, whose noise had holes: it can only be read"
        return problem, "begin a new ledger, and open this one read-only"
    return f"has format {found}", "use the version of dpfl that wrote it"


@dataclass(frozen=True, kw_only=True)
class OldLedger:
    """What an old ledger holds, in the rows and costs of today's."""

    identity: str
    tables: dict[str, list[Row]]
    costs: tuple[PrivacyCost, ...]

    @property
    def flags(self) -> tuple[RaisedFlag, ...]:
        """What everyone who reads it must know."""
        return (RaisedFlag(Flag.FLOAT_NOISE),)

    def write(self, entry: Entry) -> None:
        """Write everything as one entry of a new ledger."""
        rows = [written(cost) for cost in self.costs]
        entry.connection.executemany("INSERT OR IGNORE INTO bills VALUES (?, ?)", rows)
        for table in ("runs", "grants", "members", "plans", "charges", "journal"):
            entry.insert(table, self.tables[table])


def read(connection: sqlite3.Connection, name: str) -> OldLedger:
    """Read an open ledger of version 0.1; one whose costs were changed is refused."""
    ambiguous = connection.execute(_MIXED).fetchone() is not None
    problem = "charges only some rounds of a run against the world"
    check(not ambiguous, name, problem, "read it with dpfl 0.1", LedgerError)
    bodies = dict(connection.execute("SELECT digest, body FROM bills").fetchall())
    charged = connection.execute("SELECT DISTINCT bill FROM charges").fetchall()
    costs = {digest: _cost(digest, bodies.get(digest, ""), name) for (digest,) in charged}
    names = {"runs": "run, seeded, title", "members": "account, population", "journal": "*"}
    names["grants"] = "account, observer, unit, epsilon, delta"
    tables: dict[str, list[Row]] = {
        table: connection.execute(f"SELECT {columns} FROM {table}").fetchall()
        for table, columns in names.items()
    }
    query = "SELECT run, round, account, observer, bill, draw FROM charges ORDER BY run, round"
    planned: defaultdict[Row, list[PrivacyCost]] = defaultdict(list)
    tables["charges"] = []
    for run, round_, account, observer, digest, draw in connection.execute(query):
        cost = costs[digest]
        planned[run, account, observer].append(cost)
        row = (run, round_, account, observer, account, written(cost)[0], draw)
        tables["charges"].append(row)
    plans = {key: _plan(own) for key, own in planned.items()}
    tables["plans"] = [
        (*key, written(cost)[0], releases, None) for key, (cost, releases) in plans.items()
    ]
    (identity,) = connection.execute("SELECT value FROM meta WHERE key = 'identity'").fetchone()
    every = (*costs.values(), *(cost for cost, _ in plans.values()))
    return OldLedger(identity=identity, tables=tables, costs=every)


def _cost(digest: str, body: str, name: str) -> PrivacyCost:
    """Read a stored cost; version 0.1 did not count noise values, and took its noise for ideal."""
    intact = hashlib.sha256(body.encode()).hexdigest()[:32] == digest
    problem = f"privacy cost {digest[:12]} is missing or was changed"
    check(intact, name, problem, "restore it from a backup", LedgerError)
    content = json.loads(body)
    content["events"] = [{"numbers": 0, **event} for event in content["events"]]
    return PrivacyCost.from_json(json.dumps(content))


def _plan(charged: Sequence[PrivacyCost]) -> tuple[PrivacyCost, int]:
    """Return the plan that holds these rounds: equal rounds, or all of them as one release."""
    if len(set(charged)) == 1:
        return charged[0], len(charged)
    whole = account_history((cost, 1) for cost in charged)
    assert whole is not None
    return PrivacyCost(unit=whole.unit, adjacency=whole.adjacency, events=whole.history), 1
