"""Private preconditioning: its plan, its statistics, its weights, and what it is for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError, DataError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Cohort, Rows, Terms, unit_called
from dpfl.methods.preconditioned import BiasVarianceWeights
from dpfl.models.featured import with_features
from dpfl.models.features import FeatureMap, make_features
from dpfl.models.preconditioning import OnFeatures, Whiten, linear_head, split_features
from dpfl.plugs.preconditioning import Standardising, UnitMean, Whitening
from dpfl.privacy.ledger import Ledger
from dpfl.privacy.unsampled import unsampled_multiplier
from dpfl.rounds import Agreement, buffer_shapes, enrol
from dpfl.rounds.members import honest_members
from dpfl.rounds.release import release_answer
from dpfl.runs.experiment import Experiment, for_method
from dpfl.sim.experiment import run_experiment, setup_of
from dpfl.strategy.preconditioning import Rules, signal_of
from dpfl.tasks import CLASSIFICATION
from dpfl.tasks.persons import PerPerson

DEMO: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 20},
    "budgets": {"epsilon": "mixgauss1", "delta": 1e-3},
    "model": {"name": "logistic"},
    "method": {"name": "weiavg", "lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 10},
    "run": {"rounds": 30, "evaluate_every": 32},
}


# -- what it is for --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "least"), [("preconditioned", 0.84), ("preconditioned_sum", 0.89)]
)
def test_it_learns_where_budgets_differ_a_hundredfold(
    method: str, least: float, tmp_path: Path
) -> None:
    """Published methods reach 79 % here; every client spends its own budget and no more."""
    experiment = Experiment.from_dict(for_method(DEMO, method))
    result = run_experiment(experiment, tmp_path / "run")
    assert result.accuracy >= least
    for line in result.spent.values():
        assert line.budget is not None
        assert 0.999 * line.budget <= line.epsilon <= line.budget
    loaded = dpfl.load(tmp_path / "run")
    records = experiment.federation().test_set()[0][:50]
    with torch.no_grad():
        assert torch.allclose(loaded.outputs(records), result.model(records), atol=1e-4)


def test_forty_whole_clients_are_enough_to_learn_from(tmp_path: Path) -> None:
    """Their signal, 82, counts fourfold: mean gradients of clients agree."""
    values = for_method(DEMO, "preconditioned_sum")
    values["method"]["unit"] = "client"
    values |= {
        "partition": {"kind": "iid", "clients": 40},
        "budgets": {"epsilon": 8, "delta": 1e-3},
    }
    result = run_experiment(Experiment.from_dict(values), tmp_path / "run")
    assert result.accuracy >= 0.93
    assert all(line.epsilon <= 8 for line in result.spent.values())


def test_a_comparison_hands_over_neither_model_nor_rounds_nor_clip() -> None:
    values = for_method(DEMO, "preconditioned")
    experiment = Experiment.from_dict(values)
    assert experiment.model.name == "linear_head"
    assert experiment.run.rounds is None
    assert experiment.method.settings() == {}


@pytest.mark.parametrize(
    ("method", "rounds"), [(dpfl.preconditioned, 8), (dpfl.preconditioned_sum, 12)]
)
def test_from_python_rounds_are_planned_and_the_run_has_a_public_page(
    method: Callable[[], dpfl.Strategy], rounds: int, tmp_path: Path
) -> None:
    generator = PublicSeed(0).generator()
    x = torch.randn(600, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    clients = {f"c{i}": (x[200 * i :][:200], y[200 * i :][:200]) for i in range(3)}
    budgets = {name: dpfl.Budget(epsilon=4.0, delta=1e-3) for name in clients}
    federation = dpfl.Federation.from_arrays(clients, budgets=budgets)
    model = linear_head(make_features("table", (5,)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = dpfl.train(model, federation, method(), folder=tmp_path / "run", progress=False)
    assert result.accuracy > 0.85
    assert result.summary.rounds.planned == rounds
    assert f"{rounds} of {rounds} rounds" in dpfl.report(tmp_path / "run").read_text()
    public = dpfl.report(tmp_path / "run", public=True).read_text()
    assert result.summary.method in public
    assert "rounds =" not in public  # planned from the claims of all clients


# -- the plan --------------------------------------------------------------------------------------


def claims_of(epsilon: float, records: int, clients: int) -> dict[str, Claims]:
    own = Claims(epsilon=epsilon, delta=1e-5, examples=records)
    return {f"c{i}": own for i in range(clients)}


def test_the_signal_is_that_of_the_paper() -> None:
    mu = 1 / unsampled_multiplier(1.0, 1e-5 * (1 - 1e-9))
    claims = claims_of(1.0, 300, 16)
    assert signal_of(claims) == pytest.approx(mu * 300 * 4)
    assert signal_of(claims, summed=15 / 16) == pytest.approx(mu * 300 * 16 * math.sqrt(15 / 16))
    assert signal_of(claims, summed=1.0, whole=True) == pytest.approx(mu * 16)


def test_rules_follow_the_signal() -> None:
    images = Rules(kind="images", size=400, classes=10)
    assert images.plan(639)["second_share"] == 0.0  # 32 sqrt(400) = 640
    assert images.plan(640)["second_share"] == 0.1
    assert images.plan(20_000)["rounds"] == 16
    assert replace(images, summed=True).plan(20_000)["rounds"] == 32
    assert images.plan(1000)["lr"] == pytest.approx(0.04 * 10 * 1000**0.7)
    tables = Rules(kind="tables", size=30, classes=2)
    assert [tables.plan(s)["rounds"] for s in (10, 800, 1e5)] == [8, 20, 32]
    text = Rules(kind="text", size=4096, classes=2)
    assert [text.plan(s)["lr"] for s in (10, 900, 1e5)] == [15, 20, 100]
    assert text.plan(100)["reach"] == pytest.approx(100 / math.sqrt(2 * 4097))
    assert Rules(kind="images", size=5000, classes=10).plan(1e6)["second_share"] == 0.0


def test_rules_for_whole_clients() -> None:
    images = Rules(kind="images", size=400, classes=10, whole=True)
    assert [images.plan(s)["lr"] for s in (50, 1e4)] == [1, 30]
    assert images.plan(50)["reach"] == pytest.approx(4 * 50 / math.sqrt(4000))
    assert replace(images, size=5000).plan(1e6)["second_share"] == 0.0
    assert replace(images, kind="tables").plan(1e4)["lr"] == 1.5
    text = replace(images, kind="text", classes=2, size=1024)
    assert text.plan(50)["reach"] == pytest.approx(50 / math.sqrt(2 * 1025))


def small(epsilon: float, **method: Any) -> Experiment:
    values = {**DEMO, "budgets": {"epsilon": epsilon, "delta": 1e-3}}
    planned = for_method(values, "preconditioned")
    return Experiment.from_dict({**planned, "method": {"name": "preconditioned", **method}})


def test_a_plan_that_predicts_noise_only_is_refused_unless_forced() -> None:
    with pytest.raises(PrivacyRefusal, match="expect chance") as caught:
        setup_of(small(0.01)).rehearse()
    assert caught.value.exit_code == 4
    setup_of(small(0.01, force=True)).rehearse()


def test_weak_signals_are_warned_about_and_plans_are_explained() -> None:
    weak = dpfl.describe(small(0.5).to_dict())
    assert 1 <= (weak.forecast.reach or 0) < 4
    assert "points are lost to noise" in weak.forecast.warning
    strong = dpfl.describe(small(2.0).to_dict())
    assert strong.forecast.warning == ""
    assert dict(strong.forecast.planned)["rounds"].startswith("16, full batch")
    assert strong.epsilon[dpfl.Observer.SERVER].spread.largest == pytest.approx(2.0, rel=1e-3)


def test_the_planner_prefers_it_where_the_signal_is_enough() -> None:
    found = dpfl.plan(DEMO, ["weiavg", "preconditioned", "preconditioned_sum"], timing=False)
    assert {tip.method for tip in found.recommendations} == {"preconditioned", "preconditioned_sum"}


def test_other_models_tasks_and_cohorts_are_refused_with_what_to_use() -> None:
    federation = Experiment.from_dict(for_method(DEMO, "weiavg")).federation()
    with warnings.catch_warnings(), pytest.raises(ConfigurationError, match="linear_head"):
        warnings.simplefilter("ignore")
        dpfl.train(nn.Linear(64, 10), federation, dpfl.preconditioned())
    with pytest.raises(ConfigurationError, match="every client takes part"):
        dpfl.preconditioned(selection=dpfl.FixedCohort(size=3))
    with pytest.raises(ConfigurationError, match="preconditioned_sum"):
        dpfl.with_secure_sum(dpfl.preconditioned())
    with pytest.raises(ConfigurationError, match="size and kind"):
        linear_head(nn.Flatten(), 3)
    with pytest.raises(ConfigurationError, match="classes"):
        linear_head(make_features("table", (3,)), 1)


# -- features in place of records ------------------------------------------------------------------


class Broken(FeatureMap):
    kind = "tables"
    size = 2

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return records[:, :2] * self.factor

    factor = 1.0


@pytest.mark.parametrize(
    ("factor", "said"), [(math.nan, "not finite"), (3.0, "beyond the declared")]
)
def test_features_that_break_their_bound_are_refused_by_client(factor: float, said: str) -> None:
    rows = [[1.0, 0.0], [0.0, 1.0]] * 5
    federation = dpfl.Federation.from_arrays({"a": (rows, [0, 1] * 5), "b": (rows, [0, 1] * 5)})
    features = Broken((2,))
    with_features(federation, features)
    features.factor = factor
    with pytest.raises(DataError, match=f"client 'a'.*{said}"):
        with_features(federation, features)


def test_the_rest_of_a_model_has_the_names_and_the_tensors_of_the_whole() -> None:
    model = linear_head(make_features("table", (3,)), 2)
    features, rest = split_features(model, CLASSIFICATION)
    assert features is model.features
    named = dict(rest.named_parameters()) | dict(rest.named_buffers())
    whole = dict(model.named_parameters()) | dict(model.named_buffers())
    assert named.keys() <= whole.keys()
    assert all(named[name] is whole[name] for name in named)
    assert split_features(rest, CLASSIFICATION) == (None, rest)
    assert isinstance(model, OnFeatures)


def test_a_frozen_backbone_takes_the_place_of_features() -> None:
    backbone = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
    model = linear_head(backbone, 2, size=8, kind="images")
    assert [b.name for b in Layout.of_module(model)] == ["linear.weight"]
    strategy = dpfl.preconditioned(force=True).for_model(model)
    assert {release.into for release in strategy.releases} == {"centre.mean", "whiten.matrix"}


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "shape"),
    [
        (UnitMean(into="m", share=0.1), (5,)),
        (Whitening(into="g", share=0.1), (5, 5)),
        (Standardising(into="s", share=0.1), (5,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_releases_pass_the_laws(release: Any, shape: tuple[int, ...]) -> None:
    testing.check_release(release, 5, shape)


def test_a_gram_matrix_is_added_up_as_its_rows_would_be() -> None:
    release, labels = Whitening(into="g", share=0.1), torch.zeros(30).long()
    x = torch.randn(30, 6, generator=PublicSeed(0).generator())
    found = release.clipped_sum(x, labels, (6, 6))
    inside = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    rows = release.statistic(inside, labels, (6, 6)).double()
    assert torch.allclose(found, rows.sum(dim=0), atol=1e-3)
    for odd in (1e20, math.inf, math.nan):
        x[0, 0] = odd
        assert float(release.clipped_sum(x[:1], labels[:1], (6, 6)).norm()) <= 1.0


def test_without_noise_whitening_makes_second_moments_alike() -> None:
    generator = PublicSeed(1).generator()
    x = torch.randn(4000, 6, generator=generator) * torch.tensor([3.0, 1, 1, 0.5, 0.3, 0.2])
    x = x @ torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    release, shape = Whitening(into="g", share=0.1, bound=100.0), (6, 6)
    mean = release.clipped_sum(x, torch.zeros(4000).long(), shape) / 4000
    white = x.double() @ release.result(mean, shape, 0.0)
    moments = white.T @ white / 4000
    assert torch.allclose(moments / moments[0, 0], torch.eye(6).double(), atol=0.02)
    # With noise, directions below its edge are left small: a planted weak one is not blown up.
    noisy = x.double() @ release.result(mean, shape, 1.0)
    spread = torch.linalg.eigvalsh(noisy.T @ noisy / 4000)
    assert float(spread[0] / spread[-1]) < 0.5


def test_whitening_starts_as_no_change_but_for_lengths() -> None:
    x = torch.nn.functional.normalize(torch.randn(7, 4, generator=PublicSeed(0).generator()))
    assert torch.allclose(Whiten(4)(x), x, atol=1e-6)


# -- weights ---------------------------------------------------------------------------------------

LAYOUT = Layout.of_module(nn.Linear(200, 1, bias=False))
TERMS = Terms(
    rounds=4, population=6, expected_cohort=6, participations=4, smallest_epsilon=1,
    largest_epsilon=1, parameters=200,
)  # fmt: skip


def weighed(matrix: torch.Tensor, epsilons: list[float], records: list[int]) -> torch.Tensor:
    claims = {
        f"c{i}": Claims(epsilon=e, delta=1e-5, examples=n)
        for i, (e, n) in enumerate(zip(epsilons, records, strict=True))
    }
    rows = Rows(matrix=matrix, origin=matrix[0] * 0, cohort=Cohort.of(claims), layout=LAYOUT)
    rule = BiasVarianceWeights()
    return rule(rule.start(TERMS, LAYOUT), rows, 0)[0].double()


EPSILONS, RECORDS = [0.2, 0.5, 1.0, 2.0, 4.0, 8.0], [100, 200, 100, 300, 100, 50]


def noise_of() -> torch.Tensor:
    mus = [1 / unsampled_multiplier(epsilon, 1e-5) for epsilon in EPSILONS]
    return torch.tensor([2.0 / (mu * n) for mu, n in zip(mus, RECORDS, strict=True)])


def test_clients_that_differ_by_noise_alone_are_weighed_by_its_inverse() -> None:
    noise = noise_of()
    rows = noise[:, None] * torch.randn(6, 200, generator=PublicSeed(0).generator())
    best = noise.double() ** -2
    found = weighed(rows * 0.9, EPSILONS, RECORDS)  # no further apart than noise
    assert torch.allclose(found, best / best.sum(), rtol=1e-3)


def test_clients_that_are_far_apart_are_weighed_by_records() -> None:
    rows = 1e4 * torch.randn(6, 200, generator=PublicSeed(0).generator())
    records = torch.tensor(RECORDS).double()
    assert torch.allclose(weighed(rows, EPSILONS, RECORDS), records / records.sum(), rtol=1e-2)


def test_absurd_claims_give_no_absurd_numbers() -> None:
    rows = torch.randn(6, 200, generator=PublicSeed(0).generator())
    wrong = [math.nan, math.inf, -1.0, 1e9, 0.0, 1.0]
    found = weighed(rows, wrong, [10**400, 1, 5, 7, 3, 10**400])
    assert bool(torch.isfinite(found).all())
    assert float(found.sum()) == pytest.approx(1.0)
    assert found[0] == found[1] == found[2] == 0


def test_a_round_is_charged_before_it_is_computed() -> None:
    """Also the releases, which have negative numbers."""
    setup = setup_of(small(2.0))
    with closing(Ledger.create(":memory:", "x")) as ledger:
        simulation = setup.simulation("x", ledger)
        simulation.play(until=1)
        charged = {round_ for round_, _ in ledger.charged("x", dpfl.Observer.SERVER)}
        assert charged == set(range(simulation.agreement.first_round, 1))
        assert simulation.agreement.first_round < 0


# -- what a server may send ------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [1e-9, 1e-3, 1.0, 50.0])
def test_a_server_cannot_make_the_noise_of_a_release_smaller(sent: float) -> None:
    """The terms' noise level names a step; integers follow from the client's own budget."""
    model = linear_head(make_features("table", (6,)), 2)
    strategy = dpfl.preconditioned_sum(force=True).for_model(model)
    clients = {f"c{i}": (torch.eye(6).repeat(5, 1), torch.arange(30) % 2) for i in range(4)}
    budgets = {name: dpfl.Budget(epsilon=1.0, delta=1e-5) for name in clients}
    members = honest_members(dpfl.Federation.from_arrays(clients, budgets=budgets))
    claims = {name: member.claims for name, member in members.items()}
    layout, shapes = Layout.of_module(model), buffer_shapes(model, strategy.releases)
    honest = enrol(strategy, claims, None, layout, shapes)
    levels = (sent,) * len(honest.terms.release_noise)
    told = replace(honest, terms=replace(honest.terms, release_noise=levels))

    def integers(agreement: Agreement) -> torch.Tensor:
        rng, grid = SecretRng.simulated(PublicSeed(1)), agreement.upload_grid(-1, 4)
        assert grid is not None
        return release_answer(agreement, -1, members["c0"], model, rng, 4) / grid.step

    assert torch.allclose(integers(told), integers(honest), rtol=1e-9)


# -- persons, and networks of the user's own -------------------------------------------------------


def test_persons_with_several_records_are_refused_before_anything_is_released() -> None:
    with pytest.raises(ConfigurationError, match="single records"):
        dpfl.preconditioned().protecting(unit_called("patient"), single=False)


def test_a_model_of_persons_stays_whole() -> None:
    model, single = linear_head(make_features("table", (3,)), 2), CLASSIFICATION
    several = PerPerson(task=single)
    assert split_features(model, several) == (None, model)


def test_features_are_computed_in_evaluation_mode() -> None:
    """Dropout would draw, and other layers could mix records."""
    backbone = nn.Sequential(nn.Dropout(0.5)).train()
    rows = torch.ones(20, 2)
    federation = dpfl.Federation.from_arrays({"a": (rows, [0, 1] * 10)})
    made = with_features(federation, backbone)
    assert bool((made.shards["a"].features == 1).all())
    assert backbone[0].training  # as it was
