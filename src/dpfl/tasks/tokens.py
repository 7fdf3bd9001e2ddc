"""Texts: predict the next token at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpfl.core.checks import check
from dpfl.core.errors import DataError
from dpfl.tasks.base import Task, numbers
from dpfl.tasks.metrics import Evaluated


@dataclass(frozen=True, kw_only=True)
class TokenPrediction(Task):
    """A token at every position: the next character or word.

    The model gives (records, positions, ``vocabulary``) scores; targets are (records, positions)
    tokens. ``padding`` is a token that does not count, neither in a loss nor in a metric. A
    record's loss is the mean over its tokens.
    """

    name: ClassVar[str] = "token_prediction"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy", "loss")
    counted: ClassVar[str] = "vocabulary"
    metric: str = "perplexity"
    vocabulary: int | None = None
    padding: int | None = None

    @property
    def width(self) -> int:
        """The size of the vocabulary."""
        return self.vocabulary or 1

    def check_targets(self, where: str, values: np.ndarray) -> Tensor:
        """Convert rows of tokens."""
        found = numbers(where, values, "targets")
        check(
            found.ndim == 2,
            where,
            f"has targets of shape {found.shape}",
            "give one row of tokens per record",
            DataError,
        )
        check(
            bool(np.all((found == np.round(found)) & (found >= 0) & (found < 2**31))),
            where,
            "has targets that are not tokens",
            "give whole numbers from 0",
            DataError,
        )
        return torch.from_numpy(found.astype(np.int64))

    def resolve(self, targets: Sequence[Tensor]) -> Self:
        """Take the size of the vocabulary from the largest token, unless it is given."""
        if self.vocabulary is not None:
            return self
        return replace(self, vocabulary=1 + max(int(t.max()) for t in targets if t.numel()))

    def outside(self, targets: Tensor) -> str | None:
        """Say which token is not in the vocabulary."""
        if not targets.numel():
            return None
        high = int(targets.max())
        problem = f"has token {high} as a target, outside 0..{self.width - 1}"
        return problem if high >= self.width else None

    def made_up(self, count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return made-up tokens of the vocabulary, one for each position."""
        return torch.randint(0, self.width, (count, *shape), generator=generator)

    def accepts(self, outputs: Tensor) -> bool:
        """Whether there is a row of scores, one a token at least, for every position."""
        return outputs.ndim == 3 and outputs.shape[2] >= self.width

    @property
    def wanted(self) -> str:
        """What the model must return, in words."""
        return f"(records, positions, {self.width}) scores"

    def _per_token(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and which tokens count; both (records, positions)."""
        each = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        counted = torch.ones_like(targets, dtype=torch.bool)
        return each, counted if self.padding is None else targets != self.padding

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of a record's tokens; 0 for a record of padding only."""
        each, counted = self._per_token(outputs, targets)
        kept = torch.where(counted, each, torch.zeros_like(each))
        return kept.sum(dim=1) / counted.sum(dim=1).clamp_min(1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most likely token at every position."""
        return outputs.argmax(-1)

    def evaluated(self, outputs: Tensor, targets: Tensor) -> Evaluated:
        """All tokens that count, one after the other."""
        each, counted = self._per_token(torch.nan_to_num(outputs), targets)
        return Evaluated(
            targets=targets[counted].numpy(),
            predictions=self.predictions(torch.nan_to_num(outputs))[counted].numpy(),
            losses=each[counted].numpy(),
        )
