"""Cleaning the rows against each other, before they are weighed (PFA, FedCEO)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from dpfl.core.layout import Block, Layout
from dpfl.core.types import Metrics, PlugOutput, PlugState, Rows, Terms
from dpfl.numerics.tensor_svt import smoothness_metrics, spectrum_metrics, svt_with_values
from dpfl.plugs.base import Plug
from dpfl.plugs.figures import FigureKind, FigureSpec, spectrum_figure


class RowDenoiser(Plug):
    """Cleans the rows against each other.

    Laws: the matrix keeps its shape; unless ``ordered``, permuting clients permutes rows. After a
    round of which ``personal_starts`` is True each client of the cohort starts the next one from
    its own cleaned row.
    """

    ordered: ClassVar[bool]

    def personal_starts(self, round_: int) -> bool:
        """Whether clients start the next round from their own rows."""
        return False

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Return the cleaned matrix, the next state, and metrics for the operator."""
        raise NotImplementedError


class ThresholdSchedule:
    """When singular values are thresholded, at which level, and of which tensors."""

    def resolve(self, terms: Terms) -> Self:
        """Return the schedule with nothing left open."""
        raise NotImplementedError

    def due(self, round_: int) -> bool:
        """Whether this round (from 0) ends in smoothing."""
        raise NotImplementedError

    def threshold(self, round_: int, rest: int, out: int, clients: int) -> float:
        """The level for a (rest, out, clients) stack."""
        raise NotImplementedError

    def matrices(self, layout: Layout) -> list[Block]:
        """The tensors that are smoothed."""
        raise NotImplementedError


SPECTRUM = spectrum_figure(
    "spectrum",
    "spectrum and threshold",
    "/singular_values",
    "singular value",
    "What is below the dashed line is taken away; what is above loses as much. The first slice is "
    "the sum over clients.",
    threshold="/threshold",
)


@dataclass(frozen=True, kw_only=True)
class LowRankStack(RowDenoiser):
    """Smooth the cohort's models against each other; each client starts next from its own."""

    schedule: ThresholdSchedule
    ordered: ClassVar[bool] = True

    def resolve(self, terms: Terms) -> Self:
        """Take the noise in a client's model from the terms."""
        return replace(self, schedule=self.schedule.resolve(terms))

    def personal_starts(self, round_: int) -> bool:
        """Whether the round ended in smoothing."""
        return self.schedule.due(round_)

    def __call__(self, state: PlugState, rows: Rows, round_: int) -> PlugOutput:
        """Return the smoothed rows, and what became of the singular values."""
        if not self.schedule.due(round_) or len(rows.cohort) == 0:
            return rows.matrix, state, {}
        models = (rows.origin + rows.matrix).to(torch.float32)
        metrics: Metrics = {}
        matrices = self.schedule.matrices(rows.layout)
        for block in (b for b in rows.layout if len(b.shape) < 2):
            models[:, block.slice] = models[:, block.slice].mean(dim=0)
        for block in matrices:
            shaped = models[:, block.slice].reshape(len(models), block.shape[0], -1)
            stack = shaped.permute(2, 1, 0)
            level = self.schedule.threshold(round_, *stack.shape)
            smoothed, values = svt_with_values(stack, level)
            if float(values[0, 0]) <= level:  # nothing would be left of what the models share
                smoothed = stack.mean(dim=2, keepdim=True).expand_as(stack)
            metrics |= spectrum_metrics(block.name, values, level)
            if block is matrices[-1]:
                metrics |= smoothness_metrics(stack, smoothed)
            models[:, block.slice] = smoothed.permute(2, 1, 0).reshape(len(models), -1)
        return models - rows.origin, state, metrics

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the spectrum, and how far clients are from each other (the paper's Figure 1)."""
        maps = {"smoothness_map_before": "before", "smoothness_map_after": "after"}
        roughness = FigureSpec(
            name="smoothness",
            title="roughness",
            kind=FigureKind.CLIENT_MAP,
            metrics={key: f"{when} smoothing" for key, when in maps.items()},
            x_label="client",
            y_label="class",
            caption="Mean squared distance of a client's weights of a class from the others'; "
            "small is smooth.",
        )
        return (SPECTRUM, roughness)
