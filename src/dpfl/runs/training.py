"""A run that was started from Python, as its folder describes it.

An experiment file can be run again; a call of :func:`dpfl.train` has a model and records of the
caller's own, which no file holds. ``training.json`` says what was trained for people and reports,
and holds a digest by which a resumed call is recognised.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from dpfl.core.files import parsed, readable_file
from dpfl.core.types import Plain
from dpfl.data.federation import Federation
from dpfl.plugs.base import FigureKind, FigureSpec
from dpfl.runs.folder import tensors_digest
from dpfl.strategy import Strategy

TRAINING_FORMAT = "dpfl-training-1"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a call of :func:`dpfl.train` trains.

    ``method`` names the strategy and ``pipeline`` lists its components in words; ``declared`` are
    the figures that they ask for, with the slot of each. ``seed`` is None where noise comes from
    the operating system. ``data`` names the federation: its records, clients, budgets and settings.
    ``digest`` names everything that a result depends on.
    """

    method: str
    rounds: int | None
    seed: int | None
    pipeline: tuple[tuple[str, str], ...]
    declared: tuple[tuple[str, FigureSpec], ...]
    data: str
    digest: str

    python: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        federation: Federation,
        strategy: Strategy,
        *,
        rounds: int | None,
        seed: int | None,
        **more: Any,
    ) -> Self:
        """Describe a call; ``more`` are further arguments that results depend on.

        The digest covers the strategy with all settings, the records, budgets and client settings,
        the task, the model with its start, the rounds and the seed.
        """
        # of many clients, their budgets and settings as one text: plain values, hashed quickly
        by_client = federation.budgets, federation.client_settings
        told = [repr(sorted(own.items(), key=itemgetter(0))) for own in by_client]
        names = [one.name for one in fields(federation) if one.name not in _ELSEWHERE]
        others = {name: getattr(federation, name) for name in names}
        data = _named([federation.fingerprint(), *told, others])
        parts = (strategy, data, type(model), model.state_dict(), rounds, seed, more)
        return cls(
            method=strategy.name,
            rounds=rounds,
            seed=seed,
            pipeline=tuple(strategy.describe()),
            declared=tuple(strategy.figures()),
            data=data,
            digest=_named(parts),
        )

    # -- what a report asks of every run -----------------------------------------------------------

    @property
    def method_name(self) -> str:
        """The name of the method."""
        return self.method

    @property
    def public_seed_value(self) -> int:
        """The seed of everything public in the run."""
        return self.seed or 0

    @property
    def seeded(self) -> bool:
        """Whether noise comes from the seed."""
        return self.seed is not None

    def figures(self, clients: int) -> Sequence[tuple[str, FigureSpec]]:
        """The figures that the components declare."""
        return self.declared

    def federation_key(self) -> Mapping[str, object]:
        """What runs that are compared must share, by section."""
        return {"data": self.data}

    def settings_key(self) -> object:
        """What the runs of one method must share: everything but the seed."""
        return self.pipeline, self.rounds

    def public_values(self) -> Plain:
        """What may be published: the method and the number of rounds."""
        run: Plain = {"noise": "seeded" if self.seeded else "system"}
        if self.rounds is not None:
            run["rounds"] = self.rounds
        return {"method": {"name": self.method}, "run": run}

    # -- the file ----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps({"format": TRAINING_FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file back; anything else is refused."""
        with readable_file(path, "restore it from a backup, or use the dpfl that wrote it"):
            values = parsed(path.read_text())
            if values.pop("format") != TRAINING_FORMAT:
                raise ValueError("it is of another format")
            pipeline = tuple((step, words) for step, words in values.pop("pipeline"))
            figures = [
                (slot, FigureSpec(**own | {"kind": FigureKind(own["kind"])}))
                for slot, own in values.pop("declared")
            ]
            return cls(**values, pipeline=pipeline, declared=tuple(figures))


# what is named by client, and what a task was resolved by: the task itself is named
_ELSEWHERE = ("shards", "budgets", "client_settings", "inferred")


def _named(value: object) -> str:
    """A digest of a value that is the same in every process."""
    return hashlib.sha256(json.dumps(_plain(value)).encode()).hexdigest()


def _plain(value: object) -> object:
    """A value in plain words: tensors by content, functions and classes by name."""
    if isinstance(value, Tensor | np.ndarray):
        return tensors_digest({"": torch.as_tensor(value)})
    if is_dataclass(value) and not isinstance(value, type):
        own = [(field.name, _plain(getattr(value, field.name))) for field in fields(value)]
        return [type(value).__qualname__, own]
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(own)) for key, own in value.items())
    if isinstance(value, tuple | list):
        return [_plain(own) for own in value]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
