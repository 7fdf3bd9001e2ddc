"""The [server] section of an experiment file: how the server moves the model, and how it adds up
updates.
"""

from dataclasses import replace
from typing import Literal

from dpfl.core.checks import check
from dpfl.plugs import step as steps
from dpfl.runs.toml_file import Section, in_section
from dpfl.strategy import Strategy
from dpfl.strategy.robust import with_aggregation, with_clipped_rows

_ROBUST = {"byzantine", "selected", "smoothing"}
_NO_STEP = {"average", "aggregation", "clip", *_ROBUST}


class ServerSection(Section):
    """The server optimiser and aggregation, for any method. What is left out stays as it is there.

    ``optimizer``: sgd (plain or with ``momentum``), adam or yogi (with ``beta1``, ``beta2``,
    ``tau``). ``lr`` and its ``schedule``, where ``factor`` belongs to the exponential one.
    ``average``: evaluate and publish the mean of all models ("uniform"), or an exponential mean
    with this decay. ``aggregation`` names a robust one (:mod:`dpfl.plugs.robust`), with its
    settings ``byzantine``, ``selected`` or ``smoothing``. ``clip`` scales down longer updates of
    single clients to this norm, or to the median norm of a round ("median").

    >>> ServerSection(lr=0.1).step(steps.ServerSgd(), rounds=10).lr.rate
    0.1
    """

    optimizer: Literal["sgd", "adam", "yogi"] | None = None
    lr: float | None = None
    schedule: steps.Decay | None = None
    factor: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    beta1: float | None = None
    beta2: float | None = None
    tau: float | None = None
    average: Literal["uniform"] | float | None = None
    aggregation: str | None = None
    byzantine: int | None = None
    selected: int | None = None
    smoothing: float | None = None
    clip: Literal["median"] | float | None = None

    def over(self, strategy: Strategy, rounds: int) -> Strategy:
        """Return a strategy with this section's optimiser and aggregation."""
        strategy = replace(strategy, step=self.step(strategy.step, rounds))
        robust = self.model_dump(exclude_none=True, include=_ROBUST)
        if self.aggregation is None:
            for key in robust:
                check(False, f"[server] {key}", "belongs to an aggregation", "name one")
        else:
            with in_section("server"):
                strategy = with_aggregation(strategy, self.aggregation, **robust)
        if self.clip is None:
            return strategy
        with in_section("server"):
            return with_clipped_rows(strategy, None if self.clip == "median" else self.clip)

    def step(self, own: steps.Step, rounds: int) -> steps.Step:
        """Return the step that this section asks for, in place of a method's ``own``."""
        step = own
        given = self.model_dump(exclude_none=True, exclude=_NO_STEP)
        if given:
            kept = own if isinstance(own, steps.ServerSgd) else steps.ServerSgd()
            lr = self._learning_rate(kept.lr, rounds)
            name = given.pop("optimizer", "sgd")
            start: steps.ServerSgd | steps.ServerAdam = kept
            if name != "sgd":
                start = (steps.ServerAdam if name == "adam" else steps.ServerYogi)(lr=lr)
            more = {key: given[key] for key in given.keys() - {"lr", "schedule", "factor"}}
            for key in more:
                check(
                    hasattr(start, key),
                    f"[server] {key}",
                    f"{name} has none",
                    "leave it out, or choose the optimizer that has it",
                )
            step = replace(start, lr=lr, **more)
        if self.average is None:
            return step
        decay = None if self.average == "uniform" else self.average
        return steps.AveragedIterates(step=step, decay=decay)

    def _learning_rate(self, own: steps.LearningRate, rounds: int) -> steps.LearningRate:
        """The learning rate, over what the method's own step has."""
        adaptive = self.optimizer not in (None, "sgd")
        plain = own == steps.LearningRate()
        check(
            self.lr is not None or not (adaptive and plain),
            "[server] lr",
            f"{self.optimizer} has no default",
            "give lr, for instance 0.1",
        )
        decay = self.schedule or own.decay
        factor = self.factor
        exponential = decay == "exponential"
        where = "[server] factor"
        check(exponential or factor is None, where, f"'{decay}' has none", "leave it out")
        check(
            not exponential or factor is not None or own.decay == decay,
            where,
            "an exponential schedule needs it",
            "give a number below 1",
        )
        return steps.LearningRate(
            rate=own.rate if self.lr is None else self.lr,
            decay=decay,
            factor=own.factor if factor is None else factor,
            rounds=rounds if decay == "cosine" else None,
        )
