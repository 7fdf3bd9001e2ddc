"""Privacy loss distributions of single steps of sampled Gaussians, discretised pessimistically.

The loss L = log P / Q of a dominating pair (P, Q) is put on a grid of multiples of an interval h by
connecting the dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, PETS 2022): what lies between two
dots is divided between them so that its masses under P and under Q are both kept. The result
dominates the step for every h. The pairs, for noise s in units of the sensitivity and a sampling
rate q:

    Poisson, add/remove      P = (1-q) N(0, s^2) + q N(1, s^2),  Q = N(0, s^2),  and the reverse
    Poisson, replace-one     the same P, and Q = (1-q) N(0, s^2) + q N(-1, s^2)
    fixed size, replace-one  the first pair with s = z / 2 where the loss is positive, its mirror
                             image where it is negative, the rest at 0 (Zhu, Dong, Wang, AISTATS
                             2022, Theorem 11)

Masses are differences of the nearer tails of normal distributions, so that they are exact relative
to themselves.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Floats = NDArray[np.float64]
Pair = Literal["sampled", "replaced", "mirrored"]

_ROUNDING = 1e-13  # of a cell's mass, moved to its upper dot: more than its division can round
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """``steps`` equal releases and their dominating pair.

    ``std`` is the noise in units of the sensitivity, ``rate`` the sampling rate.
    """

    std: float
    rate: float
    steps: int
    pair: Pair = "sampled"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Mass ``masses[i]`` at the loss ``(first + i) * interval``; ``infinite`` is at infinity."""

    interval: float
    first: int
    masses: Floats
    infinite: float

    def tilted(self, tilt: float) -> tuple[float, Floats]:
        """Return log M, of the sum of masses * exp(tilt * loss), and these terms divided by M."""
        losses = self.interval * np.arange(self.first, self.first + len(self.masses))
        exponents = self._log_masses + tilt * losses
        top = float(exponents.max())
        weights = np.exp(exponents - top)
        total = float(weights.sum())
        return top + math.log(total), weights / total

    @cached_property
    @np.errstate(divide="ignore")
    def _log_masses(self) -> Floats:
        return np.asarray(np.log(self.masses))


@np.errstate(divide="ignore")
def loss_at(t: Floats, step: Step) -> Floats:
    """The loss at t standard deviations of the noise."""
    none = np.log1p(-step.rate)
    drawn = math.log(step.rate)
    shift = 1 / step.std
    up: Floats = np.logaddexp(none, drawn + shift * (t - shift / 2))
    if step.pair != "replaced":
        return up
    return up - np.logaddexp(none, drawn - shift * (t + shift / 2))


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _where(losses: Floats, step: Step) -> Floats:
    """The inverse of ``loss_at``, minus infinity below the smallest loss."""
    rate = step.rate
    shift = 1 / step.std
    if step.pair == "replaced":
        half = losses / 2
        log_odds = math.log1p(-rate) - math.log(rate)
        y = half + np.log(-np.expm1(-losses) / 2) + shift**2 / 2 + log_odds
        return (half + np.logaddexp(y, np.logaddexp(0.0, 2 * y) / 2)) / shift
    small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 40.0)) / rate, -1.0))
    large = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(losses, 0.0)))
    return np.where(losses < 30, small, large) / shift + shift / 2


def _between(t: Floats) -> Floats:
    """The normal masses between neighbours of an increasing array, to full precision."""
    tails = ndtr(-np.abs(t))
    masses: Floats = np.abs(np.diff(tails))
    k = int(np.searchsorted(t, 0.0))
    if 0 < k < len(t):
        masses[k - 1] = 1 - tails[k - 1] - tails[k]
    return masses


def extent(step: Step, tail: float) -> tuple[float, float]:
    """The losses beyond which there is less mass than ``tail``."""
    far = -float(ndtri(tail))
    ends = loss_at(np.array([-far, 1 / step.std + far]), step)
    return (float(ends[0]) if step.pair == "sampled" else -float(ends[1])), float(ends[1])


def one_step(step: Step, interval: float, tail: float, *, reverse: bool = False) -> Losses:
    """Discretise one step; ``reverse`` exchanges P and Q, ``tail`` is about the infinite mass."""
    smallest, largest = extent(step, tail)
    last = math.ceil(largest / interval)
    first = math.floor(smallest / interval) if step.pair == "sampled" else 0
    t = _where(interval * np.arange(first, last + 1, dtype=np.float64), step)
    ends = np.concatenate([[-np.inf], t, [np.inf]])
    shift = 1 / step.std
    base = _between(ends)
    upper = (1 - step.rate) * base + step.rate * _between(ends - shift)
    lower = base
    if step.pair == "replaced":
        lower = (1 - step.rate) * base + step.rate * _between(ends + shift)
    if step.pair == "sampled":
        if reverse:
            return _dots(lower[::-1], upper[::-1], -last, interval)
        return _dots(upper, lower, first, interval)
    # Symmetric: the mirror image of (upper, lower) is (lower, upper).
    masses = np.append(lower[:0:-1], upper[1:]), np.append(upper[:0:-1], lower[1:])
    made = _dots(*masses, -last, interval)
    if step.pair == "mirrored":
        made.masses[last] += max(0.0, (1 - step.rate) * (1 - 2 * float(ndtr(-t[0]))))
    return made


def _dots(upper: Floats, lower: Floats, first: int, interval: float) -> Losses:
    """Divide each cell's mass between its ends.

    The first cell, below all dots, moves to the first dot, and the last one to infinity.
    """
    inside = upper[1:-1]
    left = np.minimum(interval * np.arange(first, first + len(inside)), _LARGEST_EXPONENT)
    share = (inside - lower[1:-1] * np.exp(left) + _ROUNDING * inside) / -math.expm1(-interval)
    share = np.clip(share, 0.0, inside)
    masses = np.append(inside - share, 0.0)
    masses[1:] += share
    masses[0] += upper[0]
    return Losses(interval=interval, first=first, masses=masses, infinite=float(upper[-1]))
