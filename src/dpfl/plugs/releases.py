"""Statistics that are released once, before round one, and become public buffers of the model.

A release is a bounded statistic per record: a mean, a Gram matrix, a histogram, quantiles. Every
client clips each record's contribution, adds the contributions up, adds noise on the grid and sends
the result; the server combines the answers, more precise ones counting more, and writes the result
into a buffer of the model, for everyone. What the statistic is computed from is the input of the
module that owns the buffer, so a later release sees the effect of an earlier one.

Releases are accounted like rounds: their noise, sensitivity and number are fixed before anything is
released, and the rounds get what they leave of each client's budget.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpfl.core.checks import check, one_of, positive, share, whole_number
from dpfl.numerics.clipping import clip
from dpfl.plugs.base import Plug

Shape = tuple[int, ...]

_AT_ONCE = 1 << 24  # numbers of the statistic held at once


@dataclass(frozen=True, kw_only=True)
class Release(Plug):
    """A bounded statistic per record.

    ``into`` names the buffer of the model that the result becomes, ``share`` the part of a client's
    budget that it takes: of the squared reciprocal of the noise that the whole budget allows to one
    release. ``bound`` is the largest norm of one record's contribution; longer ones are scaled
    down.

    Laws: row i of ``statistic`` depends on record i alone; ``result`` is finite, of the buffer's
    shape, for any finite mean.
    """

    into: str
    share: float
    bound: float = 1.0

    def __post_init__(self) -> None:
        share("release", share=self.share)
        positive("release", bound=self.bound)
        check(bool(self.into), "release", "it has no buffer", "name a buffer of the model")

    def numbers(self, shape: Shape) -> int:
        """How many numbers the statistic has, for a buffer of this shape."""
        return math.prod(shape)

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return one row of numbers per record, before clipping; ``inputs`` has one row a
        record.
        """
        raise NotImplementedError

    def clipped_sum(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the sum, in double precision, of the records' rows, each clipped to ``bound``."""
        numbers = self.numbers(shape)
        total = torch.zeros(numbers, dtype=torch.float64)
        for some in torch.split(torch.arange(len(labels)), max(1, _AT_ONCE // max(numbers, 1))):
            rows = self.statistic(inputs[some], labels[some], shape)
            total += sum_of_clipped(rows, len(some), numbers, self.bound)
        return total

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return the buffer from the noisy mean of the statistic over all records.

        ``std`` is that of the noise on each number of the mean, as far as clients' claims tell.
        """
        return mean.reshape(shape)


def sum_of_clipped(rows: Tensor, records: int, numbers: int, bound: float) -> Tensor:
    """Return the sum, in double precision, of a statistic's rows, each clipped to ``bound``."""
    check(
        rows.shape == (records, numbers),
        "release",
        f"gives {tuple(rows.shape)} for {records} records, not {numbers} a record",
        "match statistic and numbers",
    )
    return clip(rows.to(torch.float32), bound).to(torch.float64).sum(dim=0)


class Mean(Release):
    """The mean of the inputs themselves."""

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the inputs."""
        return inputs


class GramMatrix(Release):
    """The second moments x x^T of the inputs, a d x d buffer.

    Sent is the upper triangle with off-diagonals times sqrt(2), so that one record's norm is |x|^2.
    """

    def numbers(self, shape: Shape) -> int:
        """Return d (d + 1) / 2."""
        check(
            len(shape) == 2 and shape[0] == shape[1],
            "release",
            f"a Gram matrix does not fit {shape}",
            "use a d x d buffer",
        )
        return shape[0] * (shape[0] + 1) // 2

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the scaled upper triangle of x x^T."""
        rows, columns = torch.triu_indices(shape[0], shape[0]).unbind()
        return inputs[:, rows] * inputs[:, columns] * _triangle_scale(rows, columns)

    def clipped_sum(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the sum by one product of matrices: no record's row is written out.

        An input whose norm is at most the root of the bound has a row within the bound. Products of
        two numbers of single precision are exact in double precision.
        """
        x = clip(inputs.to(torch.float32), math.sqrt(self.bound)).to(torch.float64)
        rows, columns = torch.triu_indices(shape[0], shape[0]).unbind()
        return (x.T @ x)[rows, columns] * _triangle_scale(rows, columns).to(torch.float64)

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return the symmetric matrix."""
        rows, columns = torch.triu_indices(shape[0], shape[0]).unbind()
        matrix = torch.zeros(shape, dtype=mean.dtype)
        matrix[rows, columns] = matrix[columns, rows] = mean / _triangle_scale(rows, columns)
        return matrix


@dataclass(frozen=True, kw_only=True)
class Histogram(Release):
    """Shares of records by bin, between the public numbers ``low`` and ``high``.

    Of every input (a buffer of inputs x bins), or of the labels (a buffer of as many bins as there
    are classes). A record's contribution is one 1 an input; ``bound`` is scaled to that, so
    leave it at 1.
    """

    low: float = 0.0
    high: float = 1.0
    of: Literal["inputs", "labels"] = "inputs"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("release", ("inputs", "labels"), of=self.of)
        check(
            self.low < self.high, "release", f"low = {self.low}, high = {self.high}", "give a range"
        )

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return a 1 in each input's bin, divided by the root of the number of inputs."""
        bins = shape[-1]
        if self.of == "labels":
            return torch.nn.functional.one_hot(labels.clamp(0, bins - 1), bins).to(torch.float32)
        scaled = (inputs - self.low) / (self.high - self.low) * bins
        places = scaled.nan_to_num(0.0).floor().clamp(0, bins - 1).to(torch.int64)
        ones = torch.nn.functional.one_hot(places, bins).flatten(1).to(torch.float32)
        return ones / math.sqrt(inputs.shape[1])

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return shares: none below 0, every input's summing to 1."""
        counts = mean.reshape(-1, shape[-1]).clamp_min(0)
        total = counts.sum(dim=1, keepdim=True)
        even = torch.full_like(counts, 1 / counts.shape[1])
        return torch.where(total > 0, counts / total.clamp_min(1e-30), even).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class Quantile(Histogram):
    """Quantiles of every input, from a noisy histogram with ``resolution`` bins.

    The buffer holds a row of as many numbers as there are ``levels`` for each input.
    """

    levels: tuple[float, ...] = (0.5,)
    resolution: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("release", "resolution", self.resolution, least=2)
        check(
            bool(self.levels) and all(0 <= level <= 1 for level in self.levels),
            "release",
            f"levels = {self.levels}",
            "give numbers from 0 to 1",
        )

    def numbers(self, shape: Shape) -> int:
        """Return inputs x resolution."""
        inputs, rest = divmod(math.prod(shape), len(self.levels))
        check(
            rest == 0,
            "release",
            f"{len(self.levels)} levels do not fit a buffer of shape {shape}",
            "use a buffer of inputs x levels",
        )
        return inputs * self.resolution

    def statistic(self, inputs: Tensor, labels: Tensor, shape: Shape) -> Tensor:
        """Return the histogram of the record."""
        return super().statistic(inputs, labels, (inputs.shape[1], self.resolution))

    def result(self, mean: Tensor, shape: Shape, std: float) -> Tensor:
        """Return where the noisy distribution function reaches each level."""
        inputs = math.prod(shape) // len(self.levels)
        shares = super().result(mean, (inputs, self.resolution), std)
        reached = shares.cumsum(dim=1).clamp_max(1.0)
        levels = torch.tensor(self.levels, dtype=reached.dtype).expand(inputs, -1).contiguous()
        places = torch.searchsorted(reached, levels - 1e-9).clamp_max(self.resolution - 1)
        width = (self.high - self.low) / self.resolution
        return (self.low + (places + 0.5) * width).to(mean.dtype).reshape(shape)


def _triangle_scale(rows: Tensor, columns: Tensor) -> Tensor:
    """The factor of each entry of an upper triangle that stands for a symmetric matrix."""
    return torch.where(rows == columns, 1.0, math.sqrt(2))
