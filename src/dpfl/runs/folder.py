"""A run folder: everything a run leaves behind, written so that a kill at any moment loses nothing
that was released.

::

    experiment.toml     complete, re-runnable; of a run that Python started, training.json instead
    ledger.sqlite       what was charged, before it was released
    rounds.jsonl        the operator's record
    timings.jsonl       seconds, apart: they differ from run to run
    checkpoint/         the state to go on from
    model.safetensors   the final model
    model.json          what the model is: its task, its inputs, its schema
    summary.json        what came out
    halts.jsonl         scores where a search made the run wait
    watched.jsonl       the metric by which early stopping decides

The checkpoint of a run: one file of safetensors, never pickle, with a digest of its content.

Tensors are named ``model``, ``starts/CLIENT``, ``private/CLIENT``, ``buffers/NAME`` and
``plugs/SLOT/NAME``. The metadata names the round, the run and the experiment. A file whose digest
does not fit is refused: a run that went on from it would release something else.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open, torch as safetensors
from safetensors.torch import save
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError, FolderError, read_problem
from dpfl.core.files import append_line, hold_folder, parsed, write_safely
from dpfl.core.layout import Layout
from dpfl.core.types import Plain, State
from dpfl.data.units import SPLIT_VERSION
from dpfl.engine.evaluation import Scores
from dpfl.rounds.record import RoundRecord
from dpfl.runs.result import Summary
from dpfl.runs.validation import check_types

CHECKPOINT_FORMAT = "dpfl-checkpoint-1"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state to go on from, and what it belongs to.

    ``run`` is the name of the run in its ledger, ``experiment`` a digest of the experiment and its
    data. ``private`` holds the parts of the model that stay at clients, by client.
    """

    state: State
    run: str
    experiment: str
    private: Mapping[str, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        state = self.state
        tensors = {"model": self.state.model}
        groups = {"starts": state.starts, "private": self.private, "buffers": state.buffers}
        groups |= {f"plugs/{slot}": own for slot, own in state.plugs.items()}
        for group, own in groups.items():
            tensors |= {f"{group}/{name}": tensor for name, tensor in own.items()}
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "round": str(state.round),
            "run": self.run,
            "experiment": self.experiment,
            "split": SPLIT_VERSION,
            "slots": json.dumps(sorted(state.plugs)),
            "sha256": tensors_digest(tensors),
        }
        return save(tensors, metadata=metadata)

    @classmethod
    def read(cls, path: Path, experiment: str) -> Self:
        """Read a file back; damage, or a checkpoint of another experiment, is refused."""
        where = str(path)
        check(
            path.is_file(),
            where,
            "there is no checkpoint",
            f"{_RESTORE}, or start again in a new folder",
            CheckpointError,
        )
        try:
            with safe_open(where, framework="pt") as stream:
                metadata = stream.metadata() or {}
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(where, f"cannot be read ({error})", _RESTORE) from error
        told = (metadata.get("format"), metadata.get("sha256"))
        check(
            told == (CHECKPOINT_FORMAT, tensors_digest(tensors)),
            where,
            "is damaged or of another version",
            _RESTORE,
            CheckpointError,
        )
        if metadata.get("split") != SPLIT_VERSION:
            raise CheckpointError(
                where,
                "began under another rule for which records are tested on",
                "begin the run anew in a new folder",
            )
        check(
            metadata.get("experiment") == experiment,
            where,
            "belongs to another experiment or to other data",
            "put back the files of this run",
            CheckpointError,
        )

        def group(name: str) -> dict[str, Tensor]:
            start = f"{name}/"
            return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}

        try:
            state = State(
                round=int(metadata["round"]),
                model=tensors["model"],
                starts=group("starts"),
                plugs={str(slot): group(f"plugs/{slot}") for slot in parsed(metadata["slots"])},
                buffers=group("buffers"),
            )
            run = metadata["run"]
            private = group("private")
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                where, f"cannot be read ({read_problem(error)})", _RESTORE
            ) from error
        return cls(state=state, run=run, experiment=experiment, private=private)

    def check_follows(self, first: State, path: Path) -> None:
        """Refuse a state that no run comes to which begins with the state ``first``."""
        own = self.state
        model = self.state.model
        same = (model.shape, model.dtype) == (first.model.shape, first.model.dtype)
        check(
            same and own.plugs.keys() == first.plugs.keys() and own.round >= first.round,
            str(path),
            "does not hold the model and the components of this run, or an earlier round",
            _RESTORE,
            CheckpointError,
        )


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Name tensors by their names, shapes, types and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


