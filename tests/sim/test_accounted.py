"""Accounted evaluation and selection: charged first, noised as charged, added up, refused."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpfl
from dpfl.core.errors import ConfigurationError, DataError, LedgerError, PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Observer, Unit
from dpfl.plugs.measures import BinnedAuc
from dpfl.privacy.accountant import spend
from dpfl.privacy.ledger import Ledger
from dpfl.rounds.enrol import secret_for
from dpfl.rounds.measure import measured_answer
from dpfl.rounds.members import honest_members
from dpfl.rounds.record import RoundRecord
from dpfl.sim import noisy_sums

DELTA = 1e-5


def data(seed: int, count: int, tests: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count + tests, 3)).astype(np.float32)
    y = (x[:, 0] + 0.3 * rng.normal(size=count + tests) > 0).astype(int)
    return x[:count], y[:count], x[count:], y[count:]


def federation(tests: tuple[int, int] = (600, 300), **budgets: float) -> dpfl.Federation:
    clients = {"a": data(1, 200, tests[0]), "b": data(2, 200, tests[1])}
    own = {client: dpfl.Budget(epsilon=e, delta=DELTA) for client, e in budgets.items()}
    return dpfl.Federation.from_arrays(clients, budgets=own, classes=2)


def model(weight: float = 1.0) -> nn.Module:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
        linear.weight[1, 0] = weight
    return linear


def true_accuracy(own: nn.Module, everyone: dpfl.Federation) -> float:
    features, labels = everyone.test_set()
    with torch.no_grad():
        return float((own(features).argmax(1) == labels).double().mean())


# ---- what comes out ------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "more"), [("accuracy", {}), ("loss", {"bound": 3.0})])
def test_values_lie_within_their_standard_errors(metric: str, more: dict[str, Any]) -> None:
    """Forty seeded evaluations: errors have mean 0 and the standard deviation that is stated."""
    everyone, own = federation(), model()
    features, labels = everyone.test_set()
    with torch.no_grad():
        outputs = own(features)
    exact = true_accuracy(own, everyone)
    if metric == "loss":
        exact = float(nn.functional.cross_entropy(outputs, labels, reduction="none").mean())
    found = [
        dpfl.evaluate(own, everyone, metric=metric, epsilon=1.0, delta=DELTA, seed=seed, **more)
        for seed in range(40)
    ]
    pulls = np.array([(one.value - exact) / one.standard_error for one in found])
    assert abs(pulls.mean()) < 4 / math.sqrt(40)
    assert 0.6 < pulls.std() < 1.5  # four standard deviations; half or twice the noise would fail
    stds = [one.standard_error for one in found]
    assert max(stds) == min(stds)


def test_noise_has_the_scale_that_is_charged_and_no_holes() -> None:
    """20,000 numbers of one answer; the same test rejects 0.95 and 1.05 of the scale."""
    everyone = federation((1, 1))
    member = honest_members(everyone)["a"]
    measure, std = BinnedAuc(bins=10_000), 7.5
    rng = SecretRng.simulated(PublicSeed(5))
    noise = measured_answer(measure, [model()], member, std, rng)[0]
    steps = noise / Grid.of(std).step
    assert torch.equal(steps, steps.round())  # on the grid: no value proves what was added

    def plausible(values: Tensor) -> bool:
        return abs(float(values.std()) / std - 1) < 5 / math.sqrt(2 * len(values))

    assert plausible(noise)
    assert not plausible(0.95 * noise)
    assert not plausible(1.05 * noise)


def test_clients_noise_is_independent() -> None:
    everyone = federation()
    found = dpfl.evaluate(model(), everyone, metric="auc", epsilon=1.0, delta=DELTA, seed=3)
    assert found.by_client["a"].value != found.by_client["b"].value
    members = honest_members(everyone)
    rngs = [secret_for(PublicSeed(3), client) for client in members]
    zero = [replace(own, shard=replace(own.shard, test_span=(0, 1))) for own in members.values()]
    pair = [
        measured_answer(BinnedAuc(bins=5000), [model()], own, 1.0, rng)[0]
        for own, rng in zip(zero, rngs, strict=True)
    ]
    assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 4 / math.sqrt(10_000)


def test_epsilon_is_that_of_dp_accounting() -> None:
    """The Gaussian mechanism with sensitivity 1; noise for epsilon costs at most epsilon."""
    found = dpfl.evaluate(model(), federation(), noise_multiplier=8.0, delta=DELTA)
    exact = dp_accounting.get_epsilon_gaussian(8.0, DELTA)
    assert exact <= found.epsilon < exact + 1e-3
    asked = dpfl.evaluate(model(), federation(), metric="auc", epsilon=0.7, delta=DELTA)
    assert 0.69 < asked.epsilon <= 0.7
    chosen = dpfl.select(
        {"x": model(), "y": model(-1.0)}, federation(), noise_multiplier=8.0, delta=DELTA
    )
    assert exact <= chosen.epsilon < exact + 1e-3  # sqrt(2) times the noise, two models


def test_it_prints_one_line() -> None:
    text = str(dpfl.evaluate(model(), federation(a=2.0, b=1.0), epsilon=0.5))
    assert "\n" not in text
    for word in ("accuracy", "per record", "zero_out", "the server", "epsilon at most 0.", "1e-05"):
        assert word in text
    assert "NOT PRIVATE" not in text
    seeded = dpfl.evaluate(model(), federation(a=2.0, b=1.0), epsilon=0.5, seed=0)
    assert "NOT PRIVATE: SEEDED" in str(seeded)
    assert seeded.seeded
    chosen = replace(federation(), stratified=True)  # a split that looked at labels is said aloud
    told = dpfl.evaluate(model(), chosen, epsilon=0.5, delta=DELTA)
    assert "STRATIFIED" in str(told)
    assert not told.seeded


def test_only_a_seed_repeats_noise() -> None:
    def once(seed: int | None) -> float:
        return dpfl.evaluate(model(), federation(), epsilon=1.0, delta=DELTA, seed=seed).value

    assert once(4) == once(4) != once(5)
    torch.manual_seed(0)
    np.random.seed(0)
    first = once(None)
    torch.manual_seed(0)
    np.random.seed(0)
    assert once(None) != first


def test_the_better_of_clearly_different_models_is_chosen() -> None:
    models = {"bad": model(-1.0), "good": model(), "even": model(0.0)}
    for metric, more in (("accuracy", {}), ("loss", {"bound": 4.0}), ("auc", {"bins": 8})):
        found = dpfl.select(
            models, federation(), metric=metric, epsilon=4.0, delta=DELTA, seed=1, **more
        )
        assert found.chosen == "good", metric
        assert "'good' of 3" in str(found)


# ---- the ledger ----------------------------------------------------------------------------------


def test_evaluations_add_up_until_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated and of different metrics; the first that does not fit computes nothing."""
    everyone, path, spent = federation(a=1.0, b=5.0), tmp_path / "ledger.db", [0.0]
    done, options = 0, [{"metric": "accuracy"}, {"metric": "loss", "bound": 2.0}]
    while True:
        try:
            found = dpfl.evaluate(
                model(),
                everyone,
                epsilon=0.4,
                ledger=path,
                new_ledger=not done,
                **options[done % 2],
            )
        except PrivacyRefusal as refusal:
            assert "'a'" in str(refusal)
            assert "'b'" not in str(refusal)
            break
        done += 1
        spent.append(found.spent["a"].epsilon)
        assert spent[-1] > spent[-2]
        assert spent[-1] <= 1.0
    assert 2 <= done <= 8
    with closing(Ledger.open(path)) as ledger:
        assert len(ledger.charged(ledger.studies()[0].run)) == 2
        history = ledger.history("a", Observer.SERVER)
        assert sum(event.steps for event in history) == done
        before = ledger.participations("b", Observer.SERVER)

    def computes(*given: object) -> Tensor:
        raise AssertionError("computed although the budget is spent")

    monkeypatch.setattr(noisy_sums, "measured_answer", computes)
    with pytest.raises(PrivacyRefusal):
        dpfl.evaluate(model(), everyone, epsilon=0.4, ledger=path)
    with closing(Ledger.open(path)) as ledger:
        assert ledger.participations("b", Observer.SERVER) == before  # nobody pays for a refusal


