"""The checkpoint of a run: one file of safetensors, never pickle, with a digest of its content.

Tensors are named ``model``, ``starts/CLIENT``, ``private/CLIENT``, ``buffers/NAME`` and
``plugs/SLOT/NAME``. The metadata names the round, the run and the experiment. A file whose digest
does not fit is refused: a run that went on from it would release something else.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpfl.core.checks import check
from dpfl.core.errors import CheckpointError, read_problem
from dpfl.core.files import parsed
from dpfl.core.types import State
from dpfl.data.units import SPLIT_VERSION

CHECKPOINT_FORMAT = "dpfl-checkpoint-1"
_RESTORE = "restore it from a backup"


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