RESULTS_FORMAT = "dpfl-study-1"
_RESTORE = "restore it from a backup"


class RunFolder:
    """The files of a run, and how they are written.

    Every file is written beside its name and moved into place, or appended to and flushed to disk,
    so that a kill at any moment leaves either the old content or the new. Only one process at a
    time may hold a folder (:meth:`locked`).

    ``path`` is the folder. It need not exist before :meth:`create` claims it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiment = path / "experiment.toml"
        self.training = path / "training.json"
        self.ledger = path / "ledger.sqlite"
        self.rounds = path / "rounds.jsonl"
        self.timings = path / "timings.jsonl"
        self.halts = path / "halts.jsonl"
        self.watched = path / "watched.jsonl"
        self.model = path / "model.safetensors"
        self.card = path / "model.json"
        self.summary = path / "summary.json"
        self.checkpoint = path / "checkpoint" / "state.safetensors"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here, from a file or from Python."""
        return self.experiment.exists() or self.training.exists()

    def create(self, description: str, *, python: bool = False) -> None:
        """Claim a new folder by writing what is run there.

        ``description`` is the complete TOML text of an experiment, or, of a run that ``python``
        starts, the text of its ``training.json``. A folder that already holds a run, or anything
        else, is refused and left as it is; what a run leaves that was killed before it began does
        not count.
        """
        where = str(self.path)
        other = "give another folder" if python else "give another --out"
        file = self.training if python else self.experiment
        if self.holds_run:
            same = file.exists() and file.read_bytes() == description.encode()
            go_on = "give resume=True" if python else f"use dpfl run --resume {where}"
            raise FolderError(
                where,
                f"already holds {'a run of this' if same else 'another'} experiment",
                f"{go_on}, or {other}" if same else f"{other}: it is left as it is",
            )
        is_folder = self.path.is_dir()
        check(is_folder or not self.path.exists(), where, "is a file", other, FolderError)
        ours = {".lock", f"{file.name}.new"}  # left by a run that was killed before it began
        foreign = is_folder and any(entry.name not in ours for entry in self.path.iterdir())
        check(not foreign, where, "is not empty and holds no run", other, FolderError)
        write_safely(file, description.encode())

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder for this process; one that another process holds is refused."""
        return hold_folder(self.path)

    # -- lines -------------------------------------------------------------------------------------

    def append(self, path: Path, line: Mapping[str, Any]) -> None:
        """Add one JSON line, on disk before this returns."""
        append_line(path, line)

    def read_lines(self, path: Path) -> list[Plain]:
        """Read JSON lines; none where the file does not exist.

        A last line that was cut off by a kill is left out. Any other line that cannot be read is
        refused, with its number.
        """
        try:
            lines = path.read_text().split("\n") if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(
                str(path), f"cannot be read ({read_problem(error)})", _RESTORE
            ) from error
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records += [_table(line)] if line else []
            except ValueError as error:
                if number < len(lines):
                    raise FolderError(
                        str(path), f"line {number} cannot be read", _RESTORE
                    ) from error
        return records

    def read_timings(self) -> list[dict[str, float]]:
        """Read the seconds of every round, by stage."""
        lines = self.read_lines(self.timings)
        try:
            check_types(lines, list[dict[str, float]])
            if not all({"round", "seconds"} <= line.keys() for line in lines):
                raise ValueError("a line lacks its round, or its seconds")
        except ValueError as error:
            raise FolderError(str(self.timings), f"cannot be read ({error})", _RESTORE) from error
        return lines

    def append_round(self, record: RoundRecord) -> None:
        """Add a round to the operator's record."""
        self.append(self.rounds, record.to_dict())

    def read_rounds(self) -> list[RoundRecord]:
        """Read the operator's record."""
        try:
            found = [RoundRecord.from_dict(line) for line in self.read_lines(self.rounds)]
            for record in found:
                check_types(record)
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FolderError(
                str(self.rounds), f"cannot be read ({read_problem(error)})", _RESTORE
            ) from error

    def cut_back(self, first: int, round_: int) -> list[RoundRecord]:
        """Forget what was written of rounds that the checkpoint does not contain: they will be
        repeated.

        ``first`` is the first round or release; measurements have numbers below it.
        """
        kept = [record for record in self.read_rounds() if record.round < round_]
        rounds = [record.round for record in kept if record.round >= first]
        check(
            rounds == list(range(first, round_)),
            str(self.rounds),
            f"does not hold the rounds up to {round_ - 1} of the checkpoint",
            _RESTORE,
            FolderError,
        )
        if self.rounds.exists():
            lines = "".join(json.dumps(record.to_dict()) + "\n" for record in kept)
            write_safely(self.rounds, lines.encode())
        return kept

    def append_halt(self, round_: int, scores: Scores) -> None:
        """Note how good the model was where a search made the run wait."""
        told = {"round": round_, **scores.to_dict()}
        self.append(self.halts, told)

    def halted_at(self, round_: int) -> Scores | None:
        """How good the model was when the run waited at this round, if it did."""
        for line in self.read_lines(self.halts):
            if line.get("round") == round_:
                return Scores.from_dict(line)
        return None

    # -- state and results -------------------------------------------------------------------------

    def save_state(self, checkpoint: Checkpoint) -> None:
        """Write the state to go on from."""
        write_safely(self.checkpoint, checkpoint.to_bytes())

    def load_state(self, digest: str) -> Checkpoint:
        """Read back the state to go on from; another experiment's is refused."""
        return Checkpoint.read(self.checkpoint, digest)

    def save_model(
        self, vector: Tensor, layout: Layout, note: str, buffers: Mapping[str, Tensor]
    ) -> None:
        """Write the final model under the names of its parameters and public buffers.

        The file is meant for the world. ``note`` may hold flags that follow from the method and the
        experiment alone; no client's name and nothing that was measured belongs into it.
        """
        named = {**layout.unflatten(vector), **buffers}
        tensors = {name: tensor.contiguous() for name, tensor in named.items()}
        write_safely(self.model, safetensors.save(tensors, metadata={"dpfl": note}))

    def save_summary(self, summary: Summary) -> None:
        """Write the summary, which marks the run as finished."""
        write_safely(self.summary, (json.dumps(summary.to_dict(), indent=2) + "\n").encode())

    def read_summary(self) -> Summary:
        """Read the summary; a run without one is not finished."""
        where = str(self.summary)
        try:
            values = _table(self.summary.read_text())
        except (OSError, ValueError) as error:
            raise FolderError(
                where, f"cannot be read ({read_problem(error)})", "finish the run: resume it"
            ) from error
        return Summary.from_dict(values, where)


def _table(text: str) -> Plain:
    """Read one JSON object; anything else is a ValueError."""
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError("it is no table of names and values")
    return found


def free_name(base: Path, stem: str) -> Path:
    """Return the first of stem-1, stem-2, ... that does not exist."""
    paths = (base / f"{stem}-{number}" for number in count(1))
    return next(path for path in paths if not path.exists())


def new_folder(base: Path, stem: str) -> Path:
    """Make the first of stem-1, stem-2, ... that does not exist: two commands never share one."""
    while True:
        with suppress(FileExistsError):
            path = free_name(base, stem)
            path.mkdir(parents=True)
            return path