def test_charges_come_before_the_first_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "ledger.db", []

    def looking(*given: Any) -> Tensor:
        with closing(Ledger.open(path)) as ledger:
            seen.append(sorted(ledger.charged(ledger.studies()[0].run)))
        return measured_answer(*given)

    monkeypatch.setattr(noisy_sums, "measured_answer", looking)
    dpfl.evaluate(model(), federation(a=1.0, b=1.0), epsilon=0.4, ledger=path, new_ledger=True)
    assert seen == [[(0, "a"), (0, "b")]] * 2


def test_an_evaluation_adds_to_what_training_spent(tmp_path: Path) -> None:
    everyone, path = federation(a=2.0, b=4.0), tmp_path / "ledger.db"
    strategy = dpfl.weiavg(lr=0.1, clip=1.0, batch_size=20, local_steps=2)
    half = everyone.with_budgets(everyone.budgets)
    trained = dpfl.train(
        model(), half, strategy, rounds=2, seed=None, ledger=path, new_ledger=True, filter="renyi"
    )
    with pytest.raises(PrivacyRefusal):  # training plans with the whole budget
        dpfl.evaluate(trained.model, everyone, epsilon=1.0, ledger=path)
    with pytest.raises(LedgerError):
        dpfl.evaluate(trained.model, everyone, epsilon=1.0, ledger=tmp_path / "mislaid.db")


