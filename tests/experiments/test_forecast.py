"""What a plan says of noise, held against noise that was really drawn; and what it recommends."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dpfl
from dpfl.core.layout import Layout
from dpfl.core.types import Adjacency, Aggregate, Cohort, Observer, Promise, Rows, Unit
from dpfl.experiments.plan import Recommendation, recommend
from dpfl.methods import METHODS, find, make_strategy
from dpfl.methods.dp_fed_ls import LaplacianSmoothing
from dpfl.methods.dprp import RandomProjection
from dpfl.numerics.projections import lift, project
from dpfl.plugs.selection import FixedCohort
from dpfl.plugs.update_noise import noise_variance
from dpfl.rounds import Agreement, enrol
from dpfl.rounds.members import Member, honest_members
from dpfl.sim.forecast import NoiseForecast, forecast

WIDTH = 400
ROUNDS = 40
CLOSE = 0.025  # half of the error that must be told
EPSILONS = (0.5, 0.5, 0.5, 0.5, 8.0, 8.0)
SIZES = (60, 120, 60, 120, 60, 120)
WORK = {"lr": 0.7, "clip": 1.3, "batch_size": 8, "local_steps": 2}


def silent(epsilons: tuple[float, ...] = EPSILONS) -> dpfl.Federation:
    """One class only: every gradient is exactly zero, so that all that moves the model is noise."""
    shards, test = {}, (np.zeros((1, WIDTH)), np.zeros(1, int))
    for number, size in enumerate(SIZES):
        shards[f"c{number}"] = (np.ones((size, WIDTH)), np.zeros(size, int), *test)
    budgets = {
        f"c{number}": dpfl.Budget(epsilon=epsilon, delta=1e-3)
        for number, epsilon in enumerate(epsilons)
    }
    return dpfl.Federation.from_arrays(shards, budgets=budgets, classes=1)


def strategy_of(method: str, **more: Any) -> dpfl.Strategy:
    usual = {name: value for name, value in WORK.items() if name in find(method).settings}
    return make_strategy(method, {**usual, **more})


def agreed(
    strategy: dpfl.Strategy, federation: dpfl.Federation
) -> tuple[Agreement, dict[str, Member]]:
    members = honest_members(federation)
    layout = Layout.of_module(torch.nn.Linear(WIDTH, federation.classes))
    return enrol(strategy, {c: m.claims for c, m in members.items()}, ROUNDS, layout), members


def planned_and_drawn(
    method: str, federation: dpfl.Federation, cohort: int | None = None, **more: Any
) -> tuple[float, float]:
    """The plan's ratio, and the norm of what a real run's rounds added to the model over the
    longest signal.

    ``cohort``: only of rounds in which so many took part. Budgets cover the planned participations
    and no more, so the last rounds may find fewer who are willing.
    """
    strategy = strategy_of(method, **more)
    planned = forecast(*agreed(strategy, federation), dpfl.PublicSeed(1)).noise_to_signal
    result = dpfl.train(
        torch.nn.Linear(WIDTH, 1),
        federation,
        strategy,
        rounds=ROUNDS,
        seed=1,
        evaluate_every=ROUNDS,
    )
    clip = float(WORK["clip"])
    longest = WORK["local_steps"] * WORK["lr"] * clip if strategy.unit is Unit.RECORD else clip
    assert len(result.history) == ROUNDS
    whole = [line for line in result.history if cohort is None or len(line.arrived) == cohort]
    squares = [((line.update_norm or 0.0) / longest) ** 2 for line in whole]
    assert len(squares) >= 0.9 * ROUNDS
    assert planned is not None
    return planned, math.sqrt(statistics.mean(squares))


# -- record level ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg_dp", {}),
        ("dpfedavg", {}),
        ("weiavg", {}),
        ("minimum", {}),
        ("robust_hdp", {"estimator": "oracle"}),
        ("robust_hdp", {}),
    ],
)
def test_noise_of_record_level_methods_is_what_a_run_draws(
    method: str, more: dict[str, Any]
) -> None:
    planned, drawn = planned_and_drawn(method, silent(), **more)
    assert drawn == pytest.approx(planned, rel=CLOSE)


def test_of_a_part_of_the_clients_fewer_are_averaged() -> None:
    equal = silent((0.5,) * 6)
    planned, drawn = planned_and_drawn("fedavg_dp", equal, 3, selection=FixedCohort(size=3))
    assert drawn == pytest.approx(planned, rel=CLOSE)


def test_projected_clients_bring_less_noise_and_count_as_silent() -> None:
    federation = silent()
    heard = 16 / 18  # the share of the public clients' weight
    for method in ("pfa", "pfa_plus"):
        planned, drawn = planned_and_drawn(method, federation)
        assert drawn / heard == pytest.approx(planned, rel=CLOSE)
    weiavg = forecast(*agreed(strategy_of("weiavg"), federation)).noise_to_signal
    assert weiavg is not None
    assert planned < weiavg / heard


@pytest.mark.parametrize("method", ["fedavg_dp", "dpfedavg", "weiavg"])
def test_the_ratio_is_the_norm_of_weighted_rows_of_planned_noise(method: str) -> None:
    agreement, members = agreed(strategy_of(method), silent())
    size, ids = agreement.layout.size, sorted(members)
    variances = [
        noise_variance(agreement.phases(members[c].participant), members[c].shard.examples, size)
        for c in ids
    ]
    generator = torch.Generator().manual_seed(3)
    cohort = Cohort.of({client: members[client].claims for client in ids})
    squares = []
    for _ in range(40):
        matrix = (
            torch.randn(len(ids), size, generator=generator)
            * torch.tensor(variances).sqrt()[:, None]
            / size**0.5
        )
        rows = Rows(matrix=matrix, origin=torch.zeros(size), cohort=cohort, layout=agreement.layout)
        weights, _, _ = agreement.strategy.weights({}, rows, 0)
        squares.append(float((weights @ matrix).square().sum()))
    longest = WORK["local_steps"] * WORK["lr"] * WORK["clip"]
    ratio = math.sqrt(statistics.mean(squares)) / longest
    assert ratio == pytest.approx(forecast(agreement, members).noise_to_signal, rel=CLOSE)


# -- client level ----------------------------------------------------------------------------------


RICH = (1e4,) * 6  # so that a noise multiplier of our own is within the grants


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("dp_fed", {}),
        ("dp_fed", {"selection": FixedCohort(size=3)}),
        ("dp_fed_ls", {"smoothing": 0.3}),
        ("dp_fed_ls", {"smoothing": 3.0, "scope": "model"}),
        ("udp_fedavg", {}),
        ("udp_fedavg", {"noise": "local"}),
        ("udp_fedavg", {"tolerated_dropouts": 2}),
        ("ppsgd", {}),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else " ".join(f"{k}={v}" for k, v in value.items()) or "plain"
    ),
)
def test_noise_of_client_level_methods_is_what_a_run_draws(
    method: str, more: dict[str, Any]
) -> None:
    planned, drawn = planned_and_drawn(method, silent(RICH), noise_multiplier=2.0, **more)
    assert drawn == pytest.approx(planned, rel=CLOSE)


@pytest.mark.parametrize("honest", [1.0, 0.5, "own"])
def test_noise_over_the_air_is_what_a_run_draws(honest: float | str) -> None:
    planned, drawn = planned_and_drawn("airsgd", silent(RICH), noise_multiplier=20.0, honest=honest)
    assert drawn == pytest.approx(planned, rel=CLOSE)


def test_a_receiver_that_is_noisier_than_privacy_asks_for_is_not_forgotten() -> None:
    planned, drawn = planned_and_drawn(
        "airsgd", silent(RICH), noise_multiplier=20.0, receiver_noise=1600.0
    )
    assert drawn == pytest.approx(
        planned, rel=0.25
    )  # gains fade, so a plan can only know their law


def test_lifted_noise_is_as_long_as_all_of_it() -> None:
    planned, drawn = planned_and_drawn("dprp", silent(RICH), noise_multiplier=20.0, dimension=300)
    distortion = math.sqrt(WIDTH / 300)  # of a signal, and here is none
    assert drawn == pytest.approx(math.sqrt(planned**2 - distortion**2), rel=CLOSE)


@pytest.mark.parametrize("dimension", [20, 100])
def test_a_projection_distorts_a_signal_by_its_closed_form(dimension: int) -> None:
    agreement, members = agreed(
        strategy_of("dprp", dimension=dimension, noise_multiplier=1e-9, power=1e18), silent(RICH)
    )
    assert isinstance(agreement.strategy.stages[1], RandomProjection)
    planned, size = forecast(agreement, members).noise_to_signal, agreement.layout.size
    signal = torch.randn(size, generator=torch.Generator().manual_seed(0))
    signal /= signal.norm()
    errors = []
    for number in range(400):
        seed = dpfl.PublicSeed(number)
        there_and_back = lift(project(signal[None], seed, dimension)[0], seed, size)
        errors.append(float((there_and_back - signal).square().sum()))
    assert math.sqrt(statistics.mean(errors)) == pytest.approx(planned, rel=CLOSE)


def test_smoothing_shrinks_the_ratio_by_its_gain_and_more_of_it_by_more() -> None:
    federation = silent(RICH)
    agreement, members = agreed(strategy_of("dp_fed", noise_multiplier=2.0), federation)
    plain = forecast(agreement, members).noise_to_signal
    assert plain == pytest.approx(2.0 * math.sqrt(WIDTH + 1) / 6)
    ratios = []
    for smoothing in (0.1, 1.0, 10.0):
        found = forecast(
            *agreed(strategy_of("dp_fed_ls", noise_multiplier=2.0, smoothing=smoothing), federation)
        )
        assert found.noise_to_signal is not None
        ratios.append(found.noise_to_signal / plain)
        noise = torch.randn(300, WIDTH + 1, generator=torch.Generator().manual_seed(0))
        denoise = LaplacianSmoothing(smoothing=smoothing)
        zero = torch.zeros(WIDTH + 1)
        smoothed = [
            denoise({}, Aggregate(vector=row, model=zero, layout=agreement.layout, round=0))[0]
            for row in noise
        ]
        shrunk = torch.stack(smoothed).square().sum().div(noise.square().sum()).sqrt()
        assert float(shrunk) == pytest.approx(ratios[-1], rel=CLOSE)
    assert 1 > ratios[0] > ratios[1] > ratios[2]


def test_who_promises_nothing_adds_no_noise() -> None:
    found = forecast(*agreed(strategy_of("fedavg"), silent()))
    assert (found.noise_to_signal, found.promise.observer) == (0.0, Observer.NOBODY)


# -- against a simulated run -----------------------------------------------------------------------


def test_the_plan_ranks_as_the_simulators_own_knowledge_does() -> None:
    federation = silent()
    planned, simulated = {}, {}
    for method in ("fedavg_dp", "weiavg", "robust_hdp"):
        strategy = strategy_of(method)
        planned[method] = forecast(*agreed(strategy, federation)).noise_to_signal or 0.0
        model = torch.nn.Linear(WIDTH, 1)
        history = dpfl.train(
            model, federation, strategy, rounds=ROUNDS, seed=0, evaluate_every=ROUNDS
        ).history
        over_least = [line.true_noise.ratio or 0.0 for line in history if line.true_noise]
        assert len(over_least) == ROUNDS
        simulated[method] = statistics.mean(over_least)
    assert sorted(planned, key=planned.__getitem__) == sorted(simulated, key=simulated.__getitem__)
    for method in (
        "fedavg_dp",
        "weiavg",
    ):  # what a plan takes for Robust-HDP is the least there can be
        assert (planned[method] / planned["robust_hdp"]) ** 2 == pytest.approx(
            simulated[method], rel=1e-4
        )
    assert 1 <= simulated["robust_hdp"] < 1.1


# -- the recommendation ----------------------------------------------------------------------------


def seen(method: str, ratio: float | None, reference: bool = False, **more: Any) -> NoiseForecast:
    promise: dict[str, Any] = {
        "unit": Unit.RECORD,
        "observer": Observer.SERVER,
        "adjacency": Adjacency.ZERO_OUT,
        **more,
    }
    return NoiseForecast(
        method=method,
        noise_to_signal=ratio,
        promise=Promise(**promise),
        reference=reference,
    )


def record_level_advice(epsilons: tuple[float, ...]) -> Recommendation:
    federation = silent(epsilons)
    forecasts = [
        forecast(*agreed(strategy_of(m), federation))
        for m in ("robust_hdp", "weiavg", "minimum", "fedavg_dp")
    ]
    (advice,) = recommend(forecasts)
    return advice


def test_equal_budgets_need_no_clever_method_and_unequal_ones_do() -> None:
    equal = replace_sizes((0.5,) * 6)
    assert equal.method == "fedavg_dp"
    assert "simpler" in equal.reason
    unequal = record_level_advice(EPSILONS)
    assert unequal.method in ("weiavg", "robust_hdp")
    assert "minimum would carry" in unequal.reason


def replace_sizes(epsilons: tuple[float, ...]) -> Recommendation:
    """Of equal budgets and equal shards nothing is left to weigh."""
    federation = silent(epsilons)
    same = replace(federation, shards=dict.fromkeys(federation.ids, federation.shards["c0"]))
    forecasts = [
        forecast(*agreed(strategy_of(m), same))
        for m in ("robust_hdp", "weiavg", "minimum", "fedavg_dp")
    ]
    (advice,) = recommend(forecasts)
    return advice


def test_the_least_noise_wins_and_of_those_alike_the_simplest() -> None:
    clear = recommend([seen("fedavg_dp", 1.0), seen("weiavg", 0.9), seen("robust_hdp", 0.5)])
    assert [one.method for one in clear] == ["robust_hdp"]
    assert "0.5 of the longest" in clear[0].reason
    assert "fedavg_dp would carry 1" in clear[0].reason
    alike = recommend([seen("robust_hdp", 0.5), seen("weiavg", 0.52), seen("fedavg_dp", 0.53)])
    assert [one.method for one in alike] == ["weiavg"]
    assert "robust_hdp would leave about as much" in alike[0].reason
    assert "believes what clients claim" in alike[0].reason


def test_there_is_one_recommendation_a_promise_and_none_across() -> None:
    found = recommend(
        [
            seen("fedavg_dp", 1.0),
            seen(
                "dp_fed",
                0.1,
                unit=Unit.CLIENT,
                observer=Observer.WORLD,
                adjacency=Adjacency.REPLACE_ONE,
            ),
            seen("udp_fedavg", 0.2, unit=Unit.CLIENT, observer=Observer.WORLD),
        ]
    )
    assert {one.method: tuple(one.promise.to_dict().values()) for one in found} == {
        "dp_fed": ("client", "replace_one", "world"),
        "udp_fedavg": ("client", "zero_out", "world"),
        "fedavg_dp": ("record", "zero_out", "server"),
    }
    assert not any("would carry" in one.reason for one in found)


def test_what_is_hypothetical_unprotected_unknown_or_drowned_is_not_recommended() -> None:
    nobody = seen("fedavg", 0.0, observer=Observer.NOBODY)
    maximum = seen("maximum", 0.01, reference=True)
    assert recommend([nobody, maximum]) == []
    assert recommend([seen("pfa", math.inf), seen("fedceo", None)]) == []
    (found,) = recommend([nobody, maximum, seen("pfa", math.inf), seen("minimum", 5.0)])
    assert found.method == "minimum"
    assert "expect to learn little" in found.reason
    (quiet,) = recommend([seen("minimum", 2.0)])
    assert "learn little" not in quiet.reason


def test_every_method_of_a_family_has_its_own_place_among_the_simple_ones() -> None:
    places = [(one.family, one.simplicity) for one in METHODS.values() if not one.reference]
    assert len(set(places)) == len(places)
