"""Valid folders that doors are given changed copies of; each is made once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from dpfl.runs.folder import RunFolder
from dpfl.sim.train import run_experiment
from tests.deploy.federation import Federation, study_values
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
