"""Kill a run at any moment and resume it: the same bits as if nothing had happened, and no charge
lost or repeated.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dpfl.runs.folder
import dpfl.sim.loop
from dpfl.core.errors import CheckpointError, FolderError, LedgerError
from dpfl.privacy import chain
from dpfl.privacy.ledger import Ledger
from dpfl.runs.experiment import Experiment
from dpfl.sim.train import run_experiment

from .conftest import small
from .test_loop import _traces


class Killed(BaseException):
    """What a test throws where a kill -9 would strike."""


_WHOLE: dict[str, dict[str, Any]] = {}


def _whole(tmp_path: Path, experiment: Experiment) -> dict[str, Any]:
    """What an experiment leaves behind if nothing happens; each one is run once."""
    key = experiment.to_toml()
    if key not in _WHOLE:
        run_experiment(experiment, tmp_path / "whole")
        _WHOLE[key] = _traces(tmp_path / "whole")
    return _WHOLE[key]


POINTS = [
    "Ledger.charge",
    "Workers.run",
    "close_round",
    "RunFolder.append",
    "RunFolder.save_state",
    "write_safely",
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_a_named_point_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, moment: str
) -> None:
    experiment = small(run={"rounds": 4})
    expected = _whole(tmp_path, experiment)
    for visit in (1, 2, 4):
        folder = tmp_path / f"{point}-{moment}-{visit}"
        with monkeypatch.context() as patch:
            _strike(patch, point, moment, visit)
            with pytest.raises(Killed):
                run_experiment(experiment, folder)
        run_experiment(experiment, folder, resume=(folder / "experiment.toml").exists())
        assert _traces(folder) == expected


def test_a_name_is_drawn_at_random_and_kept_by_whoever_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is published, so it may follow neither from records nor from budgets."""
    experiment = small(run={"rounds": 4})
    names = []
    for number, point in enumerate(("write_safely", "Ledger.charge", "close_round")):
        folder = tmp_path / f"{number}"
        with monkeypatch.context() as patch:
            _strike(patch, point, "after", 1 if point == "write_safely" else 2)
            with pytest.raises(Killed):
                run_experiment(experiment, folder)
        begun = (folder / "ledger.sqlite").exists()
        before = Ledger.open(folder / "ledger.sqlite").identity() if begun else None
        summary = run_experiment(experiment, folder, resume=True).summary
        names.append(summary.run)
        assert before in (None, summary.run)
        assert begun == (point != "write_safely")  # that one strikes before there is a ledger
        digest = experiment.digest()
        written = (folder / "summary.json").read_text() + (folder / "model.json").read_text()
        assert not any(digest[i : i + 12] in written for i in range(len(digest) - 12))
    assert len(set(names)) == len(names)
    assert all(name.startswith("weiavg-") for name in names)


def test_an_adaptive_clip_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"name": "dp_fed", "project": "once", "target_quantile": 0.3}
    method |= {"vote_share": 0.2, "noise_multiplier": 1.0}
    experiment = small(method=method, run={"rounds": 4, "cohort": 0.7})
    expected = _whole(tmp_path, experiment)
    clips = [json.loads(line)["stage0_metrics"]["clip"] for line in expected["rounds"].splitlines()]
    assert len(set(clips)) == 4
    with monkeypatch.context() as patch:
        _strike(patch, "close_round", "before", 3)
        with pytest.raises(Killed):
            run_experiment(experiment, tmp_path / "killed")
    run_experiment(experiment, tmp_path / "killed", resume=True)
    assert _traces(tmp_path / "killed") == expected


def _strike(patch: pytest.MonkeyPatch, point: str, moment: str, visit: int) -> None:
    owners = {
        "Ledger.charge": (Ledger, "charge"),
        "Workers.run": (dpfl.sim.loop.Workers, "run"),
        "close_round": (dpfl.sim.loop, "close_round"),
        "RunFolder.append": (dpfl.runs.folder.RunFolder, "append"),
        "RunFolder.save_state": (dpfl.runs.folder.RunFolder, "save_state"),
        "write_safely": (dpfl.runs.folder, "write_safely"),
    }
    owner, name = owners[point]
    original = getattr(owner, name)
    count = 0

    def struck(*arguments: object, **options: object) -> object:
        nonlocal count
        count += 1
        strike = count == visit  # each point is visited at least four times in four rounds
        if strike and moment == "before":
            raise Killed
        result = original(*arguments, **options)
        if strike:
            raise Killed
        return result

    patch.setattr(owner, name, struck)


