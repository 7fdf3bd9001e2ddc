"""The round that was opened last, and what its sites were sent: they can be asked the same again.

It is written before the first message of the round leaves. A server that comes back asks the same
sites for the same round; a site that has answered already sends the same bytes again, and is not
charged again. The file names who was drawn, which is secret where the secrecy of the draw is
counted on.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError
from dpfl.core.files import parsed, readable_file, write_safely
from dpfl.core.types import Cohort, State
from dpfl.rounds import Agreement, Plan
from dpfl.rounds.codec import decode_download
from dpfl.runs.validation import check_types

OPENED = "opened.bin"


@dataclass(frozen=True, kw_only=True)
class OpenedRound:
    """Who was drawn for a round, who was not willing, and what each of the drawn was sent."""

    round: int
    unwilling: tuple[str, ...]
    downloads: Mapping[str, bytes]

    @classmethod
    def of(cls, plan: Plan) -> "OpenedRound":
        """Take from a plan what a repetition needs."""
        downloads = {site: plan.downloads[site] for site in plan.cohort.ids}
        return cls(round=plan.round, unwilling=plan.unwilling, downloads=downloads)

    def write(self, folder: Path) -> None:
        """Write it to the server's folder. Equal downloads are written once."""
        bodies = list(dict.fromkeys(self.downloads.values()))
        sent = {site: bodies.index(body) for site, body in self.downloads.items()}
        lengths = [len(body) for body in bodies]
        header = {"round": self.round, "unwilling": self.unwilling, "sent": sent}
        first = json.dumps({**header, "lengths": lengths}).encode() + b"\n"
        write_safely(folder / OPENED, first + b"".join(bodies), secret=True)

    @classmethod
    def read(cls, folder: Path) -> "OpenedRound | None":
        """Read it back; None where no round was opened."""
        remedy = "remove it: its round is then drawn anew, or lost where the world was charged"
        with readable_file(folder / OPENED, remedy, CheckpointError), suppress(FileNotFoundError):
            first, _, rest = (folder / OPENED).read_bytes().partition(b"\n")
            header = parsed(first)
            bodies = []
            start = 0
            for length in header["lengths"]:
                bodies.append(rest[start : start + length])
                start += length
            if start != len(rest):
                raise ValueError(f"{len(rest)} bytes instead of {start}")
            downloads = {site: bodies[number] for site, number in header["sent"].items()}
            unwilling = tuple(header["unwilling"])
            found = cls(round=header["round"], unwilling=unwilling, downloads=downloads)
            check_types(found)
            return found
        return None

    def plan(self, agreement: Agreement, state: State) -> Plan:
        """Return the plan of the round, as it was when it was opened."""
        strangers = self.downloads.keys() - agreement.claims.keys()
        check(
            not strangers,
            OPENED,
            f"'{min(strangers, default='')}' takes no part",
            "restore it, or remove it",
            CheckpointError,
        )
        size = agreement.layout.size
        downlinks = {site: decode_download(one, size) for site, one in self.downloads.items()}
        shared = next(iter(downlinks.values())).shared if downlinks else {}
        return Plan(
            round=self.round,
            cohort=Cohort.of({site: agreement.claims[site] for site in self.downloads}),
            downloads=self.downloads,
            shared=shared,
            starts={site: one.start for site, one in downlinks.items() if site in state.starts},
            unwilling=self.unwilling,
        )
