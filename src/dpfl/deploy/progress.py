"""How a study is going, as its server sees it now: a file that its people's screens are drawn from.

``progress.json`` says of every site whether it is connected, what it was asked last, and why it
takes no part if it does not; and what the server waits for, and what happens when that does not
come. It names sites, so it is for the server's operator alone.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from dpfl.core.files import write_safely
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
            told = json.loads((folder / PROGRESS).read_text())
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
        self._run = RunFolder(folder)
        self._before, self._rounds = Progress.read(folder), len(self._run.read_rounds())
        self._missed: dict[str, str] = {}  # why each site was missed, as it was told last

    def read(self) -> list[str]:
        """Return what is new."""
        now, before = Progress.read(self._run.path), self._before
        new = [
            f"{site} {said}"
            for site, said in now.sites.items()
            if (said.state is SiteState.CONNECTED or said.reason)
            and said.state is not SiteState.SILENT
            and str(said) != str(before.sites.get(site, ""))
            and said.reason != self._missed.get(site)
        ]
        self._missed |= {site: said.reason for site, said in now.sites.items() if said.reason}
        self._before = now
        if now.next and now.next != before.next:
            new.append(now.next)
        return [*new, *self._missing()]

    def _missing(self) -> list[str]:
        """Return who was missed in the rounds that have ended, a reason that lasts only once."""
        rounds, new = self._run.read_rounds(), []
        for record in rounds[self._rounds :]:
            for site in record.arrived:
                self._missed.pop(site, None)
            for site, reason in record.missing.items():
                if self._missed.get(site) != reason:
                    new.append(f"{site} was missed in round {record.round + 1}: {reason}")
                    self._missed[site] = reason
        self._rounds = len(rounds)
        return new
