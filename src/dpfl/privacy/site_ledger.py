"""A site's own ledger: what it was charged, and the very bytes it answered with.

*Formal guarantees.* A round's charges and the answer they pay for are committed in one transaction
before the answer leaves the site. A site that dies before has charged and released nothing; one
that dies after sends the same bytes again, and is not charged again. There is no third case: an
answer that is not in the ledger was never sent.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from dpfl.privacy.costs import Charge
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.ledger_file import database_errors
from dpfl.privacy.ledger_schema import SITE_SCHEMA


class Answered(NamedTuple):
    """The last answer to a run: its round, its bytes, and what stays at the site.

    Work that failed has no bytes.
    """

    round: int
    payload: bytes
    private: bytes


class SiteLedger(Ledger):
    """A ledger with an outbox of one answer per run; older answers are never asked for again."""

    @classmethod
    def open_for(cls, path: Path, site: str) -> Self:
        """Open the ledger of a site; another site's is refused."""
        ledger = cls.open(path, site)
        with database_errors(str(path)):
            ledger._connection.executescript(SITE_SCHEMA)
            salt = "INSERT OR IGNORE INTO salt VALUES (1, ?)"
            ledger._connection.execute(salt, (secrets.token_bytes(32),))
        return ledger

    def agree(self, run: str, digest: str) -> bool:
        """Write down what was agreed on for a run, once; False if it was something else."""
        with self._transaction() as entry:
            entry.connection.execute("INSERT OR IGNORE INTO agreed VALUES (?, ?)", (run, digest))
        return self.agreed(run) == digest

    def agreed(self, run: str) -> str | None:
        """What was agreed on for a run."""
        return next((str(digest) for (digest,) in self._select("digest", "agreed", run=run)), None)

    def answered(self, run: str) -> Answered | None:
        """The last answer to a run."""
        rows = self._select("round, payload, private", "outbox", run=run)
        return Answered(*rows[0]) if rows else None

    def heads(self, run: str) -> list[str]:
        """Name the chain's entries for the rounds of one run, the newest first.

        Each name is a hash of the entry, which covers everything before it in this run and in
        others, and of a secret of this ledger: whoever is told the name learns nothing by it.
        """
        query = """
            SELECT DISTINCT chain.number, chain.digest, salt.value FROM journal
            JOIN chain ON chain.number = journal.entry JOIN salt
            WHERE journal.run = :run ORDER BY chain.number DESC
        """
        rows = self._rows(query, run=run)
        return [hashlib.sha256(salt + digest.encode()).hexdigest() for _, digest, salt in rows]

    def charge_and_store(
        self, run: str, round_: int, charges: Sequence[Charge], payload: bytes, private: bytes
    ) -> bool:
        """Charge and keep the answer, all or nothing; False if plan or budget do not cover it.

        Every answer is an entry of the chain, also where its round was charged before: a copy of
        the ledger that lacks it would answer the round with other noise.
        """
        row = (run, round_, payload, private)
        with self._transaction() as entry:
            refused = self._charge(entry, run, round_, charges)
            if not refused:
                if not entry.rows["journal"]:
                    entry.insert("journal", [(run, round_, time.time())])
                entry.connection.execute("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?, ?)", row)
        return not refused