# ---- bad input -----------------------------------------------------------------------------------


def test_clients_without_test_records_are_left_out() -> None:
    found = dpfl.evaluate(model(), federation((50, 0)), epsilon=1.0, delta=DELTA)
    assert list(found.costs) == ["a"]
    assert found.records == 50
    with pytest.raises(DataError, match="no client has a test record"):
        dpfl.evaluate(model(), federation((0, 0)), epsilon=1.0, delta=DELTA)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({}, ConfigurationError, "neither epsilon nor noise_multiplier"),
        ({"epsilon": 1.0, "noise_multiplier": 2.0}, ConfigurationError, "or both"),
        ({"epsilon": 1.0, "delta": None}, ConfigurationError, "delta must be given"),
        ({"epsilon": -1.0}, ConfigurationError, "epsilon = -1"),
        ({"epsilon": math.nan}, ConfigurationError, "epsilon = nan"),
        ({"noise_multiplier": 0.0}, ConfigurationError, r"noise_multiplier = 0\.0"),
        ({"epsilon": 1.0, "delta": 2.0}, ConfigurationError, r"delta = 2\.0"),
        ({"epsilon": 1.0, "metric": "auk"}, ConfigurationError, "auc"),
        ({"epsilon": 1.0, "metric": "loss"}, ConfigurationError, "bound"),
        ({"epsilon": 1e-9}, PrivacyRefusal, "."),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        dpfl.evaluate(model(), federation(), **{"delta": DELTA, **given})


def test_budgets_of_another_kind_are_refused() -> None:
    everyone = federation(a=1.0, b=1.0)
    budgets = {
        "a": dpfl.Budget(epsilon=1.0, delta=DELTA, unit=Unit.CLIENT),
        "b": dpfl.Budget(epsilon=1.0, delta=DELTA),
    }
    with pytest.raises(ConfigurationError, match="per client"):
        dpfl.evaluate(model(), everyone.with_budgets(budgets), epsilon=0.5)
    with pytest.raises(ConfigurationError, match="no candidates"):
        dpfl.select({}, everyone, epsilon=0.5)


def test_a_model_that_mixes_records_is_refused() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(dim=0))

    with pytest.raises(ConfigurationError, match="another one is in the batch"):
        dpfl.evaluate(Mixing(3, 2), federation(), epsilon=1.0, delta=DELTA)


def test_a_model_whose_outputs_tell_one_record_moves_a_sum_by_one() -> None:
    """A model made to shout about one record: bounded all the same."""

    class Shouting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return torch.where(x[:, :1] > 2.5, torch.full_like(found, math.inf), found)

    everyone = federation()
    for metric, more in (("accuracy", {}), ("loss", {"bound": 2.0}), ("auc", {})):
        options = {"metric": metric, "noise_multiplier": 0.01, "delta": DELTA, **more}
        found = dpfl.evaluate(Shouting(3, 2), everyone, **options)
        assert math.isfinite(found.value)


# ---- within the plan of a training run -----------------------------------------------------------


def trained(metric: dpfl.AccountedMetric | None, **more: Any) -> Any:
    strategy = dpfl.weiavg(lr=0.3, clip=1.0, batch_size=20, local_steps=2)
    options = {"rounds": 6, "seed": 0, "accounted": metric, **more}
    return dpfl.train(model(0.0), federation(a=2.0, b=8.0), strategy, **options)


