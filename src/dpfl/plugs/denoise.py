"""Smoothing the aggregate (Laplacian smoothing, the low-rank mean)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dpfl.core.types import Aggregate, Metrics, PlugOutput, PlugState, Terms
from dpfl.numerics.tensor_svt import spectrum_metrics, thresholded
from dpfl.plugs.base import Plug, chosen_noise
from dpfl.plugs.figures import FigureSpec
from dpfl.plugs.row_denoise import SPECTRUM, ThresholdSchedule


class Denoiser(Plug):
    """Smooths the aggregate.

    Laws: pure, keeps the length, finite in gives finite out. A ``linear`` one acts on noise as it
    does on the rest, so that what it leaves of the noise can be reported.
    """

    linear: ClassVar[bool] = False

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the smoothed vector, the next state, and metrics for the operator."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LowRankMean(Denoiser):
    """Smooth the mean of the models alone, at threshold / clients: the same global model, from the
    sum alone.
    """

    schedule: ThresholdSchedule
    clients: float | None = None

    def resolve(self, terms: Terms) -> Self:
        """Take the noise in a client's model, and how many there are, from the terms."""
        clients = self.clients or terms.expected_cohort
        return replace(self, schedule=self.schedule.resolve(terms), clients=clients)

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the update that leads to the smoothed mean."""
        if not self.schedule.due(aggregate.round):
            return aggregate.vector, state, {}
        clients = chosen_noise(self.clients, "low-rank mean")
        mean = aggregate.model + aggregate.vector
        metrics: Metrics = {}
        for block in self.schedule.matrices(aggregate.layout):
            matrix = mean[block.slice].reshape(block.shape[0], -1).T
            rest, out = matrix.shape
            level = self.schedule.threshold(aggregate.round, rest, out, round(clients)) / clients
            tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
            smoothed, values = thresholded(tall, level)
            metrics |= spectrum_metrics(block.name, values[None], level)
            if float(values[0]) > level:
                shaped = smoothed if tall is matrix else smoothed.T
                mean[block.slice] = shaped.T.reshape(-1)
        return mean - aggregate.model, state, metrics

    def figures(self) -> tuple[FigureSpec, ...]:
        """Show the spectrum."""
        return (SPECTRUM,)
