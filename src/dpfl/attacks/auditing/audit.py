"""Audit a method: lower bounds on its epsilons, beside what it claims.

Each method meets three tests, in both readings of adjacency: many canaries in few runs, one canary
in many tiny runs, and the support test of :mod:`dpfl.testing`. The first two give lower bounds; all
bounds of a line hold together with the confidence asked for. Audits find gross errors; they prove
no guarantee.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from dpfl.attacks.auditing.canaries import Bools, Game, Scorer
from dpfl.attacks.auditing.claims import Claim
from dpfl.attacks.auditing.lower_bounds import (
    LowerBound,
    Trials,
    canary_bounds,
    repeated_bounds,
    separation,
)
from dpfl.attacks.auditing.plan import TESTS, Audit, adversaries, check_audited, games
from dpfl.attacks.auditing.result import AuditLine, AuditResult, ControlResult
from dpfl.attacks.auditing.support import NOT_RUN, support_test
from dpfl.attacks.observation import Transcript
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency, Observer
from dpfl.methods import find
from dpfl.privacy.accountant import shown
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

LARGEST_CLAIM = 25.0
"""Beyond it no number of trials that anybody has time for comes near."""

Progress = Callable[[str, int, int], None]
MakeGames = Callable[[Method, Strategy, Audit, Observer, Adjacency], tuple[Game, Game]]
Misstate = Callable[[Game, Transcript], Claim]
Fault = Callable[[], AbstractContextManager[Any]]


def audit(
    methods: Sequence[str],
    how: Audit | None = None,
    *,
    controls: int = 0,
    make: MakeGames = games,
    progress: Progress = lambda stage, done, total: None,
) -> AuditResult:
    """Audit methods by name, each against every adversary it claims anything against.

    ``controls`` is how often each deliberate fault is put into each method, to see how often the
    tests catch it. ``make`` makes the games: :func:`~dpfl.attacks.auditing.plan.games` those of the
    simulator, :func:`dpfl.deploy.recorded_sites.site_games` those of real sites and their messages.

    >>> found = audit(["fedavg_dp"], Audit(canaries=60, trials=64, rounds=1, seed=1))
    >>> [line.refuted for line in found.lines]
    [False, False]
    """
    from dpfl.attacks.auditing.faults import caught_in

    how = how or Audit()
    began = time.perf_counter()
    found: list[AuditLine] = []
    left_out: dict[str, str] = {}
    for number, name in enumerate(methods):
        progress(name, number, len(methods))
        try:
            found += list(audit_lines(find(name), how, make=make, left_out=left_out))
        except (ConfigurationError, PrivacyRefusal) as refusal:
            left_out[name] = str(refusal)
    caught: list[ControlResult] = []
    for name in methods if controls else ():
        if name not in left_out:
            caught += caught_in(find(name), how, controls, progress, make)
    progress("done", len(methods), len(methods))
    return AuditResult(
        lines=tuple(found),
        controls=tuple(caught),
        left_out=left_out,
        confidence=how.confidence,
        seconds=time.perf_counter() - began,
        seeded=how.seed is not None,
        simulated=make is games,
    )


def estimate(
    methods: Sequence[str], how: Audit, controls: int = 0, make: MakeGames = games
) -> float:
    """About how many seconds an audit takes, by one run of each game of the first method that can
    be audited; nothing is known of the others before they are tried.
    """
    for name in methods:
        method = find(name)
        try:
            strategy = check_audited(method, how)
            many, few = make(method, strategy, how, adversaries(strategy)[0], how.readings[-1])
            took = [_seconds(game) for game in (many, few)]
        except (ConfigurationError, PrivacyRefusal):
            continue
        once = took[0] * (how.canaries / many.canaries + 3) + took[1] * (how.runs(few) + 3)
        return once * len(methods) * (len(how.readings) + 5 * controls)
    return 0.0


def _seconds(game: Game) -> float:
    """How long a run takes once everything is loaded and planned."""
    game.play(np.zeros(game.canaries, dtype=bool), 1)
    began = time.perf_counter()
    game.play(np.zeros(game.canaries, dtype=bool), 1)
    return time.perf_counter() - began


def audit_lines(
    method: Method,
    how: Audit,
    *,
    misstate: Misstate | None = None,
    fault: Fault = nullcontext,
    observers: Sequence[Observer] = (),
    make: MakeGames = games,
    left_out: dict[str, str] | None = None,
) -> Iterator[AuditLine]:
    """Audit one method: a line for every adversary and reading.

    ``fault`` breaks the code while the games are played, and ``misstate`` claims something else:
    both are for controls. A method that claims nothing, or whose clients send nothing, is refused.
    ``make`` is as in :func:`audit`. ``left_out`` is told why a line is missing.
    """
    strategy = check_audited(method, how)
    support = NOT_RUN if misstate else support_test(method, strategy, fault)
    for observer in observers or adversaries(strategy):
        for reading in how.readings:
            try:
                played = make(method, strategy, how, observer, reading)
                line = _line(method, played, how, misstate, fault)
            except ConfigurationError as refusal:
                line = str(refusal)
            if isinstance(line, AuditLine):
                yield replace(line, support=support)
            elif left_out is not None:
                left_out[f"{method.name}, {reading}, against the {observer}"] = line


def _line(
    method: Method,
    played: tuple[Game, Game],
    how: Audit,
    misstate: Misstate | None,
    fault: Fault,
) -> AuditLine | str:
    """Both games of one adversary and reading, or why they are not worth playing."""
    many, few = played
    nobody = np.zeros(many.canaries, dtype=bool)
    claims = misstate or (lambda game, seen: game.claim(seen))
    claim = claims(many, many.play(nobody, 1))
    if not claim.finite or claim.epsilon() > LARGEST_CLAIM:
        return f"it claims {shown(claim.epsilon())} there, which no audit comes near"
    confidence = 1 - (1 - how.confidence) / TESTS
    coins = 2 * how.coins
    trials = _together(_played(many, -(-how.canaries // many.canaries), coins, how.seed, fault))
    bounds = canary_bounds(trials, claim, confidence)
    own = claims(few, few.play(np.zeros(few.canaries, dtype=bool), 1))
    runs = list(_played(few, how.runs(few), coins + 1, how.seed, fault))
    bounds += _repeated(runs, own, confidence)
    mu = getattr(claim.curve(), "mu", None)
    return AuditLine(
        method=method.name,
        promise=claim.promise,
        reading=many.adjacency,
        delta=claim.delta,
        claimed=claim.epsilon(),
        bounds=tuple(bounds),
        reach=None if mu is None else _reached(trials) / mu,
    )


def _reached(trials: Trials) -> float:
    """How many standard deviations apart scores of present and absent canaries are."""
    there = trials.scores[trials.present]
    gone = trials.scores[~trials.present]
    return float((there.mean() - gone.mean()) / max(gone.std(), 1e-12 * abs(there.mean()), 1e-300))


def _played(
    game: Game,
    runs: int,
    coins: int,
    seed: int | None,
    fault: Fault,
) -> Iterator[Trials]:
    """Play a game so many times, with new coins, and score every run.

    The auditor learns on the code as it is, faults included.
    """
    with fault():
        scorer = Scorer.learn(game, 7)
    rng = np.random.default_rng(coins)
    for number in range(runs):
        present: Bools = rng.random(game.canaries) < 0.5
        with fault():
            seen = game.play(present, None if seed is None else seed + 1000 + number)
        yield scorer.trials(game, seen, present)


def _together(runs: Iterator[Trials] | Sequence[Trials]) -> Trials:
    own = list(runs)
    scores = np.concatenate([one.scores for one in own])
    return Trials(scores=scores, present=np.concatenate([one.present for one in own]))


def _repeated(runs: Sequence[Trials], claim: Claim, confidence: float) -> list[LowerBound]:
    """Choose statistic and threshold on half of the runs, and try them on the others.

    The statistic is the score, or the score less its mean where the unit was not there: noise that
    repeats from run to run is found by the latter.
    """
    half = len(runs) // 2
    centres = _centres(runs[:half])
    options = [np.zeros_like(centres), centres]
    choice = max(options, key=lambda own: separation(_together(_less(runs[:half], own))))
    chosen_on, tried_on = (_together(_less(part, choice)) for part in (runs[:half], runs[half:]))
    return repeated_bounds(chosen_on, tried_on, claim, confidence)


def _centres(runs: Sequence[Trials]) -> np.ndarray:
    scores = np.stack([one.scores for one in runs])
    absent = ~np.stack([one.present for one in runs])
    return np.asarray((scores * absent).sum(axis=0) / np.maximum(1, absent.sum(axis=0)))


def _less(runs: Sequence[Trials], centres: np.ndarray) -> list[Trials]:
    return [replace(one, scores=one.scores - centres) for one in runs]
