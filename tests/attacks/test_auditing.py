"""Audits: canaries are as long as the accountant says, sound methods pass, faults are caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dpfl.attacks.auditing import faults
from dpfl.attacks.auditing.audit import audit, audit_lines
from dpfl.attacks.auditing.canaries import Game, Scorer
from dpfl.attacks.auditing.claims import GaussianCurve
from dpfl.attacks.auditing.lower_bounds import Trials
from dpfl.attacks.auditing.plan import Audit, adversaries, check_audited, games
from dpfl.attacks.auditing.support import support_test
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Adjacency, Budget, Observer
from dpfl.deploy.recorded_sites import site_games
from dpfl.methods import METHODS
from dpfl.plugs.selection import FixedCohort
from dpfl.strategy.method import Method

SMALL = Audit(canaries=128, trials=160, rounds=2, seed=3)
AUDITED = [
    name
    for name, method in METHODS.items()
    if name not in ("fedavg", "local_only") and method.model is None
]


def game_of(name: str, how: Audit = SMALL, reading: Adjacency = Adjacency.ZERO_OUT) -> Game:
    method = METHODS[name]
    strategy = check_audited(method, how)
    return games(method, strategy, how, adversaries(strategy)[0], reading)[0]


def scored(game: Game, seed: int = 5) -> tuple[Trials, float]:
    """The scores of one run, and the Gaussian parameter that is claimed."""
    present = np.random.default_rng(seed).random(game.canaries) < 0.5
    seen = game.play(present, seed)
    curve = game.claim(seen).curve()
    return Scorer.learn(game, 7).trials(game, seen, present), float(getattr(curve, "mu", math.nan))


# ---- canaries ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "canaries", "reading"),
    [
        ("weiavg", 1000, Adjacency.ZERO_OUT),
        ("weiavg", 1000, Adjacency.REPLACE_ONE),
        ("robust_hdp", 1000, Adjacency.ZERO_OUT),
        ("dp_fed", 200, Adjacency.ZERO_OUT),
        ("udp_fedavg", 200, Adjacency.REPLACE_ONE),
    ],
)
def test_canaries_move_what_is_seen_as_far_as_is_charged(
    name: str, canaries: int, reading: Adjacency
) -> None:
    """The separation of scores is the mu of the accountant, neither less nor more: canaries are as
    long as they can be, and nothing is longer.
    """
    how = Audit(canaries=1000, trials=200, rounds=2, seed=3)
    trials, mu = scored(replace(game_of(name, how, reading), canaries=canaries))
    there, gone = trials.scores[trials.present], trials.scores[~trials.present]
    apart = (there.mean() - gone.mean()) / gone.std()
    error = 2 / math.sqrt(len(trials)) * math.hypot(1, apart / 2)
    assert abs(apart - mu) < 4 * error
    assert mu > 4 * error  # without canaries the test fails


@pytest.mark.parametrize("name", AUDITED)
def test_the_same_noise_shows_exactly_one_canary_more(name: str) -> None:
    """Two runs with the same made-up noise differ in the first round by the canary alone, and by no
    more than what noise is charged for.
    """
    method, how = METHODS[name], Audit(canaries=64, trials=64, rounds=1, seed=3)
    strategy = check_audited(method, how)
    few = games(method, strategy, how, adversaries(strategy)[0], Adjacency.ZERO_OUT)[1]
    nobody = np.zeros(few.canaries, dtype=bool)
    one = nobody.copy()
    one[0] = True
    moved = few.sources(few.play(one, 11)) - few.sources(few.play(nobody, 11))
    if strategy.local.pooled:  # records are drawn there, and this one was not
        assert abs(moved).max() < 1
    else:
        assert abs(moved[0, 0]) > 0
    # Where rows are cleaned against each other the published model mixes clients.
    if few.own_rows and strategy.clean is None:
        assert np.abs(moved[:, 1:]).max(initial=0.0) == 0


def test_the_mean_and_gram_releases_show_canaries_too() -> None:
    game = game_of("preconditioned", Audit(canaries=96, trials=64, seed=3))
    nobody = np.zeros(game.canaries, dtype=bool)
    before, after = (game.sources(game.play(coins, 7)) for coins in (nobody, ~nobody))
    moved = after - before
    assert np.allclose(moved[0], 1.0, atol=1e-3)  # the mean: a record of norm 1, as it is
    assert len(moved) > 10
    assert (moved[2:].mean(axis=1) > 0).all()  # and every round


# ---- sound methods, and broken ones --------------------------------------------------------------


def test_sound_methods_are_not_refuted() -> None:
    found = audit(["weiavg", "fedavg"], SMALL)
    assert [line.reading for line in found.lines] == [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE]
    assert not found.refuted
    assert all(line.claimed > 0 and line.support == "holds" for line in found.lines)
    assert found.lines[1].claimed > found.lines[0].claimed > 3.9
    assert "protects nobody" in found.left_out["fedavg"]
    assert found.to_dict()["lines"][0]["promise"]["observer"] == "server"


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda: faults.scaled_noise(0.0), "weiavg"),
        (lambda: faults.scaled_noise(0.25), "weiavg"),
        (faults.one_key, "weiavg"),
    ],
    ids=["noise off", "quarter of the noise", "seed reused"],
)
def test_broken_noise_is_caught(
    fault: Callable[[], AbstractContextManager[Any]], name: str
) -> None:
    how = Audit(canaries=200, trials=400, rounds=2, readings=[Adjacency.ZERO_OUT])
    (line,) = audit_lines(METHODS[name], how, fault=fault)
    assert line.refuted and line.by_curve > line.claimed


@pytest.mark.parametrize("name", ["weiavg", "udp_fedavg", "dp_fed", "preconditioned"])
def test_float_noise_fails_the_support_test_and_ours_passes(name: str) -> None:
    method = METHODS[name]
    strategy = check_audited(method, SMALL)
    assert support_test(method, strategy, lambda: faults.scaled_noise(1.0)) == "holds"
    assert support_test(method, strategy, faults.float_noise).startswith("broken")


@pytest.mark.parametrize(
    ("fault", "name", "trials", "reading"),
    [
        ("clipping per layer", "weiavg", 100, Adjacency.ZERO_OUT),
        ("unaccounted release", "preconditioned", 8, Adjacency.ZERO_OUT),
        ("amplification", "udp_fedavg", 400, Adjacency.REPLACE_ONE),
    ],
)
def test_faults_of_clipping_and_of_claims_are_caught(
    fault: str, name: str, trials: int, reading: Adjacency
) -> None:
    (one,) = [own for own in faults.FAULTS if own.name == fault]
    method, plan = METHODS[name], Audit(canaries=600, trials=trials, rounds=1)
    assert one.fits(method, plan)
    how = replace(one.change(plan), readings=[reading])
    broken = {"misstate": one.misstate, "fault": one.apply, "observers": one.observers}
    (line,) = audit_lines(method, how, **broken)
    assert line.refuted


def test_controls_count_what_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [one for one in faults.FAULTS if one.name in ("noise off", "float32 noise")]
    monkeypatch.setattr(faults, "FAULTS", (*chosen, faults.FAULTS[-1]))
    found = faults.caught_in(METHODS["weiavg"], SMALL, 1, lambda *_: None)
    caught = {one.fault: one for one in found}
    assert caught["noise off"].rate == 1
    assert caught["float32 noise"].by == {"support": 1}
    assert "amplification" not in caught  # it draws no cohort against the world


# ---- real sites ----------------------------------------------------------------------------------

SITES = Audit(canaries=160, trials=24, rounds=2, readings=[Adjacency.REPLACE_ONE])


def test_what_sites_send_is_audited_from_their_own_files() -> None:
    (line,) = audit_lines(METHODS["weiavg"], SITES, make=site_games)
    assert 0.5 < line.audited < line.claimed
    assert line.claimed > 8  # by the site's ledger, read under replace-one
    assert line.reach == pytest.approx(1.0, abs=0.3)


def test_a_site_without_noise_is_caught_by_its_messages() -> None:
    small = Budget(epsilon=1.0, delta=1e-5)
    how = replace(SITES, budget=small, readings=[Adjacency.ZERO_OUT])
    (line,) = audit_lines(
        METHODS["weiavg"], how, make=site_games, fault=lambda: faults.scaled_noise(0.0)
    )
    assert {bound.test for bound in line.bounds if bound.refutes} >= {"canaries"}


@pytest.mark.parametrize(
    ("name", "observer", "least"),
    [
        ("weiavg", Observer.SERVER, 0.8),
        ("robust_hdp", Observer.SERVER, 0.8),
        ("dp_fed", Observer.WORLD, 0.65),
        ("fedceo", Observer.SERVER, 0.65),
        ("centaur", Observer.WORLD, 0.5),  # half of the units rectify e_j, the others -e_j
        ("individual_clips", Observer.SERVER, 0.65),  # shares of those who may collude count, too
        ("preconditioned", Observer.SERVER, 0.3),  # its model learns the canaries
    ],
)
def test_canaries_of_sites_are_as_long_as_they_can_be(
    name: str, observer: Observer, least: float
) -> None:
    """What a canary moves, over what it is hidden in, is what its site is charged for; a dozen
    canaries know the noise within a third.
    """
    method, strategy = METHODS[name], check_audited(METHODS[name], SITES)
    game, _ = site_games(method, strategy, SITES, observer, Adjacency.REPLACE_ONE)
    nobody = np.zeros(game.canaries, dtype=bool)
    seen = game.play(nobody, 1)
    still, moved = game.sources(seen), game.sources(game.play(~nobody, 1))
    apart = (moved - still).mean(axis=1) / still.std(axis=1)
    curve = game.claim(seen).curve()
    assert isinstance(curve, GaussianCurve)
    assert least < float(np.sqrt((apart**2).sum())) / curve.mu < 1.5


def test_sites_and_simulation_claim_the_same() -> None:
    method, strategy = METHODS["weiavg"], check_audited(METHODS["weiavg"], SITES)
    claims = []
    for make in (games, site_games):
        game, _ = make(method, strategy, SITES, Observer.SERVER, Adjacency.ZERO_OUT)
        seen = game.play(np.zeros(game.canaries, dtype=bool), 1)
        claims.append(game.claim(seen).epsilon())
    assert claims[0] == pytest.approx(claims[1], rel=0.02)


def test_what_sites_cannot_play_is_left_out_with_the_reason() -> None:
    small = replace(SITES, readings=[Adjacency.ZERO_OUT])
    found = audit(["airsgd", "maximum", "preconditioned"], small, make=site_games)
    assert not found.lines
    assert not found.simulated
    assert "simulation" in found.left_out["airsgd"]
    assert "simulation" in found.left_out["maximum"]
    (why,) = [why for name, why in found.left_out.items() if name.startswith("preconditioned")]
    assert "not there" in why


def test_games_of_different_claims_are_not_mixed_up() -> None:
    """With a given noise and a small cohort, the claim depends on how many clients there are."""
    settings = {"selection": FixedCohort(size=4), "noise_multiplier": 2.0}
    how = replace(SMALL, settings=settings, readings=[Adjacency.REPLACE_ONE], trials=100)
    (line,) = audit_lines(METHODS["dp_fed"], how)
    claims = {bound.claimed for bound in line.bounds}
    assert len(claims) == 2
    assert not line.refuted
    assert line.support == "holds"


def test_a_claim_that_no_audit_comes_near_is_named() -> None:
    how = Audit(budget=Budget(epsilon=14.0, delta=1e-5), canaries=300, trials=400, seed=1)
    found = audit(["fedavg_dp"], replace(how, rounds=1))
    assert [line.reading for line in found.lines] == [Adjacency.ZERO_OUT]
    assert "replace_one" in next(iter(found.left_out))


# ---- bad input -----------------------------------------------------------------------------------


def test_too_few_trials_for_the_confidence_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="3 canaries and 4 trials"):
        Audit(canaries=3, trials=4)
    with pytest.raises(ConfigurationError, match="confidence"):
        Audit(confidence=1.5)


def test_a_method_whose_clients_send_nothing_is_refused() -> None:
    method: Method = METHODS["local_only"]
    with pytest.raises(ConfigurationError, match="nothing leaves its clients"):
        list(audit_lines(method, SMALL))


def test_both_adversaries_of_a_method_are_audited() -> None:
    strategy = check_audited(METHODS["udp_fedavg"], SMALL)
    assert adversaries(strategy) == [Observer.WORLD, Observer.SERVER]
