"""Membership inference against a simulated run: was this record, or this client, trained on?

The game is played under the method's own adjacency, so that the bound that its epsilon implies
holds for every attack. In each of many runs a fair coin decides for every target whether it is
there; data, partition and first model are the same, coins and noise are not. The adversary sees the
published model, or all that the server sees, and knows the targets' records.

*Why the bound holds for pooled trials.* Given the coins of the others, two runs that differ in one
coin are neighbours, so an attack on one target satisfies TPR <= B(FPR) with the concave B of the
plan. Averages over targets and runs satisfy it too. Scores from other runs depend on nothing of the
run that is attacked.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from dpfl.attacks.members.likelihood import Floats, Marks, Trials, likelihood_scores
from dpfl.attacks.members.result import (
    ATTACKS,
    ClaimedBound,
    MembershipCurve,
    MembershipResult,
    View,
    claimed_bound,
    figures_of,
)
from dpfl.attacks.members.targets import ClientTargets, RecordTargets, Targets
from dpfl.attacks.observation import Observation, observe
from dpfl.core.checks import check, is_number, whole_number
from dpfl.core.errors import DataError, did_you_mean
from dpfl.core.threads import one_thread
from dpfl.core.types import Observer
from dpfl.sim.loop import Simulation
from dpfl.sim.opening import Setup, in_memory

RUNS, TARGETS, RATES = 40, 64, (0.001, 0.01, 0.1)
"""How many runs and, at most, targets there are, and where true positive rates are stated."""

LEAST_RUNS = 8

Progress = Callable[[int, int, float], None]
"""Called after every run with its number, how many there are, and the seconds so far."""


def membership(
    setup: Setup,
    *,
    client: str | None = None,
    targets: int | None = None,
    runs: int = RUNS,
    rates: Sequence[float] | None = None,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> MembershipResult:
    """Play a setup many times, and guess from each run who was trained on.

    ``setup`` is what is simulated (:func:`dpfl.sim.experiment.setup_of`). Where its method protects
    records, targets are the first ``targets`` training records of a ``client`` (the first one),
    where it protects clients, its first clients. ``runs`` are simulations with seeds of their own.
    ``rates`` are the false positive rates at which true positive rates are stated; each needs one
    absent target in 1 / rate trials, and those that are left out come where there are enough.
    ``confidence`` is that of all limits. ``progress`` is called after every run.
    """
    began = time.perf_counter()
    _check_confidence(whole_number("membership", "runs", runs, least=LEAST_RUNS), confidence)
    engine = setup.settings.get("engine", "stacked")
    alone = {"workers": 1, "engine": "stacked" if engine == "ray" else engine}
    settings = {**setup.settings, **alone, "evaluate_every": 10**9}  # at the end only
    setup = replace(setup, seeded=True, settings=settings)
    with in_memory(replace(setup, model=copy.deepcopy(setup.model))) as prepared:
        chosen = _targets(prepared, client, targets)
        pooled = prepared.strategy.local.pooled  # whose curator has the records themselves
        views: tuple[View, ...] = ("model",) if pooled else ("model", "transcript")
    seed = setup.seed.child("membership")
    coins = seed.child("coins").numpy().random((runs, len(chosen))) < 0.5
    stated, missing = _stated(rates, coins)
    found: dict[View, Floats] = {view: np.zeros(coins.shape) for view in views}
    for run, present in enumerate(coins):
        own = replace(setup, seed=seed.child("run", run), model=copy.deepcopy(setup.model))
        with one_thread():  # small matrices, and the same bits on every machine
            seen = _played(own, chosen, present)
            for view in views:
                found[view][run] = _statistics(chosen, seen, view)
        if progress is not None:
            progress(run + 1, runs, time.perf_counter() - began)
    claimed = {view: claimed_bound(seen, chosen.clients, view, stated) for view in views}
    bounds = {view: bound for view, bound in claimed.items() if bound is not None}
    strategy = seen.simulation.strategy
    records = isinstance(chosen, RecordTargets)
    return MembershipResult(
        method=strategy.name,
        unit=str(strategy.unit),
        adjacency=str(strategy.adjacency),
        client=chosen.clients[0] if records else None,
        left_out=isinstance(chosen, RecordTargets) and chosen.left_out,
        runs=runs,
        targets=len(chosen),
        absences=int((~coins).sum()),
        confidence=confidence,
        bounds=bounds,
        curves=_curves(found, coins, bounds, stated, missing, confidence),
        seed=setup.seed.value,
        seconds=round(time.perf_counter() - began, 3),
    )


# -- before the work starts ------------------------------------------------------------------------


def _check_confidence(runs: int, confidence: float) -> None:
    """Refuse limits that so few runs cannot have.

    If every run were one trial, a perfect attack must still be told from a coin: its lower limit,
    ((1 - confidence) / 2)^(1 / runs), must be at least one half.
    """
    check(
        is_number(confidence) and 0.5 <= confidence < 1,
        "confidence",
        f"{confidence!r} is not a level",
        "give 0.5 or more, below 1",
    )
    needed = int(np.ceil(np.log2(2 / (1 - confidence))))
    check(
        runs >= needed,
        "runs",
        f"{runs} runs are too few for a confidence of {confidence:g}",
        f"use {needed} or more",
    )


def _targets(prepared: Simulation, client: str | None, count: int | None) -> Targets:
    """Choose whose membership is guessed; what cannot be played is refused."""
    strategy = prepared.strategy
    nothing = strategy.personal is not None and strategy.personal.whole
    check(
        not nothing,
        "membership",
        f"'{strategy.name}' sends nothing and publishes nothing",
        "attack another one",
    )
    members = prepared.work.members(prepared.members)
    if not strategy.unit.of_data:
        check(
            client is None,
            "client",
            f"'{strategy.name}' protects whole clients",
            "leave the client out",
        )
        number = _count(count, len(members), "clients")
        return ClientTargets(members=[members[name] for name in sorted(members)[:number]])
    client = min(members) if client is None else client
    check(
        client in members,
        "client",
        f"there is no '{client}'",
        did_you_mean(client, members),
        DataError,
    )
    member = members[client]
    left_out = strategy.observer is Observer.NOBODY
    problem = "records are tokens, not numbers"
    check(
        left_out or prepared.federation.shards[client].features.is_floating_point(),
        f"client '{client}'",
        f"its {problem}",
        "use a data set of numbers or images",
        DataError,
    )
    number = _count(count, member.shard.examples - left_out, f"{strategy.unit}s of '{client}'")
    return RecordTargets(member=member, places=torch.arange(number), left_out=left_out)


def _count(asked: int | None, most: int, what: str) -> int:
    """How many targets there are, of ``most`` that can be; ``what`` says what they are.

    Left out, it is :data:`TARGETS`, or fewer where there are fewer; more than there are is refused.
    """
    check(most >= 1, "targets", f"there are no {what} to choose from", "use more data", DataError)
    if asked is None:
        return min(TARGETS, most)
    whole_number("targets", "targets", asked)
    check(asked <= most, "targets", f"{asked} of {most} {what}", f"give at most {most}", DataError)
    return asked


def _stated(
    asked: Sequence[float] | None, coins: Marks
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The false positive rates that are stated, and those for which there are too few trials.

    A rate needs at least one false positive: 1 / rate trials without the target. A rate that was
    asked for and cannot be stated is refused, with the number of runs that it takes.
    """
    absences = int((~coins).sum())
    there = int(coins.sum())
    check(
        min(absences, there) >= 2,
        "runs",
        f"{coins.size} trials have {there} with and {absences} without the target",
        "use more runs or targets",
    )
    wanted = RATES if asked is None else tuple(asked)
    for rate in wanted:
        check(
            is_number(rate) and 0 < rate < 1,
            "fpr",
            f"{rate!r} is not a rate",
            "give numbers between 0 and 1",
        )
        needed = int(np.ceil(1 / rate))
        runs = int(np.ceil(1.1 * len(coins) * needed / absences))
        check(
            asked is None or absences >= needed,
            "fpr",
            f"{rate:g} needs {needed} trials without the target, and there are {absences}",
            f"use more targets, about {runs} runs, or a larger rate",
        )
    enough = tuple(rate for rate in wanted if absences * rate >= 1)
    return enough, tuple(rate for rate in wanted if rate not in enough)


