"""The tables of a ledger. Their names and columns are part of the file format.

``runs`` names every run, ``bills`` holds the privacy costs by their digest, ``grants`` the budgets,
``members`` who belongs to which population, ``plans`` what each run may release, ``charges`` what
it has released, and ``journal`` when. Their column ``entry`` says which entry of the hash chain
(``chain``) wrote the row.
"""

import functools
import sqlite3
from contextlib import closing

from dpfl.privacy.chain import require

FORMAT = "dpfl-ledger-2"
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE chain (number INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE runs (
    run TEXT PRIMARY KEY, seeded INTEGER NOT NULL, title TEXT NOT NULL, entry INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE bills (digest TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE grants (
    account TEXT PRIMARY KEY, observer TEXT NOT NULL, unit TEXT NOT NULL, epsilon REAL NOT NULL,
    delta REAL NOT NULL, entry INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE members (
    account TEXT NOT NULL, population TEXT NOT NULL, entry INTEGER NOT NULL,
    PRIMARY KEY (account, population)
) WITHOUT ROWID;
CREATE INDEX members_by_population ON members (population);
CREATE TABLE plans (
    run TEXT NOT NULL REFERENCES runs, account TEXT NOT NULL, observer TEXT NOT NULL,
    bill TEXT NOT NULL REFERENCES bills, releases INTEGER NOT NULL, delta REAL,
    entry INTEGER NOT NULL, PRIMARY KEY (account, observer, run)
) WITHOUT ROWID;
CREATE TABLE charges (
    run TEXT NOT NULL REFERENCES runs, round INTEGER NOT NULL, account TEXT NOT NULL,
    observer TEXT NOT NULL, plan TEXT NOT NULL, bill TEXT NOT NULL REFERENCES bills,
    draw TEXT NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (account, observer, run, round)
) WITHOUT ROWID;
CREATE INDEX charges_by_plan ON charges (plan, observer, run, account, round);
CREATE TABLE journal (
    run TEXT NOT NULL, round INTEGER NOT NULL, at REAL NOT NULL, entry INTEGER NOT NULL
);
CREATE INDEX journal_by_run ON journal (run, round);
"""
# What the ledger of a site has beside: what it agreed on, the units that a study was planned for
# (entries up to ``since`` came before it), its last answers, what it remembers of a secure sum
# (secret while the sum is open), withdrawals whose traces in other files are still to be removed,
# a hash of the key that units are marked by, and a secret for the names of its entries that servers
# are told. Of all these the hash chain covers withdrawals alone.
SITE_SCHEMA = """
CREATE TABLE IF NOT EXISTS withdrawn (
    mark TEXT PRIMARY KEY, at REAL NOT NULL, entry INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS untraced (mark TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marked_by (
    one INTEGER PRIMARY KEY CHECK (one = 1), key TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS units (
    run TEXT PRIMARY KEY, digest TEXT NOT NULL, trained INTEGER NOT NULL, tested INTEGER NOT NULL,
    since INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agreed (run TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outbox (
    run TEXT NOT NULL, round INTEGER NOT NULL, payload BLOB NOT NULL, private BLOB NOT NULL,
    PRIMARY KEY (run)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sums (
    run TEXT PRIMARY KEY, round INTEGER NOT NULL, attempt INTEGER NOT NULL, session TEXT NOT NULL,
    state BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS salt (one INTEGER PRIMARY KEY CHECK (one = 1), value BLOB NOT NULL);
"""


def check_schema(connection: sqlite3.Connection, name: str) -> None:
    """Refuse tables, indices and triggers that dpfl does not make."""
    stored = _objects(connection)
    foreign = (_objects_of(SCHEMA) - stored) | (stored - _objects_of(SCHEMA + SITE_SCHEMA))
    odd = min((object_ for _, object_, _ in foreign), default=None)
    require(odd is None, name, f"'{odd}' is not as dpfl makes it, and could change what is written")


def _objects(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    """The tables, indices and triggers of a database; how their text is wrapped does not matter."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return frozenset((kind, name, " ".join(sql.split())) for kind, name, sql in rows)


@functools.cache
def _objects_of(schema: str) -> frozenset[tuple[str, str, str]]:
    """The tables and indices that a schema makes."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        return _objects(connection)
