"""How far the secure sum of a round has come, on the server's disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dpfl.core.errors import CheckpointError
from dpfl.core.files import parsed, readable_file, write_safely
from dpfl.runs.validation import check_types
from dpfl.secure_sum.session import Roster
from dpfl.secure_sum.state import Shares

SUM = "sum.json"


@dataclass(frozen=True, kw_only=True)
class OpenSum:
    """How far the sum of a round has come.

    ``roster`` and ``shares`` are those of the session, once all of its members have sent both;
    ``survivors`` is the list that members are asked to sign, once their masked inputs are there.
    """

    round: int
    attempt: int
    roster: Roster | None = None
    shares: Mapping[str, Shares] = field(default_factory=dict)
    survivors: tuple[str, ...] | None = None

    def write(self, folder: Path) -> None:
        """Write it to the server's folder."""
        told = {
            "round": self.round,
            "attempt": self.attempt,
            "roster": self.roster and self.roster.to_dict(),
            "shares": {name: one.to_dict() for name, one in self.shares.items()},
            "survivors": self.survivors,
        }
        write_safely(folder / SUM, json.dumps(told).encode(), secret=True)

    @classmethod
    def read(cls, folder: Path, round_: int) -> OpenSum | None:
        """Read how far the sum of a round has come; None where it has not begun."""
        remedy = "remove it: the sum of its round is then lost where sites have sent uploads"
        with readable_file(folder / SUM, remedy, CheckpointError), suppress(FileNotFoundError):
            told = parsed((folder / SUM).read_bytes())
            if told["round"] != round_:
                return None
            found = cls(
                round=round_,
                attempt=told["attempt"],
                roster=told["roster"] and Roster.read(told["roster"]),
                shares={name: Shares.read(one) for name, one in told["shares"].items()},
                survivors=told["survivors"] and tuple(told["survivors"]),
            )
            check_types(found)
            return found
        return None
