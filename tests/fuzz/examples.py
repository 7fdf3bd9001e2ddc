"""Valid folders that doors are given changed copies of; each is made once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.in_process_grid import InProcessGrid
from dpfl.deploy.messages import Message
from dpfl.deploy.transport import Transport, from_record
from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment
from tests.deploy.federation import Federation, study_values
from tests.deploy.sums import NAMES, sum_federation, sum_values
from tests.fuzz.doors import HOME, command
from tests.sim.conftest import small

KEPT = HOME / "examples"
STUDY = study_values(rounds=2, sites=("a", "b"), local_steps=1)


def kept(make: Callable[[Path], None]) -> Callable[[], Path]:
    """Make a folder when it is first asked for."""

    @cache
    def made() -> Path:
        path = KEPT / make.__name__
        path.parent.mkdir(exist_ok=True)
        make(path)
        return path

    return made


class Killed(BaseException):
    """Strikes where a kill -9 would."""


@kept
def finished_run(path: Path) -> None:
    run_experiment(small(run={"rounds": 2}), path)


@kept
def interrupted_run(path: Path) -> None:
    """A run that was killed after two of its three rounds."""
    append = RunFolder.append_round

    def killed(folder: RunFolder, record: Any) -> None:
        if record.round == 2:
            raise Killed
        append(folder, record)

    with mock.patch.object(RunFolder, "append_round", killed):
        try:
            run_experiment(small(run={"rounds": 3}), path)
        except Killed:
            return
    raise AssertionError("the run was not killed")


@kept
def comparison(path: Path) -> None:
    """The results of two methods, and the folders of their runs beside them."""
    path.mkdir()
    (path / "e.toml").write_text(small(run={"rounds": 1}).to_toml())
    options = "--methods weiavg,fedavg_dp --seeds 2 --workers 1 --quiet --out results --kept kept"
    with _in(path):
        command("compare", "e.toml", *options.split())()


@kept
def federation(path: Path) -> None:
    """Two sites and a server, after a study of two rounds."""
    Federation.of(path, STUDY).play()


@contextmanager
def _in(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    yield
    os.chdir(before)


@kept
def interrupted_federation(path: Path) -> None:
    """Two sites, and a server that was killed in the second round, when it was answered."""
    append = RunFolder.append_round

    def killed(folder: RunFolder, record: Any) -> None:
        if record.round == 1:
            raise Killed
        append(folder, record)

    with mock.patch.object(RunFolder, "append_round", killed):
        try:
            Federation.of(path, STUDY).play()
        except Killed:
            return
    raise AssertionError("the server was not killed")


Asked = tuple[Path, Message]
"""A site's folder as it was, and the message that it was sent then."""


@cache
def plain_messages() -> list[Asked]:
    """Everything that a site is asked in a study."""
    base = KEPT / "plain"
    grid = RecordingGrid(Federation.of(base / "sites", STUDY), base)
    made = Coordinator(base / "sites" / "server", Transport(grid))
    made.begin()
    return grid.kept


@cache
def sum_messages() -> list[Asked]:
    """Everything that a site is asked in a study over a secure sum."""
    base = KEPT / "sum"
    grid = RecordingGrid(sum_federation(base / "sites", sum_values(NAMES[:3], dropouts=0)), base)
    Coordinator(base / "sites" / "server", Transport(grid)).begin()
    return grid.kept


class RecordingGrid(InProcessGrid):
    """Keeps the folder of the first site as it is before each message, and the message."""

    def __init__(self, federation: Federation, base: Path) -> None:
        super().__init__(federation.grid.sites)
        self.kept: list[Asked] = []
        self.base = base
        self.faults[1] = self.keep

    def keep(self, message: Any, answer: Callable[[], Any]) -> Any:
        copy = self.base / f"before-{len(self.kept)}"
        shutil.copytree(self.sites[1], copy)
        self.kept.append((copy, from_record(message.content)))
        return answer()


@kept
def started_federation(path: Path) -> None:
    """Two sites and a server before their study."""
    Federation.of(path, STUDY)


@kept
def started_sum(path: Path) -> None:
    """Three sites and a server before a study over a secure sum."""
    sum_federation(path, sum_values(NAMES[:3], dropouts=0))