@pytest.mark.parametrize("rule", ["allotments", "renyi"])
def test_a_metric_within_the_plan_stays_within_the_budget(rule: str, tmp_path: Path) -> None:
    metric, path = dpfl.AccountedMetric(every=2, share=0.3), tmp_path / "ledger.db"
    result = trained(metric, ledger=path, new_ledger=True, filter=rule)
    measured = {line.round: line.measured for line in result.history if line.measured}
    assert list(measured) == [1, 3, 5]
    assert 1.5 < result.spent["a"].epsilon <= 2.0
    assert 6.0 < result.spent["b"].epsilon <= 8.0
    exact = {line.round: line.scores.value for line in result.history}
    pulls = [
        (found.value - exact[round_]) / found.standard_error for round_, found in measured.items()
    ]
    assert max(map(abs, pulls)) < 4.5
    with closing(Ledger.open(path)) as ledger:
        run = ledger.studies()[0].run
        assert {(round_, who) for round_, who in ledger.charged(run) if round_ < 0} == {
            (round_, who) for round_ in (-3, -2, -1) for who in ("a", "b")
        }
        (plan,) = ledger.committed("a", Observer.SERVER)
        assert len(plan.cost.before) == 3


def test_the_rounds_pay_for_the_metric() -> None:
    """What the plan holds is priced as a whole, and leaves the rounds more noise."""
    plain, metered = trained(None), trained(dpfl.AccountedMetric(every=1, share=0.5))
    assert plain.spent["a"].epsilon <= 2.0
    assert metered.spent["a"].epsilon <= 2.0
    assert metered.summary.statements[0].rounds == 6
    more = dpfl.AccountedMetric(every=1, share=0.5, metric="auc", bins=4)
    measured = [line.measured for line in trained(more).history]
    assert all(one is not None for one in measured)
    rare = trained(replace(more, every=6)).history[-1].measured
    assert measured[0].standard_error > rare.standard_error


def test_all_measurements_count_once_the_first_release_is_charged(tmp_path: Path) -> None:
    """Stopping early is free to depend on the metric: what was not measured is charged as well."""

    class Stop(Exception):
        """Ends a run from outside."""

    def stop(done: int, rounds: int, record: RoundRecord) -> None:
        if done == 2:
            raise Stop

    path = tmp_path / "ledger.db"
    metric = dpfl.AccountedMetric(every=2, share=0.3)
    with pytest.raises(Stop):
        trained(metric, ledger=path, new_ledger=True, filter="renyi", progress=stop)
    with closing(Ledger.open(path)) as ledger:
        history = ledger.history("a", Observer.SERVER)
        unsampled = [event for event in history if event.sampling_rate == 1]
        assert sum(event.steps for event in unsampled) == 3
        assert ledger.participations("a", Observer.SERVER) == 2
        spent = spend(history, DELTA, adjacency=dpfl.Adjacency.ZERO_OUT).epsilon
        assert spent > spend(unsampled[:1], DELTA, adjacency=dpfl.Adjacency.ZERO_OUT).epsilon


def test_metrics_that_do_not_fit_a_run_are_refused() -> None:
    everyone, metric = federation(a=2.0, b=8.0), dpfl.AccountedMetric(every=2, share=0.3)
    client_level = dpfl.udp_fedavg(lr=0.1, clip=1.0, batch_size=20, local_epochs=1)
    with pytest.raises(dpfl.DpflError, match="protects records"):
        dpfl.train(model(), everyone, client_level, rounds=4, accounted=metric)
    with pytest.raises(ConfigurationError, match="so never"):
        trained(replace(metric, every=7))
    with pytest.raises(ConfigurationError, match="two classes"):
        three = replace(everyone, task=dpfl.tasks.Classification(classes=3))
        strategy = dpfl.weiavg(lr=0.3, clip=1.0, batch_size=20, local_steps=2)
        options = {"rounds": 2, "accounted": replace(metric, metric="auc")}
        dpfl.train(nn.Linear(3, 3), three, strategy, **options)


def test_a_seeded_run_repeats_its_measurements_and_a_record_its_words() -> None:
    metric = dpfl.AccountedMetric(metric="loss", bound=2.0, every=3, share=0.2)
    first, second = trained(metric), trained(metric)
    assert [line.measured for line in first.history] == [line.measured for line in second.history]
    line = first.history[2]
    assert RoundRecord.from_dict(line.to_dict()) == line
    assert metric.of_round(type("End", (), {"record": line})) == line.measured.value
    assert metric.of_round(type("End", (), {"record": first.history[0]})) is None
