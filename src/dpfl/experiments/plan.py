"""Plan before training: what several methods would cost and leave of the signal, and which to try
first.

The recommendation compares ratios of noise to signal (:mod:`dpfl.sim.forecast`) among methods that
promise the same. It does not predict accuracy.
"""

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from dpfl.core.checks import check
from dpfl.core.errors import DpflError, PrivacyRefusal
from dpfl.core.html import html_table, text_of
from dpfl.core.types import Observer, Plain, Promise
from dpfl.data.federation import Federation
from dpfl.data.records import Shard
from dpfl.experiments.describe import Description, describe
from dpfl.methods import find
from dpfl.plugs.selection import Everyone
from dpfl.privacy.accountant import shown
from dpfl.runs.experiment import Experiment
from dpfl.sim.forecast import NoiseForecast
from dpfl.sim.train import train

ALIKE = 1.05
"""Ratios closer than this count as equal: the simpler method is preferred."""

ENOUGH_REACH = 1.0
"""From this ratio of signal to noise on, a method that plans itself is tried first."""

SAMPLE = 4
ROUNDS = 3
"""How many clients and rounds a time is estimated from."""


@dataclass(frozen=True, kw_only=True)
class MethodPlan:
    """One method before training: its ``description``. ``seconds`` is None where no time was
    estimated, and ``untimed`` says why.
    """

    description: Description
    seconds: float | None = None
    untimed: str = ""

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.description.method

    def to_dict(self) -> Plain:
        """Return plain values that JSON can carry."""
        told = self.description.to_dict()
        one = self.description
        same = ("method", "unit", "observer", "adjacency", "clients", "rounds", "parameters")
        return {
            **{name: told[name] for name in (*same, "epsilon", "noise_to_signal", "warning")},
            "bytes_up_per_round": one.bytes_up * one.cohort,
            "bytes_down_per_round": one.bytes_down * one.cohort,
            "seconds": self.seconds,
            "per_client": [dict(vars(client)) for client in one.clients],
        }


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Which ``method`` to try first, of those of one ``promise``, and why (``reason``)."""

    method: str
    promise: Promise
    reason: str

    def to_dict(self) -> Plain:
        """Return plain values; the promise as unit, adjacency, adversary."""
        return {**vars(self), "promise": list(self.promise.to_dict().values())}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plans of several ``methods``, and ``recommendations``: what to try first."""

    methods: tuple[MethodPlan, ...]
    recommendations: tuple[Recommendation, ...]

    def __str__(self) -> str:
        """The tables that a notebook shows, as text."""
        return text_of(self._repr_html_())

    def _repr_html_(self) -> str:
        headings = ("method", "noise / signal", "largest epsilon", "seconds")
        rows = []
        for one in self.methods:
            costs = ", ".join(
                f"{shown(own.spread.largest)} ({observer})"
                for observer, own in one.description.epsilon.items()
            )
            numbers = one.description.forecast.noise_to_signal, one.seconds
            ratio, seconds = ("-" if own is None else f"{own:.3g}" for own in numbers)
            rows.append([one.method, ratio, costs, seconds])
        tips = [[str(tip.promise), tip.method, tip.reason] for tip in self.recommendations]
        advice = html_table(("to protect", "try first", "because"), tips) if tips else ""
        return html_table(headings, rows) + advice

    def to_dict(self) -> Plain:
        """Return plain values that JSON can carry."""
        advice = [one.to_dict() for one in self.recommendations]
        return {"methods": [one.to_dict() for one in self.methods], "recommended": advice}


def plan(
    experiments: Sequence[Experiment], *, data_folder: Path | None = None, timing: bool = True
) -> Plan:
    """Plan experiments that differ in their method, without training.

    ``experiments`` are described one by one, ``timing`` estimates the time of each by a few rounds
    on made-up records, and ``data_folder`` is where data sets lie that do not ship with dpfl.

    ::

        found = plan([Experiment.from_options(for_method(values, name)) for name in names])
        for tip in found.recommendations:
            print(tip.promise, tip.method, tip.reason)
    """
    planned = []
    for experiment in experiments:
        description = describe(experiment, data_folder)
        rounds = description.rounds
        seconds, untimed = _timed(experiment, rounds, data_folder) if timing else (None, "")
        planned.append(MethodPlan(description=description, seconds=seconds, untimed=untimed))
    advice = recommend([one.description.forecast for one in planned])
    return Plan(methods=tuple(planned), recommendations=tuple(advice))


