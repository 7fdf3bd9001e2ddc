"""The step of the global model: server optimisers, learning-rate schedules, averaging of iterates.

A step sees the aggregate, which is private already, so whatever it does costs no privacy.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from dpfl.core.checks import check, learning_rate, one_of, positive, share, whole_number
from dpfl.core.layout import Layout
from dpfl.core.types import Aggregate, PlugOutput, PlugState, Terms
from dpfl.plugs.base import Plug

Decay = Literal["constant", "exponential", "inverse_sqrt", "inverse_time", "cosine"]
DECAYS: tuple[Decay, ...] = get_args(Decay)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A server learning rate and how it changes from round to round, t = 1, 2, ...

    ``constant``: ``rate``. ``exponential``: rate x factor^(t - 1). ``inverse_sqrt``: rate /
    sqrt(t). ``inverse_time``: 1 / (strength t), the schedule of strongly convex problems, where
    ``rate`` is 1 / strength. ``cosine``: from ``rate`` down to 0 over ``rounds`` rounds.

    >>> LearningRate(rate=0.5, decay="inverse_time").at(3)
    0.125
    """

    rate: float = 1.0
    decay: Decay = "constant"
    factor: float = 1.0
    rounds: int | None = None

    def __post_init__(self) -> None:
        learning_rate("server step", lr=self.rate)
        one_of("server step", DECAYS, schedule=self.decay)
        share("server step", factor=self.factor)
        if self.rounds is not None:
            whole_number("server step", "rounds", self.rounds)
        check(
            self.decay != "cosine" or self.rounds is not None,
            "server step",
            "a cosine needs its length",
            "give rounds",
        )

    def at(self, round_: int) -> float:
        """The learning rate of a round, counted from 0."""
        t = round_ + 1
        done = min(1.0, round_ / (self.rounds or 1))
        rates = {
            "constant": self.rate,
            "exponential": self.rate * self.factor**round_,
            "inverse_sqrt": self.rate / math.sqrt(t),
            "inverse_time": self.rate / t,
            "cosine": self.rate * (1 + math.cos(math.pi * done)) / 2,
        }
        return rates[self.decay]


class Step(Plug):
    """Moves the global model along the aggregate.

    Laws: pure, keeps the length, finite in gives finite out. ``published`` is the model that is
    evaluated and handed out; rounds go on from the one that ``__call__`` returned.
    """

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Return the next model, the next state, and metrics for the operator."""
        raise NotImplementedError

    def published(self, state: PlugState, model: Tensor) -> Tensor:
        """Return the model for evaluation and publication."""
        return model


@dataclass(frozen=True, kw_only=True)
class ServerSgd(Step):
    """model <- model + lr x momentum buffer, where the buffer is ``momentum`` x buffer + aggregate.

    Without momentum this is plain averaging at a server learning rate (1 is FedAvg). With
    ``nesterov`` the buffer is looked ahead once more.
    """

    lr: LearningRate = field(default_factory=LearningRate)
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check(
            0 <= self.momentum < 1,
            "server step",
            f"momentum = {self.momentum}",
            "give 0 or more, below 1",
        )
        check(
            self.momentum > 0 or not self.nesterov,
            "server step",
            "nesterov without momentum",
            "give momentum, or neither",
        )

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return an empty buffer; none without momentum."""
        return {"buffer": torch.zeros(layout.size)} if self.momentum else {}

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Move along the aggregate, or along its momentum."""
        direction = aggregate.vector
        lr = self.lr.at(aggregate.round)
        if self.momentum:
            buffer = self.momentum * state["buffer"] + aggregate.vector
            state = {**state, "buffer": buffer}
            ahead = aggregate.vector + self.momentum * buffer
            direction = ahead if self.nesterov else buffer
        return aggregate.model + lr * direction, state, {}


@dataclass(frozen=True, kw_only=True)
class ServerAdam(Step):
    """FedAdam, a learning rate per coordinate (Reddi et al., *Adaptive Federated Optimization*,
    ICLR 2021).

    m <- beta1 m + (1 - beta1) u;  v <- beta2 v + (1 - beta2) u^2;  model <- model + lr m / (sqrt(v)
    + tau).
    """

    lr: LearningRate
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        positive("server step", tau=self.tau)
        check(
            0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
            "server step",
            f"beta1 = {self.beta1}, beta2 = {self.beta2}",
            "give 0 or more, below 1",
        )

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return zero moments; the second one begins at tau^2, as in the paper."""
        first = torch.zeros(layout.size)
        return {"first": first, "second": torch.full_like(first, self.tau**2)}

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        """Return the next second moment: the exponential mean of the squares."""
        return self.beta2 * v + (1 - self.beta2) * squares

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Move along the first moment, coordinate by coordinate."""
        u = aggregate.vector
        first = self.beta1 * state["first"] + (1 - self.beta1) * u
        second = self.second_moment(state["second"], u * u)
        moved = self.lr.at(aggregate.round) * first / (second.sqrt() + self.tau)
        return aggregate.model + moved, {**state, "first": first, "second": second}, {}


class ServerYogi(ServerAdam):
    """FedYogi: the same, but v <- v - (1 - beta2) u^2 sign(v - u^2)."""

    def second_moment(self, v: Tensor, squares: Tensor) -> Tensor:
        """Return a second moment that shrinks no faster than it grows."""
        return v - (1 - self.beta2) * squares * torch.sign(v - squares)


@dataclass(frozen=True, kw_only=True)
class AveragedIterates(Step):
    """Another step, whose models are averaged: rounds go on from the last model, and the average is
    what is evaluated and published.

    ``decay`` left out is the plain mean of all models from round ``first`` on (Polyak-Ruppert); a
    number makes it exponential: average <- decay x average + (1 - decay) x model.
    """

    step: Step = field(default_factory=ServerSgd)
    decay: float | None = None
    first: int = 0

    def __post_init__(self) -> None:
        whole_number("averaged iterates", "first", self.first, least=0)
        if self.decay is not None:
            share("averaged iterates", decay=self.decay)

    def start(self, terms: Terms, layout: Layout) -> PlugState:
        """Return the inner step's state, and an average of no models."""
        average = torch.zeros(layout.size, dtype=torch.float64)
        inner = _as_inner(self.step.start(terms, layout))
        return {**inner, "average": average, "models": torch.zeros(1)}

    def __call__(self, state: PlugState, aggregate: Aggregate) -> PlugOutput:
        """Step, and add the model to the average."""
        model, inner, metrics = self.step(_inner(state), aggregate)
        state = {**state, **_as_inner(inner)}
        if aggregate.round < self.first:
            return model, state, metrics
        count = state["models"] + 1
        kept = float(1 - 1 / count) if self.decay is None or count == 1 else self.decay
        average = kept * state["average"] + (1 - kept) * model.to(torch.float64)
        return model, {**state, "average": average, "models": count}, metrics

    def published(self, state: PlugState, model: Tensor) -> Tensor:
        """Return the average, once there is one."""
        if float(state["models"]) > 0:
            return state["average"].to(model.dtype)
        return self.step.published(_inner(state), model)


def _as_inner(state: PlugState) -> PlugState:
    return {f"inner/{name}": tensor for name, tensor in state.items()}


def _inner(state: PlugState) -> PlugState:
    own = {name for name in state if name.startswith("inner/")}
    return {name.removeprefix("inner/"): state[name] for name in sorted(own)}
