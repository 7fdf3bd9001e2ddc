"""What a study leaves at its server: the summary, how far it is, and how much noise it carries.

These are records for the server's operator. They name sites and say who took part, so they are not
meant for publication where the secrecy of the draw is counted on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl.core.errors import FolderError, read_problem
from dpfl.core.files import parsed, readable_file, write_safely
from dpfl.core.types import Plain, Promise
from dpfl.core.version import __version__
from dpfl.deploy.processes import FAILED, noted_process
from dpfl.deploy.progress import Progress
from dpfl.privacy.flags import RaisedFlag
from dpfl.privacy.statement import Statement
from dpfl.rounds import Agreement, Plan
from dpfl.rounds.record import EffectiveNoise, RoundRecord
from dpfl.runs.deployment import LINK_PROCESS, StudyFile
from dpfl.runs.folder import RunFolder
from dpfl.runs.result import RoundCount, Spread, promise_in
from dpfl.runs.validation import check_types

FORMAT = "dpfl-deployment-1"
_PLAIN = ("run", "study", "method", "parameters", "bytes_up", "payload_bytes_up", "bytes_down")
_LISTS = ("assumptions", "sites", "delivered", "lost_rounds")
_TABLES = ("refusals", "undelivered", "missed")


@dataclass(frozen=True, kw_only=True)
class DeploymentSummary:
    """What came of a study, for the server's operator.

    ``promise``: what the epsilons of this method are about.
    ``flags``: what everyone who reads the result must know.
    ``assumptions``: what the guarantee rests on.
    ``sites``: who enrolled.
    ``refusals`` and ``undelivered``: why a site took no part, or did not get the model.
    ``lost_rounds``: rounds that were charged, and cut off with the server.
    ``missed``: how many rounds a site was drawn for and gave nothing.
    ``world_statements``: what the server's own ledger says; a site's spending is in its ledger.
    ``measured``: the accounted metric, with the standard error of its noise.
    """

    run: str
    study: str
    method: str
    promise: Promise
    flags: tuple[RaisedFlag, ...]
    assumptions: tuple[str, ...]
    sites: tuple[str, ...]
    refusals: Mapping[str, str]
    parameters: int
    rounds: RoundCount
    delivered: tuple[str, ...]
    undelivered: Mapping[str, str]
    lost_rounds: tuple[int, ...]
    missed: Mapping[str, int]
    bytes_up: int
    payload_bytes_up: int
    bytes_down: int
    world_statements: tuple[Statement, ...]
    measured: tuple[Plain, ...] = ()
    version: str = __version__

    def to_dict(self) -> Plain:
        """Return plain values."""
        return {
            "format": FORMAT,
            "dpfl": self.version,
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: list(getattr(self, name)) for name in _LISTS},
            **{name: dict(getattr(self, name)) for name in _TABLES},
            **self.promise.to_dict(),
            "flags": [raised.to_dict() for raised in self.flags],
            "rounds": dict(vars(self.rounds)),
            "world_statements": [line.to_dict() for line in self.world_statements],
            **({"measured": list(self.measured)} if self.measured else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeploymentSummary:
        """Read back what :meth:`to_dict` wrote."""
        plain: Plain = {name: values[name] for name in (*_PLAIN, *_TABLES)}
        plain |= {name: tuple(values[name]) for name in _LISTS}
        return cls(
            **plain,
            promise=promise_in(values),
            flags=tuple(map(RaisedFlag.from_dict, values["flags"])),
            rounds=RoundCount(**values["rounds"]),
            world_statements=tuple(map(Statement.from_dict, values["world_statements"])),
            measured=tuple(values.get("measured", ())),
            version=str(values["dpfl"]),
        )

    def save(self, folder: RunFolder) -> None:
        """Write ``summary.json``: the study has ended."""
        write_safely(folder.summary, (json.dumps(self.to_dict(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: RunFolder) -> DeploymentSummary | None:
        """Read ``summary.json``; None where the study has not ended."""
        remedy = "restore it from a backup"
        with readable_file(folder.summary, remedy), suppress(FileNotFoundError):
            found = cls.from_dict(parsed(folder.summary.read_text()))
            check_types(found)
            return found
        return None


@dataclass(frozen=True, kw_only=True)
class StudyStatus:
    """How far a study is: its rounds so far, and its summary once it has ended.

    ``running``: whether its server runs on this machine now.
    ``failure``: why it ended, where an error has ended it.
    ``progress``: what becomes of its sites, as the server sees it.
    ``seconds``: how long sites took to answer, over all rounds.
    """

    study: StudyFile
    running: bool
    failure: str
    rounds: tuple[RoundRecord, ...]
    summary: DeploymentSummary | None
    progress: Progress
    seconds: Spread | None

    @classmethod
    def of(cls, path: Path) -> StudyStatus:
        """Read the folder of a server."""
        study = StudyFile.in_folder(path)
        folder = RunFolder(path)
        running = noted_process(path / LINK_PROCESS) is not None
        progress = Progress.read(path)
        return cls(
            study=study,
            running=running,
            failure=_failure(path / FAILED),
            rounds=tuple(folder.read_rounds()),
            summary=DeploymentSummary.load(folder),
            progress=progress if running else progress.afterwards(),
            seconds=Spread.of(_seconds(folder)),
        )

    @property
    def server(self) -> str:
        """Say whether the server runs, and why not if an error has ended it."""
        if self.running:
            return "running"
        ended = "not running" if self.summary is None else "the study has ended"
        return f"{ended}: {self.failure}" if self.failure else ended

    @property
    def done(self) -> int:
        """How many rounds are over, lost ones included; releases before the first are not any."""
        return sum(record.round >= 0 for record in self.rounds)

    @property
    def planned(self) -> int | None:
        """How many rounds are planned; None while a method that plans them has not."""
        if self.study.run.rounds is not None or self.summary is None:
            return self.study.run.rounds
        return self.summary.rounds.planned

    @property
    def measured(self) -> tuple[Plain, ...]:
        """The accounted metric so far."""
        return measured_values(self.study, self.rounds)

    def took_part(self, site: str) -> int:
        """In how many rounds the upload of a site arrived."""
        return sum(site in record.arrived for record in self.rounds if record.round >= 0)

    def missed(self, site: str) -> list[tuple[int, str]]:
        """The rounds that a site was drawn for and gave nothing, each with the reason."""
        lines = self.rounds
        return [(line.round, line.missing[site]) for line in lines if site in line.missing]

    def to_dict(self) -> Plain:
        """Return plain values."""
        return {
            "study": self.study.study.name,
            "method": self.study.method.name,
            "task": self.study.learned().to_dict(),
            "running": self.running,
            "failure": self.failure or None,
            "rounds": {"planned": self.planned, "done": self.done},
            **self.progress.to_dict(),
            "seconds_per_answer": self.seconds.to_dict() if self.seconds else None,
            "last": self.rounds[-1].to_dict() if self.rounds else None,
            "measured": list(self.measured),
            "summary": self.summary.to_dict() if self.summary else None,
        }


def measured_values(study: StudyFile, history: Sequence[RoundRecord]) -> tuple[Plain, ...]:
    """Return what was measured after how many rounds, with the standard error of the noise."""
    found = []
    done = 0
    for record in history:
        done = max(done, record.round + 1)
        if record.measured is not None and study.accounted is not None:
            about = {"after": done, "metric": study.accounted.metric}
            found.append({**about, **vars(record.measured)})
    return tuple(found)


def _seconds(folder: RunFolder) -> list[float]:
    """How long sites took to answer, over all rounds."""
    try:
        lines = [line["seconds"] for line in folder.read_lines(folder.timings)]
        check_types(lines, list[dict[str, float]])
        return [seconds for line in lines for seconds in line.values()]
    except (KeyError, ValueError) as error:
        raise FolderError(
            str(folder.timings),
            f"cannot be read ({read_problem(error)})",
            "restore it from a backup",
        ) from error


def _failure(path: Path) -> str:
    """Read the sentence that the server left when it failed; empty where it left none."""
    try:
        return path.read_text().partition("\n")[2].strip()
    except OSError:
        return ""


def effective_noise(agreement: Agreement, plan: Plan, record: RoundRecord) -> EffectiveNoise:
    """Find how much noise the published sum carries, given whose uploads arrived.

    Where each site adds noise for its own budget there is no common number. Where the server adds
    it, the number is the method's. Where the noise is made of shares, a share is scaled for the
    cohort less the dropouts and colluders that the method tolerates: with more uploads the sum
    carries more.
    """
    strategy = agreement.strategy
    arrived = len(record.arrived) - len(record.not_finite)
    count = {"arrived": arrived, "drawn": len(plan.cohort)}
    multiplier = strategy.noise_multiplier
    if multiplier is None:
        shared = "shares of the sites, each for its own bound"
        alone = "each site, within its own budget"
        return EffectiveNoise(made_by=shared if strategy.local.shares_noise else alone, **count)
    if strategy.central_noise is not None:
        return EffectiveNoise(made_by="the server", noise_multiplier=multiplier, **count)
    missing = strategy.tolerated_dropouts + strategy.channel.colluders
    shares = max(1, len(plan.cohort) - missing)
    distributed = any(stage.shares_noise for stage in strategy.stages)
    # The server stands in for the others' shares where the secrecy of the draw is counted on.
    noisy = len(plan.cohort) if agreement.amplified else max(arrived, 0)
    multiplier *= math.sqrt(noisy / shares) if distributed else math.sqrt(noisy)
    return EffectiveNoise(made_by="shares of the sites", noise_multiplier=multiplier, **count)
