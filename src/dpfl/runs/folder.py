"""A run folder: everything a run leaves behind, written so that a kill at any moment loses nothing
that was released.

::

    experiment.toml     complete, re-runnable          ledger.sqlite       what was charged, before
    it was released rounds.jsonl        the operator's record          timings.jsonl       seconds,
    apart: they differ from run to run checkpoint/         the state to go on from
    model.safetensors   the final model summary.json        what came out
    halts.jsonl         accuracy where a search made the run wait
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from dpfl.core.errors import CheckpointError, FolderError, disk_error
from dpfl.core.files import write_safely
from dpfl.core.layout import Layout
from dpfl.core.types import State
from dpfl.engine.evaluation import Scores
from dpfl.rounds.record import RoundRecord
from dpfl.runs.result import Summary

CHECKPOINT_FORMAT = "dpfl-checkpoint-1"
RESULTS_FORMAT = "dpfl-study-1"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state to go on from, the run and the experiment it belongs to, and what clients keep to
    themselves.
    """

    state: State
    run: str
    experiment: str
    private: Mapping[str, Tensor] = field(default_factory=dict)


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
        self.ledger = path / "ledger.sqlite"
        self.rounds = path / "rounds.jsonl"
        self.timings = path / "timings.jsonl"
        self.halts = path / "halts.jsonl"
        self.model = path / "model.safetensors"
        self.summary = path / "summary.json"
        self.checkpoint = path / "checkpoint" / "state.safetensors"

    def create(self, experiment: str) -> None:
        """Claim a new folder by writing its experiment.

        ``experiment`` is the complete TOML text. A folder that already holds a run, or anything
        else, is refused and left as it is; what a run leaves that was killed before it began does
        not count.
        """
        if self.experiment.exists():
            same = self.experiment.read_text() == experiment
            what = "this same experiment" if same else "another experiment"
            raise FolderError(
                str(self.path),
                f"already holds {what}",
                f"use dpfl run --resume {self.path}, or another --out",
            )
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(str(self.path), "is a file", "give another --out")
        ours = {".lock", "experiment.toml.new"}  # left by a run that was killed before it began
        if self.path.is_dir() and any(entry.name not in ours for entry in self.path.iterdir()):
            raise FolderError(str(self.path), "is not empty and holds no run", "give another --out")
        write_safely(self.experiment, experiment.encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process.

        The lock is the operating system's: it ends with the process, however that ends. A folder
        that another process holds is refused.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            stream = (self.path / ".lock").open("w")
        except OSError as error:
            raise disk_error(str(self.path), error) from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FolderError(
                    str(self.path), "is in use by another process", "wait for it, or end it"
                ) from error
            yield

    def append(self, path: Path, line: Mapping[str, Any]) -> None:
        """Add one JSON line, on disk before this returns."""
        try:
            with path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise disk_error(str(path), error) from error

    def read_lines(self, path: Path) -> list[dict[str, Any]]:
        """Read JSON lines; none where the file does not exist.

        A last line that was cut off by a kill is left out. Any other line that cannot be read is
        refused, with its number.
        """
        if not path.exists():
            return []
        try:
            lines = path.read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FolderError(
                str(path), f"cannot be read ({error})", "restore it from a backup"
            ) from error
        records = []
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                records.append(_table(line))
            except ValueError as error:
                if number == len(lines) - 1:
                    break
                raise FolderError(
                    str(path), f"line {number + 1} cannot be read", "restore it from a backup"
                ) from error
        return records

    def append_round(self, record: RoundRecord) -> None:
        """Add a round to the operator's record."""
        self.append(self.rounds, record.to_dict())

    def read_rounds(self) -> list[RoundRecord]:
        """Read the operator's record."""
        try:
            return [RoundRecord.from_dict(line) for line in self.read_lines(self.rounds)]
        except (KeyError, TypeError) as error:
            remedy = "restore it from a backup"
            raise FolderError(str(self.rounds), f"cannot be read ({error!r})", remedy) from error

    def cut_back(self, first: int, round_: int) -> list[RoundRecord]:
        """Forget what was written of rounds that the checkpoint does not contain: they will be
        repeated.
        """
        kept = [record for record in self.read_rounds() if record.round < round_]
        if [record.round for record in kept] != list(range(first, round_)):
            raise FolderError(
                str(self.rounds),
                f"does not hold the rounds up to {round_ - 1} of the checkpoint",
                "restore it from a backup",
            )
        if self.rounds.exists():
            lines = "".join(json.dumps(record.to_dict()) + "\n" for record in kept)
            write_safely(self.rounds, lines.encode())
        return kept

    def append_halt(self, round_: int, scores: Scores) -> None:
        """Note how good the model was where a search made the run wait."""
        told = {"round": round_, "accuracy": scores.accuracy, "loss": scores.loss}
        self.append(self.halts, told)

    def halted_at(self, round_: int) -> Scores | None:
        """How good the model was when the run waited at this round, if it did."""
        for line in self.read_lines(self.halts):
            if line.get("round") == round_:
                return Scores(accuracy=line["accuracy"], loss=line["loss"])
        return None

    # -- checkpoint --------------------------------------------------------------------------------

    def save_state(self, checkpoint: Checkpoint) -> None:
        """Write the whole state, and the parts of the model that stay at clients; safetensors,
        never pickle.
        """
        state = checkpoint.state
        tensors: dict[str, Tensor] = {"model": state.model}
        tensors |= {f"starts/{client}": tensor for client, tensor in state.starts.items()}
        tensors |= {f"private/{client}": tensor for client, tensor in checkpoint.private.items()}
        tensors |= {f"buffers/{name}": tensor for name, tensor in state.buffers.items()}
        for slot, own in state.plugs.items():
            tensors |= {f"plugs/{slot}/{name}": tensor for name, tensor in own.items()}
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "round": str(state.round),
            "run": checkpoint.run,
            "experiment": checkpoint.experiment,
        }
        metadata["slots"] = json.dumps(sorted(state.plugs))
        metadata["sha256"] = _fingerprint(tensors)
        write_safely(self.checkpoint, safetensors.save(tensors, metadata=metadata))

    def load_state(self, digest: str) -> Checkpoint:
        """Read back the state, the run it belongs to, and private parts; damage, or another
        experiment's, is refused.
        """
        where = str(self.checkpoint)
        if not self.checkpoint.is_file():
            raise CheckpointError(
                where,
                "there is no checkpoint",
                "restore it from a backup, or start again in a new folder",
            )
        try:
            with safe_open(where, framework="pt") as stream:
                metadata = stream.metadata() or {}
                tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                where, f"cannot be read ({error})", "restore it from a backup"
            ) from error
        if metadata.get("format") != CHECKPOINT_FORMAT or metadata.get("sha256") != _fingerprint(
            tensors
        ):
            raise CheckpointError(
                where, "is damaged or of another version", "restore it from a backup"
            )
        if metadata["experiment"] != digest:
            raise CheckpointError(
                where,
                "belongs to another experiment or to other data",
                "put back the files of this run",
            )
        plugs: dict[str, dict[str, Tensor]] = {slot: {} for slot in json.loads(metadata["slots"])}
        starts, private, buffers = {}, {}, {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "starts":
                starts[rest] = tensor
            elif kind == "private":
                private[rest] = tensor
            elif kind == "buffers":
                buffers[rest] = tensor
            elif kind == "plugs":
                slot, _, field = rest.partition("/")
                plugs[slot][field] = tensor
        state = State(
            round=int(metadata["round"]),
            model=tensors["model"],
            starts=starts,
            plugs=plugs,
            buffers=buffers,
        )
        return Checkpoint(state=state, run=metadata["run"], experiment=digest, private=private)

    def save_model(
        self,
        vector: Tensor,
        layout: Layout,
        note: str,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write the final model under the names of its parameters and public buffers.

        The file is meant for the world. ``note`` may hold flags that follow from the method and the
        experiment alone; no client's name and nothing that was measured belongs into it.
        """
        named = {**layout.unflatten(vector), **(buffers or {})}
        tensors = {name: tensor.contiguous() for name, tensor in named.items()}
        write_safely(self.model, safetensors.save(tensors, metadata={"dpfl": note}))

    def save_summary(self, summary: Summary) -> None:
        """Write the summary, which marks the run as finished."""
        write_safely(self.summary, (json.dumps(summary.to_dict(), indent=2) + "\n").encode())

    def read_summary(self) -> Summary:
        """Read the summary, of this version or of 0.1; a run without one is not finished."""
        try:
            values = _table(self.summary.read_text())
        except (OSError, ValueError) as error:
            raise FolderError(
                str(self.summary),
                f"cannot be read ({error})",
                "finish the run with dpfl run --resume",
            ) from error
        return Summary.from_dict(values, str(self.summary))


def _table(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no table of names and values")
    return found


def free_name(base: Path, stem: str) -> Path:
    """Return the first of stem-1, stem-2, ... that does not exist."""
    number = 1
    while (base / f"{stem}-{number}").exists():
        number += 1
    return base / f"{stem}-{number}"


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
