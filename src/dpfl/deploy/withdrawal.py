"""A patient leaves: one unit of a site is withdrawn from all of its studies, for good.

In studies that have begun the unit becomes a blank: it keeps its mark, and with it its place, so
that sizes, rates and messages stay as they were planned and nobody else is affected. It is drawn
and computed like every blank, and left out of every sum. The next study counts without it.

*Formal guarantees.* The ledger commits the withdrawal and the new names of the units of every open
study in one transaction. What is answered afterwards is computed without the unit. An answer that
was stored before is sent again as it was. Until the withdrawal, sums before noise differ from those
of a study in which the unit was a blank from the start by at most what is charged.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DataError, LedgerError, disk_error
from dpfl.data.cells import cell_text, person_id
from dpfl.data.tables import read_columns
from dpfl.data.units import Units
from dpfl.deploy.finish import FINISH_FILES, finish_delivered
from dpfl.deploy.outcome import PRIVATE
from dpfl.deploy.records import LoadedSite
from dpfl.deploy.site_folder import MODELS
from dpfl.privacy.site_ledger import SiteLedger


@dataclass(frozen=True, kw_only=True)
class Withdrawal:
    """A unit that is to be withdrawn, and what follows from it.

    ``what`` names the unit to people, ``mark`` in the ledger. ``studies`` are the titles of the
    studies that go on with a blank in its place, by run, and ``stopped`` of those that have ended
    here because the records are not those that they were planned for.
    """

    what: str
    mark: bytes
    studies: dict[str, str]
    stopped: dict[str, str]


def plan_withdrawal(site: LoadedSite, person: str | None, line: int | None) -> Withdrawal:
    """Find the unit that people mean: a ``person``, or a ``line`` where units are rows."""
    check(
        (person is None) != (line is None),
        f"site '{site.id}'",
        "needs one unit to withdraw",
        "name a person, or a line of the file",
    )
    units = site.units()
    with closing(site.checked_ledger()) as ledger:
        withdrawn = ledger.withdrawals()
        if person is not None:
            mark, what = _person(site, units, person, withdrawn)
        else:
            mark, what = _row(site, units, int(line or 0), withdrawn)
        titles = ledger.titles()
        goes_on = {run: site.still_planned(ledger, run) for run in ledger.runs_with_units()}
    return Withdrawal(
        what=what,
        mark=mark,
        studies={run: titles.get(run, run) for run, same in goes_on.items() if same},
        stopped={run: titles.get(run, run) for run, same in goes_on.items() if not same},
    )


def _person(
    site: LoadedSite, units: Units, person: str, withdrawn: Collection[bytes]
) -> tuple[bytes, str]:
    """The mark of a person, and what to call the person."""
    schema = site.schema
    if schema is None or schema.person is None:
        raise ConfigurationError(
            f"site '{site.id}'", "has no person column", "name a line of the file"
        )
    name = person_id(person)
    mark = site.units_key.person_mark(name)
    what = f"{schema.person_word} '{name}'"
    check(mark not in withdrawn, what, "was withdrawn before", "nothing is left to do", DataError)
    check(mark in units.marks, what, "is not in the file", "check the id", DataError)
    return mark, what


def _row(
    site: LoadedSite, units: Units, line: int, withdrawn: Collection[bytes]
) -> tuple[bytes, str]:
    """The mark of a row; of equal ones, which cannot be told apart, that of the last."""
    file = site.file.data.file
    rows_are_units = site.schema is None or site.schema.person is None
    check(
        rows_are_units and file is not None,
        f"site '{site.id}'",
        "its units are not rows",
        "name the person: --person ID",
    )
    path = site.folder / str(file)
    columns, places = read_columns(path)
    numbers = [int(words.split()[-1]) for words in places]
    what = f"{path.name}, {places[numbers.index(line)] if line in numbers else f'line {line}'}"
    check(line in numbers, what, "holds no record", "name the line as an editor counts", DataError)
    row = numbers.index(line)
    equal = [
        mark
        for mark, content in zip(units.marks, units.contents, strict=True)
        if content == units.contents[row] and mark not in withdrawn
    ]
    check(bool(equal), what, "was withdrawn before", "delete it from the file", DataError)
    cells = ", ".join(f"{name} = {cell_text(values[row])}" for name, values in columns.items())
    return equal[-1], f"{what} ({cells})"


def withdraw(site: LoadedSite, withdrawal: Withdrawal) -> None:
    """Withdraw a unit, and remove what is left of it in the site's folder.

    It cannot be undone.
    """
    with closing(site.checked_ledger()) as ledger:
        digests = {  # a study may have begun meanwhile
            run: site.digests_without(ledger, run, withdrawal.mark)
            for run in ledger.runs_with_units()
        }
        check(
            all(digests[run][1] for run in withdrawal.studies),
            str(site.folder),
            "has changed meanwhile",
            "put the file back, and run the command again",
            DataError,
        )
        check(
            ledger.withdraw(withdrawal.mark, site.units_key.name, digests),
            str(site.folder),
            "was changed by another process meanwhile",
            "run the command again",
            LedgerError,
        )
    remove_traces(site)


def remove_traces(site: LoadedSite) -> None:
    """Make anew what was made of units that are withdrawn: personal parts, finishes and scores.

    A personal part cannot be made anew without the server's rounds: the common model takes its
    place. Nothing happens where nothing is left to do, also of a command that was killed.
    """
    with closing(site.checked_ledger()) as ledger:
        marks = ledger.untraced()
        if not marks:
            return
        failure = None
        with ledger.nobody_leaves():  # and no file of these is half written
            for name in (PRIVATE, *FINISH_FILES):
                for path in (site.folder / MODELS).glob(f"*/{name}*"):
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:  # the other files go all the same
                        failure = disk_error(str(path), error)
        finish_delivered(site, last=0)
        if failure is not None:
            raise failure
        ledger.traces_removed(marks)


def board_notes(site: LoadedSite, ledger: SiteLedger) -> list[str]:
    """What an ethics board must know of units and withdrawals, in sentences."""
    notes = []
    if site.schema is None or site.schema.person is None:
        notes.append(
            "Rows have no id. A row that is removed or emptied is left out, and at most one other "
            "row changes between training and testing. A row that is changed or moved counts as "
            "another row: each part changes in one record, which is up to twice the change that "
            "epsilon covers. A column that names persons avoids this"
        )
    withdrawals = ledger.withdrawals()
    if withdrawals:
        count = f"{len(withdrawals)} {site.unit}(s) withdrew"
        notes.append(
            f"{count}: they are left out of every answer since. What was released before, what "
            "was charged, models elsewhere, and an answer that was stored before and is sent "
            "again stay as they are"
        )
    return notes