def test_kill_9_at_random_moments_ends_bit_identical(tmp_path: Path) -> None:
    experiment = small(run={"rounds": 40})
    expected = _whole(tmp_path, experiment)
    file = tmp_path / "experiment.toml"
    file.write_text(experiment.to_toml())
    folder = tmp_path / "killed"
    moments = random.Random(4)
    kills = 0
    command = [
        sys.executable,
        "-m",
        "dpfl.cli.main",
        "run",
        str(file),
        "--out",
        str(folder),
        "--quiet",
    ]
    for _ in range(40):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ}
        )
        rounds = folder / "rounds.jsonl"
        seen = rounds.stat().st_size if rounds.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if rounds.exists() and rounds.stat().st_size > seen:
                time.sleep(moments.uniform(0, 0.08))
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        code = process.wait()
        kills += code == -signal.SIGKILL
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.stderr.read().decode()
        process.stderr.close()
        if (folder / "experiment.toml").exists():
            command = [
                sys.executable,
                "-m",
                "dpfl.cli.main",
                "run",
                "--resume",
                str(folder),
                "--quiet",
            ]
        if kills == 2:
            subprocess.run(command, check=True, capture_output=True)
            break
    process.stderr.close()
    assert kills >= 2
    assert _traces(folder) == expected


def test_an_unseeded_run_loses_the_interrupted_round_but_not_its_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(run={"rounds": 5, "noise": "system"})
    with monkeypatch.context() as patch:
        _strike(patch, "close_round", "before", 3)
        with pytest.raises(Killed):
            run_experiment(experiment, tmp_path / "run")
    result = run_experiment(experiment, tmp_path / "run", resume=True)
    assert [bool(line.lost) for line in result.history] == [False, False, True, False, False]
    drawn = sum(len(line.arrived) for line in result.history)
    charged = sum(line.rounds for line in result.spent.values())
    assert charged == drawn + 4  # the cohort of four of the lost round was charged as well


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    experiment = small(run={"rounds": 3})
    run_experiment(experiment, tmp_path / "whole")
    expected = _traces(tmp_path / "whole")
    run_experiment(experiment, tmp_path / "whole", resume=True)
    assert _traces(tmp_path / "whole") == expected


def _interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Experiment, Path]:
    experiment = small(run={"rounds": 5})
    with monkeypatch.context() as patch:
        _strike(patch, "close_round", "before", 4)
        with pytest.raises(Killed):
            run_experiment(experiment, tmp_path / "run")
    return experiment, tmp_path / "run"


def test_a_run_does_not_go_on_without_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, folder = _interrupted(tmp_path, monkeypatch)
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(LedgerError, match="there is no ledger"):
        run_experiment(experiment, folder, resume=True)
    assert not (folder / "ledger.sqlite").exists()


def test_a_run_does_not_go_on_with_an_older_or_foreign_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, folder = _interrupted(tmp_path, monkeypatch)
    identity = Ledger.open(folder / "ledger.sqlite").identity()
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    Ledger.create(folder / "ledger.sqlite", identity).close()
    with pytest.raises(LedgerError, match="ends at round None"):
        run_experiment(experiment, folder, resume=True)
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    Ledger.create(folder / "ledger.sqlite", "another").close()
    with pytest.raises(LedgerError, match="another run"):
        run_experiment(experiment, folder, resume=True)


def _chain_anew(path: Path) -> None:
    """What somebody does who can write a ledger and its head: compute both again from what is left."""
    with closing(sqlite3.connect(path)) as book, book:
        ((previous,),) = book.execute("SELECT digest FROM chain WHERE number = 0")
        ((last,),) = book.execute("SELECT max(number) FROM chain")
        for number in range(1, last + 1):
            own: dict[str, list[chain.Row]] = {}
            for table in set(chain.TABLES) - {"withdrawn"}:  # only a site has that
                found = book.execute(f"SELECT * FROM {table} WHERE entry = ?", (number,)).fetchall()
                if found:
                    own[table] = [row[:-1] for row in found]
            previous = chain.digest_of(number, previous, own)
            book.execute("UPDATE chain SET digest = ? WHERE number = ?", (previous, number))
    chain.head_path(str(path)).unlink()
    chain.write_head(str(path), chain.Head(number=last, digest=previous))


