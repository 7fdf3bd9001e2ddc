"""How a study is going, as its server sees it now: a file that its people's screens are drawn from.

``progress.json`` says of every site whether it is connected, what it was asked last, and why it
takes no part if it does not; and what the server waits for, and what happens when that does not
come. It names sites, so it is for the server's operator alone.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from dpfl.core.files import parsed, write_safely
from dpfl.deploy.messages import round_name
from dpfl.rounds.record import RoundRecord
from dpfl.runs.folder import RunFolder

PROGRESS = "progress.json"


class SiteState(StrEnum):
    """What a site is doing, as far as its server knows."""

    ABSENT = "not connected"
    CONNECTED = "connected"
    ASKED = "working"
    ANSWERED = "answered"
    SILENT = "did not answer"
    REFUSED = "refuses"


@dataclass(frozen=True, kw_only=True)
class SiteProgress:
    """One site: its state, since when, and why, where there is a reason."""

    state: SiteState = SiteState.ABSENT
    since: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


@dataclass
class Progress:
    """The sites of a study, and ``next``: what the server waits for, in one sentence."""

    folder: Path
    sites: dict[str, SiteProgress] = field(default_factory=dict)
    next: str = ""

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """Read what the server has written; empty where it has written nothing yet."""
        try:
            told = parsed((folder / PROGRESS).read_text())
            sites = {
                site: SiteProgress(**{**said, "state": SiteState(said["state"])})
                for site, said in told["sites"].items()
            }
            return cls(folder, sites, told["next"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(folder)

    def afterwards(self) -> Progress:
        """Return what is still true when the server does not run any more: who was not there."""
        absent = (SiteState.REFUSED, SiteState.ABSENT)
        sites = {site: said for site, said in self.sites.items() if said.state in absent}
        return Progress(self.folder, sites)

    def to_dict(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "sites": {site: asdict(said) for site, said in self.sites.items()},
            "next": self.next,
        }

    def note(self, site: str, state: SiteState, reason: str = "") -> None:
        """Write down what a site does now."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        new = SiteProgress(state=state, since=now, reason=reason)
        if replace(self.sites.get(site, SiteProgress()), since=now) != new:
            self.sites[site] = new
            self._write()

    def forget(self, site: str) -> None:
        """Forget somebody who was not known by name."""
        self.sites.pop(site, None)

    def expect(self, sentence: str) -> None:
        """Write down what the server waits for, and what happens next."""
        if sentence != self.next:
            self.next = sentence
            self._write()

    def _write(self) -> None:
        write_safely(
            self.folder / PROGRESS,
            (json.dumps(self.to_dict(), indent=1) + "\n").encode(),
            secret=True,
        )


class News:
    """What has become of a study since it was read last, each thing in one sentence."""

    def __init__(self, folder: Path) -> None:
        self._before = Progress.read(folder)
        self._rounds = len(RunFolder(folder).read_rounds())
        self._told: dict[str, str] = {}  # why each site is not there, as it was told last

    def read(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return what is new; ``rounds`` are those so far. A reason that lasts is told once."""
        now = Progress.read(self._before.folder)
        before = self._before
        new = self._missed(rounds[self._rounds :])
        self._rounds = len(rounds)
        self._before = now
        for site, said in now.sites.items():
            known = str(said) == str(before.sites.get(site, "")) or said.state is SiteState.SILENT
            if said.reason and not known:
                new += self._told_once(site, said.reason, f"{site} {said}")
            elif said.state is SiteState.CONNECTED and not known:
                new.append(f"{site} {said}")
        return [*new, now.next] if now.next and now.next != before.next else new

    def _missed(self, rounds: Sequence[RoundRecord]) -> list[str]:
        """Return who was missed in rounds that have ended."""
        new = []
        for record in rounds:
            for site in record.arrived:
                self._told.pop(site, None)
            for site, reason in record.missing.items():
                sentence = f"{site} was missed in {round_name(record.round)}: {reason}"
                new += self._told_once(site, reason, sentence)
        return new

    def _told_once(self, site: str, reason: str, sentence: str) -> list[str]:
        if self._told.get(site) == reason:
            return []
        self._told[site] = reason
        return [sentence]