# -- the runs --------------------------------------------------------------------------------------


def _played(setup: Setup, targets: Targets, present: Marks) -> Observation:
    """Play a run in which only targets that are ``present`` are there.

    The number of records stays as it was, and with it the plan: what is claimed is the same for all
    coins.
    """
    coins = torch.from_numpy(present)
    return observe(replace(setup, federation=targets.federation(setup.federation, coins)))


def _statistics(targets: Targets, seen: Observation, view: View) -> Floats:
    """What an adversary computes of each target; more of it speaks for its presence.

    A model that is not finite tells nothing.
    """
    found = targets.confidence(seen) if view == "model" else targets.alignment(seen)
    known: Floats = np.nan_to_num(found.numpy(), nan=0.0, posinf=1e30, neginf=-1e30)
    return known


# -- the curves ------------------------------------------------------------------------------------


def _curves(
    found: dict[View, Floats],
    coins: Marks,
    bounds: dict[View, ClaimedBound],
    rates: tuple[float, ...],
    missing: tuple[float, ...],
    confidence: float,
) -> tuple[MembershipCurve, ...]:
    """Both attacks on every view, with as many tests of a bound as there are limits."""
    tests = max(1, 2 * len(ATTACKS) * len(bounds) * len(rates))
    curves = []
    for view, statistics in found.items():
        for attack in ATTACKS:
            likely = attack == "likelihood"
            trials = Trials(likelihood_scores(statistics, coins) if likely else statistics, coins)
            bound = bounds.get(view)
            own = figures_of(trials, bound, rates, confidence=confidence, tests=tests)
            curves.append(
                MembershipCurve(
                    view=view, attack=attack, figures=own, roc=trials.curve(), missing=missing
                )
            )
    return tuple(curves)