def recommend(forecasts: Sequence[NoiseForecast]) -> list[Recommendation]:
    """Return one of the methods of ``forecasts`` per promise: one that plans itself where its
    signal is strong enough, else the one with the least noise, and of those that are alike the
    simplest. Methods that are shown for reference only are left out.
    """
    groups: dict[Promise, list[NoiseForecast]] = {}
    for one in forecasts:
        real = one.promise.observer is not Observer.NOBODY and not one.reference
        if real and _ratio(one) < math.inf:
            groups.setdefault(one.promise, []).append(one)
    found = []
    for promise in sorted(groups, key=str):
        planned = [one for one in groups[promise] if (one.reach or 0.0) >= ENOUGH_REACH]
        if planned:
            best = max(planned, key=lambda one: one.reach or 0.0)
            found.append(Recommendation(method=best.method, promise=promise, reason=_planned(best)))
            continue
        least = min(map(_ratio, groups[promise]))
        alike = [one for one in groups[promise] if _ratio(one) <= ALIKE * least]
        best = min(alike, key=lambda one: find(one.method).simplicity)
        others = [one for one in groups[promise] if one not in alike]
        reason = _reason(best, [one for one in alike if one is not best], others)
        found.append(Recommendation(method=best.method, promise=promise, reason=reason))
    return found


def _planned(best: NoiseForecast) -> str:
    """Say why a method that plans itself comes first, and what to bear in mind."""
    said = f"its signal is {best.reach:.3g} times the noise on all of its parameters"
    won = "from 1 on it is ahead of, or level with, every tuned published method of our studies"
    return "; ".join(filter(None, [said, won, find(best.method).remark, best.warning]))


def _ratio(one: NoiseForecast) -> float:
    """Its noise over its signal; infinite where that is not known."""
    return math.inf if one.noise_to_signal is None else one.noise_to_signal


def _reason(
    best: NoiseForecast, alike: Sequence[NoiseForecast], others: Sequence[NoiseForecast]
) -> str:
    """Say why: how much noise, who would leave as much, who more, and what to bear in mind."""
    least = f"{'about ' if alike else ''}the least noise, {best.noise_to_signal:.3g}"
    said = [f"its aggregate carries {least} of the longest possible signal"]
    if alike:
        names = ", ".join(one.method for one in alike)
        much = f"about as much ({', '.join(f'{one.noise_to_signal:.3g}' for one in alike)})"
        said.append(f"{names} would leave {much}, and {best.method} is the simpler one")
    if others:
        worst = max(others, key=_ratio)
        said.append(f"{worst.method} would carry {worst.noise_to_signal:.3g}")
    said += [find(best.method).remark, best.warning]
    return "; ".join(filter(None, said))


# -- time ------------------------------------------------------------------------------------------


def _timed(
    experiment: Experiment, rounds: int, data_folder: Path | None
) -> tuple[float | None, str]:
    """Estimate the time; the few clients it takes may be too few for a method that all can run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a run that is not a real one
            return seconds_in_all(experiment, data_folder, rounds), ""
    except DpflError as error:
        return None, str(error)


def seconds_in_all(
    experiment: Experiment, data_folder: Path | None = None, rounds: int | None = None
) -> float:
    """Estimate the seconds that a whole run of an ``experiment`` takes on this machine.

    ``rounds`` are those that it plans, where its file does not say. ``data_folder`` is where data
    sets lie that do not ship with dpfl. No record is used and nothing is charged: only sizes
    matter. A few clients stand for all, from the smallest to the largest
    budget; files and evaluation are not counted.
    """
    federation = experiment.federation(data_folder)
    strategy = experiment.strategy(len(federation.ids))
    few = _blank(federation, SAMPLE)
    model = experiment.build_model(federation)
    everyone = replace(strategy, selection=Everyone())
    quiet = partial(train, progress=False, evaluate_every=ROUNDS)
    result = quiet(model, few, everyone, rounds=ROUNDS, seed=0)
    warm = result.timings[1:]  # the first round plans noise and warms caches
    check(
        bool(warm),
        "timing",
        "nobody can afford a round",
        "raise the budgets, or plan less",
        PrivacyRefusal,
    )
    stages = ("open", "clients", "close")
    opened, clients, closed = (statistics.mean(line[name] for line in warm) for name in stages)
    heard = strategy.selection.rate(len(federation.ids)) * len(federation.ids)
    per_client = (clients / experiment.run.workers + closed) / len(few.ids)
    rounds = rounds or experiment.rounds
    return rounds * (opened + per_client * heard)


def _blank(federation: Federation, count: int) -> Federation:
    """A few clients from the smallest to the largest budget, with as many records as they have, all
    of them empty.
    """

    def epsilon(client: str) -> float:
        return federation.budgets[client].epsilon if client in federation.budgets else 0.0

    ids = sorted(federation.ids, key=epsilon)
    step = max(1, (len(ids) - 1) // max(1, count - 1))
    shards = {}
    for client in [*ids[::step][: count - 1], ids[-1]]:
        own = federation.shards[client]
        tested = own.test_features[:1], own.test_labels[:1]
        shards[client] = Shard.of(*map(torch.zeros_like, (own.features, own.labels, *tested)))
    budgets = {c: own for c, own in federation.budgets.items() if c in shards}
    settings = {c: own for c, own in federation.client_settings.items() if c in shards}
    return replace(federation, shards=shards, budgets=budgets, client_settings=settings)