@pytest.mark.parametrize("forged", [False, True])
def test_a_run_does_not_go_on_with_a_ledger_that_lost_charges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: bool
) -> None:
    """The hash chain says so; and where it was computed anew, the run's own record of who took
    part.
    """
    experiment, folder = _interrupted(tmp_path, monkeypatch)
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as book, book:
        book.execute("DELETE FROM charges WHERE round = 1")
    if forged:
        _chain_anew(folder / "ledger.sqlite")
    noticed = "does not hold round 1's charge" if forged else r"entry \d+ was changed"
    with pytest.raises(LedgerError, match=noticed):
        run_experiment(experiment, folder, resume=True)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "swap"])
def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    experiment, folder = _interrupted(tmp_path, monkeypatch)
    path = folder / "checkpoint" / "state.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "remove":
        path.unlink()
    else:
        run_experiment(small(run={"rounds": 2, "seed": 9}), tmp_path / "other")
        path.write_bytes((tmp_path / "other" / "checkpoint" / "state.safetensors").read_bytes())
    with pytest.raises(CheckpointError):
        run_experiment(experiment, folder, resume=True)


def test_a_run_does_not_go_on_with_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated round must release the same bytes; with other records it would not."""
    sites = tmp_path / "sites"
    sites.mkdir()
    for site in ("north", "south"):
        rows = "".join(f"{i % 7},{(i * 3) % 5},{int(i % 7 > 3)}\n" for i in range(40))
        (sites / f"{site}.csv").write_text("a,b,ill\n" + rows)
    values = small(run={"rounds": 5, "cohort": 2}).to_dict() | {
        "data": {"folder": str(sites)},
        "clients": {},
    }
    experiment = Experiment.from_dict(
        values | {"partition": {}, "budgets": {"epsilon": 1.0, "delta": 1e-3}}
    )
    with monkeypatch.context() as patch:
        _strike(patch, "close_round", "before", 3)
        with pytest.raises(Killed):
            run_experiment(experiment, tmp_path / "run")
    content = (sites / "north.csv").read_text()
    (sites / "north.csv").write_text(content.replace("6,", "5,"))
    with pytest.raises(CheckpointError, match="other data"):
        run_experiment(experiment, tmp_path / "run", resume=True)
    (sites / "north.csv").write_text(content)
    assert run_experiment(experiment, tmp_path / "run", resume=True).summary.rounds.done == 5


def test_a_half_written_last_line_is_forgotten_and_a_broken_middle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, folder = _interrupted(tmp_path, monkeypatch)
    expected = _whole(tmp_path, experiment)
    rounds = folder / "rounds.jsonl"
    whole = rounds.read_text()
    rounds.write_text("{broken\n" + whole)
    with pytest.raises(FolderError, match="line 1"):
        run_experiment(experiment, folder, resume=True)
    rounds.write_text(whole + '{"round": 3, "coho')
    run_experiment(experiment, folder, resume=True)
    assert _traces(folder) == expected


def test_a_folder_in_use_or_with_another_experiment_is_left_alone(tmp_path: Path) -> None:
    run_experiment(small(run={"rounds": 1}), tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(FolderError, match="another experiment"):
        run_experiment(small(run={"rounds": 2}), tmp_path / "run")
    with pytest.raises(FolderError, match="run of this experiment"):
        run_experiment(small(run={"rounds": 1}), tmp_path / "run")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(FolderError, match="not empty"):
        run_experiment(small(run={"rounds": 1}), tmp_path / "mine")
    with (
        dpfl.runs.folder.RunFolder(tmp_path / "run").locked(),
        pytest.raises(FolderError, match="in use"),
    ):
        run_experiment(small(run={"rounds": 1}), tmp_path / "run", resume=True)


def test_a_full_disk_is_reported_and_what_was_charged_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    experiment = small(run={"rounds": 4})
    expected = _whole(tmp_path, experiment)
    original = os.fsync
    count = 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(dpfl.core.errors.DiskError, match="No space left"):
            run_experiment(experiment, tmp_path / "run")
    run_experiment(experiment, tmp_path / "run", resume=True)
    assert _traces(tmp_path / "run") == expected


def test_a_run_that_began_under_another_split_is_refused_in_a_sentence_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dpfl.runs.folder.SPLIT_VERSION", "1")
        experiment, folder = _interrupted(tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match="another rule for which records are tested on"):
        run_experiment(experiment, folder, resume=True)
