"""A site's own ledger: what it was charged, and the very bytes it answered with.

*Formal guarantees.* A round's charges and the answer they pay for are committed in one transaction
before the answer leaves the site. A site that dies before has charged and released nothing; one
that dies after sends the same bytes again, and is not charged again. There is no third case: an
answer that is not in the ledger was never sent.
"""

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from dpfl.core.checks import check
from dpfl.core.errors import LedgerError
from dpfl.privacy.chain import Entry, require
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


class StoredSum(NamedTuple):
    """What a site remembers of the last secure sum of a run.

    ``session`` is empty until a session was joined. ``state`` holds the site's secrets, and is
    empty once the sum is closed.
    """

    round: int
    attempt: int
    session: str
    state: bytes


class PlannedUnits(NamedTuple):
    """The units that a study was planned for.

    ``digest`` names them, ``trained`` and ``tested`` are how many are in each part. ``blanks`` are
    the marks of those that were withdrawn since.
    """

    digest: str
    trained: int
    tested: int
    blanks: frozenset[bytes]


class UnitsWithdrawn(Exception):
    """A unit was withdrawn while an answer was computed: it is computed anew without the unit."""


class SiteLedger(Ledger):
    """A ledger with an outbox of one answer per run; older answers are never asked for again."""

    @classmethod
    def open_for(cls, path: Path, site: str) -> Self:
        """Open the ledger of a site; another site's is refused."""
        ledger = cls.open(path, site)
        with database_errors(str(path)):
            ledger._connection.execute("PRAGMA secure_delete=ON")  # secrets of closed sums
            ledger._connection.executescript(SITE_SCHEMA)
            salt = "INSERT OR IGNORE INTO salt VALUES (1, ?)"
            ledger._connection.execute(salt, (secrets.token_bytes(32),))
        return ledger

    def agree(self, run: str, digest: str, units: PlannedUnits, withdrawn: int = 0) -> bool:
        """Write down what was agreed on for a run, once, and the units that it is planned for.

        So many units were ``withdrawn`` when those were read: with more, :class:`UnitsWithdrawn` is
        raised. False if something else was agreed on.
        """
        with self._transaction() as entry:
            if self.agreed(run) is None:
                if len(self.withdrawals()) != withdrawn:
                    raise UnitsWithdrawn
                entry.connection.execute("INSERT INTO agreed VALUES (?, ?)", (run, digest))
                row = (run, *units[:3], self.head().number)
                entry.connection.execute("INSERT INTO units VALUES (?, ?, ?, ?, ?)", row)
        return self.agreed(run) == digest

    # -- units -------------------------------------------------------------------------------------

    def units(self, run: str) -> PlannedUnits | None:
        """The units that a run was planned for; None where they were not written down."""
        rows = self._select("digest, trained, tested, since", "units", run=run)
        if not rows:
            return None
        digest, trained, tested, since = rows[0]
        later = self._rows("SELECT mark FROM withdrawn WHERE entry > :since", since=since)
        blanks = frozenset(bytes.fromhex(mark) for (mark,) in later)
        return PlannedUnits(digest, trained, tested, blanks)

    def withdrawals(self) -> dict[bytes, float]:
        """When each unit that was withdrawn was, by its mark; the oldest first."""
        if not self._select("1", "sqlite_master", name="withdrawn"):  # of an earlier version
            return {}
        rows = self._rows("SELECT mark, at FROM withdrawn ORDER BY entry")
        return {bytes.fromhex(mark): at for mark, at in rows}

    def runs_with_units(self) -> list[str]:
        """Every run whose units were written down."""
        if not self._select("1", "sqlite_master", name="units"):  # of an earlier version
            return []
        return sorted(run for (run,) in self._rows("SELECT run FROM units"))

    def marked_by(self) -> str | None:
        """The key, hashed, by which the units that were withdrawn are marked."""
        return next((str(key) for (key,) in self._rows("SELECT key FROM marked_by")), None)

    def withdraw(self, mark: bytes, key: str, digests: Mapping[str, tuple[str, str]]) -> bool:
        """Withdraw a unit from all studies, in one transaction.

        ``key`` is the hash of the key of marks, ``digests`` the names of the units of each study,
        before and after; a study that has stopped gets an empty name, so that work on it does not
        end in an answer either. What stayed at the site of models that the unit has had a part in
        is forgotten. False, and nothing is written, where another study has begun, a study's units
        are not those any more, or the unit was withdrawn before.
        """
        with self._transaction() as entry:
            named = dict(self._rows("SELECT run, digest FROM units"))
            same = named == {run: before for run, (before, _) in digests.items()}
            if mark in self.withdrawals() or not same:
                return False
            for run, (_, after) in digests.items():
                entry.connection.execute("UPDATE units SET digest = ? WHERE run = ?", (after, run))
            entry.insert("withdrawn", [(mark.hex(), time.time())])
            entry.connection.execute("INSERT INTO untraced VALUES (?)", (mark.hex(),))
            entry.connection.execute("INSERT OR IGNORE INTO marked_by VALUES (1, ?)", (key,))
            entry.connection.execute("UPDATE outbox SET private = ?", (b"",))
        return True

    @contextmanager
    def nobody_leaves(self) -> Iterator[None]:
        """Let every withdrawal wait until what is made of the units has been written."""
        with self._transaction():
            yield

    def untraced(self) -> list[str]:
        """Units that were withdrawn, of which files beside the ledger may still hold traces."""
        return [mark for (mark,) in self._rows("SELECT mark FROM untraced")]

    def traces_removed(self, marks: Sequence[str]) -> None:
        """Write down that no file holds traces of these units any more, nor the ledger's own."""
        ((busy, *_),) = self._rows("PRAGMA wal_checkpoint(TRUNCATE)")
        check(
            not busy,
            self._name,
            "is read by another process, and holds private parts until then",
            "end that process, and run the command again",
            LedgerError,
        )
        with self._transaction() as entry:
            for mark in marks:
                entry.connection.execute("DELETE FROM untraced WHERE mark = ?", (mark,))

    # -- answers -----------------------------------------------------------------------------------

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
        salted = all(isinstance(salt, bytes) for *_, salt in rows)
        require(salted, self._name, "its secret was changed")
        return [hashlib.sha256(salt + digest.encode()).hexdigest() for _, digest, salt in rows]

    def stored_sum(self, run: str) -> StoredSum | None:
        """Return what is remembered of the last secure sum of a run."""
        rows = self._select("round, attempt, session, state", "sums", run=run)
        return StoredSum(*rows[0]) if rows else None

    def store_sum(
        self, run: str, before: StoredSum | None, stored: StoredSum, *, noted: bool = False
    ) -> bool:
        """Remember a secure sum, before the answer that follows from it leaves.

        False, and nothing is written, where ``before`` is no longer what is remembered: another
        process has answered meanwhile, and what follows from ``before`` must not leave as well.
        With ``noted`` it is an entry of the chain: a copy of the ledger that lacks it would sign
        another list of survivors.
        """
        with self._transaction() as entry:
            same = self.stored_sum(run) == before
            if same:
                _write_sum(entry, run, stored)
            if same and noted:
                entry.insert("journal", [(run, stored.round, time.time())])
        return same

    def close_sum(self, run: str) -> None:
        """Forget the secrets of a run's last secure sum: they are overwritten on disk."""
        stored = self.stored_sum(run)
        if stored is not None and stored.state:
            self.store_sum(run, stored, stored._replace(state=b""))
            self._rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def charge_and_store(
        self,
        run: str,
        round_: int,
        charges: Sequence[Charge],
        payload: bytes,
        private: bytes,
        stored: StoredSum | None = None,
        *,
        units: str,
    ) -> bool:
        """Charge and keep the answer, all or nothing; False if plan or budget do not cover it.

        ``stored`` is what is to be remembered of the secure sum that the answer is a part of.
        ``units`` names those that the answer was computed from: where they are not those of the
        study any more, :class:`UnitsWithdrawn` is raised and nothing is charged.

        Every answer is an entry of the chain, also where its round was charged before: a copy of
        the ledger that lacks it would answer the round with other noise.
        """
        row = (run, round_, payload, private)
        with self._transaction() as entry:
            planned = self.units(run)
            if planned is None or planned.digest != units:
                raise UnitsWithdrawn
            refused = self._charge(entry, run, round_, charges)
            if not refused:
                if not entry.rows["journal"]:
                    entry.insert("journal", [(run, round_, time.time())])
                entry.connection.execute("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?, ?)", row)
                if stored is not None:
                    _write_sum(entry, run, stored)
        return not refused


def _write_sum(entry: Entry, run: str, stored: StoredSum) -> None:
    row = (run, *stored)
    entry.connection.execute("INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?, ?)", row)
