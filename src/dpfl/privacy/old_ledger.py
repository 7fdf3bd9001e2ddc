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
from functools import lru_cache

from dpfl.core.errors import read_problem
from dpfl.core.files import parsed
from dpfl.privacy.chain import Entry, Row, require
from dpfl.privacy.costs import PrivacyCost, adjacency_of, unit_of, written
from dpfl.privacy.events import merged
from dpfl.privacy.flags import Flag, RaisedFlag

FORMAT = "dpfl-ledger-1"
FLAGS = (RaisedFlag(Flag.FLOAT_NOISE),)
# Server charges that the world sees as well, although the run charged other rounds to the world.
_BY_WORLD = """EXISTS (SELECT 1 FROM charges AS w WHERE w.run = c.run AND w.observer = 'world'
    AND (w.account = c.account
        OR w.account IN (SELECT population FROM members WHERE account = c.account))"""
_MIXED = f"""SELECT 1 FROM charges AS c WHERE observer = 'server'
    AND {_BY_WORLD}) AND NOT {_BY_WORLD} AND w.round = c.round)"""


def refusal(found: str) -> tuple[str, str]:
    """Say why a ledger of this format is not opened, and what to do."""
    if found == FORMAT:
        problem = f"has format {found} of dpfl 0.1, whose noise had holes: it can only be read"
        return problem, "begin a new ledger, and open this one read-only"
    return f"has format {found}", "use the version of dpfl that wrote it"


def copy(old: sqlite3.Connection, name: str, entry: Entry) -> None:
    """Write what an old ledger holds as one entry of a new one; changed costs are refused."""
    try:
        _copy(old, name, entry)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        require(False, name, f"cannot be read ({read_problem(error)})")


def _copy(old: sqlite3.Connection, name: str, entry: Entry) -> None:
    problem = "charges only some rounds of a run against the world"
    require(old.execute(_MIXED).fetchone() is None, name, problem, "read it with dpfl 0.1")
    bodies = dict(old.execute("SELECT digest, body FROM bills").fetchall())
    charged: defaultdict[tuple[str, str, str], list[PrivacyCost]] = defaultdict(list)
    charges: list[Row] = []
    query = "SELECT run, round, account, observer, bill, draw FROM charges ORDER BY run, round"
    for run, round_, account, observer, digest, draw in old.execute(query):
        cost = _cost(digest, bodies.get(digest, ""), name)
        charged[run, account, observer].append(cost)
        charges.append((run, round_, account, observer, account, _stored(cost, entry), draw))
    for table in ("runs", "grants", "members", "journal"):
        entry.insert(table, old.execute(f"SELECT * FROM {table}"))
    for key, costs in charged.items():
        cost, releases = _plan(costs)
        entry.insert("plans", [(*key, _stored(cost, entry), releases, None)])
    entry.insert("charges", charges)


def _stored(cost: PrivacyCost, entry: Entry) -> str:
    """Store a cost in the new ledger, and return its digest there."""
    entry.connection.execute("INSERT OR IGNORE INTO bills VALUES (?, ?)", written(cost))
    return written(cost)[0]


@lru_cache
def _cost(digest: str, body: str, name: str) -> PrivacyCost:
    """Read a stored cost; version 0.1 did not count noise values, and took its noise for ideal."""
    intact = hashlib.sha256(body.encode()).hexdigest()[:32] == digest
    require(intact, name, f"privacy cost {digest[:12]} is missing or was changed")
    content = parsed(body)
    content["events"] = [{"numbers": 0, **event} for event in content["events"]]
    return PrivacyCost.from_json(json.dumps(content))


def _plan(charged: list[PrivacyCost]) -> tuple[PrivacyCost, int]:
    """Return the plan that holds these rounds: equal rounds, or all of them as one release."""
    if len(set(charged)) == 1:
        return charged[0], len(charged)
    unit, adjacency = unit_of(charged), adjacency_of(charged)
    events = merged(event for cost in charged for event in cost.events)
    return PrivacyCost(unit=unit, adjacency=adjacency, events=events), 1
