"""What the Robust-HDP paper says, and what its misprints would break."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import dpfl
from dpfl import testing
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Claims, Cohort, Rows
from dpfl.data.partition import Partition
from dpfl.datasets.named import load_dataset
from dpfl.methods.robust_hdp import NoiseAwareWeights, inverse_weights
from dpfl.models import make_model
from dpfl.numerics import noise_estimates as module, pursuit
from dpfl.numerics.noise_estimates import moment_estimates, noise_estimates
from dpfl.numerics.pursuit import principal_component_pursuit
from dpfl.privacy.flags import Flag
from dpfl.rounds.record import RoundRecord


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=dpfl.PublicSeed(seed).generator(), dtype=torch.float64)


def planted(
    p: int, n: int, rank: int, stds: tuple[float, ...], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A common signal of low rank, and noise of each client's own size; returns the matrix and the
    stds.
    """
    std = torch.tensor([stds[i % len(stds)] for i in range(n)], dtype=torch.float64)
    mixing = 1 + 0.1 * normal(
        rank, n, seed=seed + 1
    )  # all clients pull the same way, as in training
    return normal(p, rank, seed=seed) @ mixing + normal(p, n, seed=seed + 2) * std, std


def above_the_least(weights: Tensor, std: Tensor) -> float:
    """Noise of the weighted mean over that of Eq. 8's weights."""
    best = (1 / std**2) / (1 / std**2).sum()
    return float((weights**2 * std**2).sum() / (best**2 * std**2).sum())


def textbook(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same iteration, written down naively: a full SVD each time."""
    m = matrix / np.linalg.norm(matrix)
    penalty, spectral = 1 / math.sqrt(max(m.shape)), np.linalg.norm(m, 2)
    mu, y, s = 1.25 / spectral, m / max(spectral, np.abs(m).max() / penalty), np.zeros_like(m)
    for _ in range(500):
        u, values, v = np.linalg.svd(m - s + y / mu, full_matrices=False)
        low = (u * np.maximum(values - 1 / mu, 0)) @ v
        e = m - low + y / mu
        before, s = s, np.sign(e) * np.maximum(np.abs(e) - penalty / mu, 0)
        y = y + mu * (m - low - s)
        mu *= 1.1
        if np.linalg.norm(m - low - s) <= 1e-7 and np.linalg.norm(
            s - before
        ) <= 1e-5 * np.linalg.norm(s):
            break
    return low * np.linalg.norm(matrix), s * np.linalg.norm(matrix)


# ---- the pursuit -----------------------------------------------------------------------------------------------------


def test_a_planted_low_rank_part_is_recovered_from_gross_errors() -> None:
    """The misprinted sign leaves a vanishing residual and fails here."""
    low = normal(300, 3) @ normal(3, 40, seed=1)
    errors = torch.where(
        torch.rand(300, 40, generator=torch.Generator().manual_seed(2)) < 0.05, 10.0, 0.0
    ).double()
    found, sparse, info = principal_component_pursuit(low + errors)
    assert info.converged
    assert info.rank == 3
    assert float((found - low).norm() / low.norm()) < 1e-4
    assert float((sparse - errors).norm() / errors.norm()) < 1e-4


@pytest.mark.parametrize("shape", [(500, 12), (40, 40), (12, 300)])
def test_the_pursuit_is_the_textbook_s_to_seven_digits(shape: tuple[int, int]) -> None:
    matrix = normal(shape[0], 2) @ normal(2, shape[1], seed=1) + 0.3 * normal(*shape, seed=2)
    low, sparse, info = principal_component_pursuit(matrix)
    expected_low, expected_sparse = textbook(matrix.numpy())
    assert info.residual <= 1e-7
    assert np.linalg.norm(low.numpy() - expected_low) < 1e-6 * np.linalg.norm(expected_low)
    assert np.linalg.norm(sparse.numpy() - expected_sparse) < 1e-6 * np.linalg.norm(expected_sparse)


def test_low_rank_and_sparse_add_up_and_a_zero_matrix_is_nothing() -> None:
    matrix = normal(100, 5).float()
    low, sparse, _ = principal_component_pursuit(matrix)
    assert torch.allclose(low + sparse, matrix, atol=1e-5)
    nothing, sparse, info = principal_component_pursuit(torch.zeros(6, 3))
    assert not bool(nothing.any() or sparse.any())
    assert info.converged
    assert info.rank == 0


def test_a_matrix_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not finite"):
        principal_component_pursuit(torch.tensor([[1.0, float("nan")], [0.0, 1.0]]))


def test_a_pursuit_that_did_not_converge_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pursuit, "MOST_ITERATIONS", 2)
    _, _, info = principal_component_pursuit(normal(50, 6))
    assert not info.converged
    _, told = noise_estimates(normal(6, 50))
    assert told["converged"] == "no"


# ---- the weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_aggregate_s_noise_is_within_a_hundredth_of_the_least(seed: int) -> None:
    matrix, std = planted(6000, 20, 1, (1.0, 3.0, 10.0), seed)
    assert above_the_least(inverse_weights(noise_estimates(matrix.T)[0]), std) < 1.01


@pytest.mark.parametrize("seed", range(2))
def test_where_the_signal_dominates_raw_norms_fail_and_the_pursuit_does_not(seed: int) -> None:
    matrix, std = planted(6000, 20, 1, (0.01, 0.03, 0.1), seed)
    assert above_the_least(inverse_weights(matrix.square().sum(dim=0)), std) > 5
    assert above_the_least(inverse_weights(noise_estimates(matrix.T)[0]), std) < 1.2


def test_moments_find_noise_that_dominates() -> None:
    matrix, std = planted(6000, 20, 1, (1.0, 3.0, 10.0))
    assert above_the_least(inverse_weights(moment_estimates(matrix.T)), std) < 1.1


def test_permuting_clients_permutes_weights_and_scaling_all_changes_none() -> None:
    matrix, _ = planted(800, 8, 1, (1.0, 2.0, 5.0))
    weights, turn = inverse_weights(noise_estimates(matrix.T)[0]), torch.roll(torch.arange(8), 3)
    assert torch.allclose(
        inverse_weights(noise_estimates(matrix.T[turn])[0]), weights[turn], rtol=1e-5
    )
    for factor in (1e-6, 1e6):
        assert torch.allclose(
            inverse_weights(noise_estimates(factor * matrix.T)[0]), weights, rtol=1e-5
        )


def test_equal_noise_gives_nearly_equal_weights() -> None:
    matrix, _ = planted(6000, 10, 1, (1.0,))
    assert float((inverse_weights(noise_estimates(matrix.T)[0]) - 0.1).abs().max()) < 0.01


def test_blocks_cover_all_coordinates_and_the_last_one_ends_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Tensor] = []
    real = module.principal_component_pursuit

    def spy(matrix: Tensor) -> object:
        asked.append(matrix)
        return real(matrix)

    monkeypatch.setattr(module, "principal_component_pursuit", spy)
    rows = normal(4, 25)
    estimates, _ = noise_estimates(rows, block_rows=10)
    assert [m.shape[0] for m in asked] == [10, 10, 10]
    assert torch.equal(asked[2], rows[:, 15:].T)
    each = [real(m)[1].square().sum(dim=0) for m in asked]
    assert torch.allclose(estimates, sum(each) / 3)
    asked.clear()
    noise_estimates(rows, block_rows=10, blocks=1)
    assert len(asked) == 1
    asked.clear()
    noise_estimates(rows, block_rows=25)
    assert [m.shape[0] for m in asked] == [25]


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=8), st.none() | st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_weights_are_shares_and_nobody_is_above_the_cap(
    estimates: list[float], cap: float | None
) -> None:
    weights = inverse_weights(torch.tensor(estimates, dtype=torch.float64), cap)
    assert math.isclose(float(weights.sum()), 1, rel_tol=1e-9)
    assert float(weights.min()) >= 0
    if cap is not None and len(estimates) >= 3 and sum(estimates) > 0:
        assert float(weights.max()) <= max(cap, 1 / len(estimates)) * (1 + 1e-9)


def rows_of(matrix: Tensor) -> Rows:
    claims = {f"c{i}": Claims(epsilon=1.0, delta=1e-5, examples=10) for i in range(len(matrix))}
    layout = Layout.of({"w": torch.zeros(matrix.shape[1])})
    return Rows(
        matrix=matrix.float(),
        origin=torch.zeros(matrix.shape[1]),
        cohort=Cohort.of(claims),
        layout=layout,
    )


def test_a_zero_update_weighs_nothing_and_the_others_share() -> None:
    matrix = normal(5, 60)
    matrix[2] = 0
    weights, _, _ = NoiseAwareWeights()({}, rows_of(matrix), 0)
    assert float(weights[2]) == 0
    assert math.isclose(float(weights.sum()), 1, rel_tol=1e-6)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 9), normal(2, 9), normal(1, 30).expand(5, 30)])
def test_too_few_too_empty_or_identical_updates_weigh_alike(matrix: Tensor) -> None:
    weights, _, _ = NoiseAwareWeights()({}, rows_of(matrix), 0)
    assert torch.allclose(weights, torch.full((len(matrix),), 1 / len(matrix)))


@pytest.mark.parametrize("estimator", ["pcp", "moment"])
def test_noise_aware_weights_obey_the_laws_of_weights(estimator: str) -> None:
    testing.check_weights(NoiseAwareWeights(estimator=estimator))  # type: ignore[arg-type]


def test_refresh_keeps_estimates_between_rounds_and_looks_again_at_strangers() -> None:
    first, second = normal(4, 50), 5 * normal(4, 50, seed=9)
    second[0] *= 30
    keeper = NoiseAwareWeights(refresh=10)
    weights, state, _ = keeper({}, rows_of(first), 0)
    assert torch.equal(keeper(state, rows_of(second), 1)[0], weights)
    assert not torch.equal(keeper(state, rows_of(second), 10)[0], weights)
    assert not torch.equal(NoiseAwareWeights(refresh=1)(state, rows_of(second), 1)[0], weights)
    once = NoiseAwareWeights(refresh=None)
    assert torch.equal(once(state, rows_of(second), 50)[0], weights)
    del state["c3"]
    assert not torch.equal(once(state, rows_of(second), 51)[0], weights)


@pytest.mark.parametrize(
    "wrong",
    [{"estimator": "guess"}, {"block_rows": 0}, {"blocks": 0}, {"refresh": 0}, {"max_weight": 0.0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="robust_hdp"):
        dpfl.robust_hdp(lr=0.1, clip=1.0, batch_size=4, local_steps=1, **wrong)  # type: ignore[arg-type]


def test_the_oracle_is_refused_where_nobody_knows_the_truth() -> None:
    with pytest.raises(ConfigurationError, match="simulation only"):
        NoiseAwareWeights(estimator="oracle")({}, rows_of(normal(4, 9)), 0)


# ---- in training -----------------------------------------------------------------------------------------------------


def trained(
    strategy: dpfl.Strategy, rounds: int = 4, misreports: dict[str, float] | None = None
) -> dpfl.Result:
    federation = dpfl.Federation.from_dataset(
        load_dataset("digits"), Partition(), 20, dpfl.PublicSeed(0)
    )
    budgets = dpfl.make_budgets("dist6", 1e-3, federation.ids, dpfl.PublicSeed(1))
    sizes = {
        client: dpfl.ClientSettings(batch_size=(8, 16, 32)[i % 3])
        for i, client in enumerate(federation.ids)
    }
    federation = dpfl.Federation(
        shards=federation.shards,
        task=federation.task,
        inputs=federation.inputs,
        budgets=budgets,
        client_settings=sizes,
    )
    model = make_model("logistic", (64,), 10, dpfl.PublicSeed(0))
    return dpfl.train(model, federation, strategy, rounds=rounds, misreports=misreports)


HABITS = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_epochs": 1}


def noise_ratio(line: RoundRecord) -> float:
    truth = line.true_noise
    assert truth is not None
    assert truth.aggregate is not None
    assert truth.ratio == truth.aggregate / truth.least
    return truth.ratio


def test_in_training_the_noise_is_near_the_oracle_s_every_round_and_others_are_far_above() -> None:
    """650 parameters leave 5 % of sampling error in a variance; the paper's CNN has forty times as
    many.
    """
    ours = trained(dpfl.robust_hdp(**HABITS))
    assert max(map(noise_ratio, ours.history)) < 1.06
    oracle = trained(dpfl.robust_hdp(**HABITS, estimator="oracle"))
    assert max(map(noise_ratio, oracle.history)) < 1.0001
    for other in (dpfl.weiavg(**HABITS), dpfl.fedavg_dp(**HABITS), dpfl.dpfedavg(**HABITS)):
        assert min(map(noise_ratio, trained(other, rounds=1).history)) > 1.5


def test_the_true_noise_is_what_an_update_really_carries() -> None:
    """Of the noisiest client nearly all of the update is noise: what the pursuit finds there is the
    stated variance.
    """
    result = trained(dpfl.robust_hdp(**HABITS), rounds=1)
    line = result.history[0]
    estimated = dict(zip(line.arrived, line.metrics["weights"]["estimated_noise"], strict=True))
    true = line.true_noise.variances
    noisiest = max(true, key=lambda client: true[client])
    assert estimated[noisiest] == pytest.approx(true[noisiest], rel=0.25)


def test_a_false_claim_changes_nothing_here_and_much_elsewhere() -> None:
    def parameters(result: dpfl.Result) -> Tensor:
        return torch.cat([p.detach().flatten() for p in result.model.parameters()])

    misreports = {"12": 100.0}
    honest = parameters(trained(dpfl.robust_hdp(**HABITS)))
    assert torch.equal(
        honest, parameters(trained(dpfl.robust_hdp(**HABITS), misreports=misreports))
    )
    for method in (dpfl.weiavg, dpfl.pfa):
        believed, lied_to = (
            trained(method(**HABITS)),
            trained(method(**HABITS), misreports=misreports),
        )
        assert lied_to.accuracy < believed.accuracy - 0.05
        named = {raised.flag: raised.detail for raised in lied_to.summary.flags}
        assert "12" in named[Flag.FALSE_CLAIMS]
        spent = {client: line.epsilon for client, line in lied_to.spent.items()}
        assert spent == {client: line.epsilon for client, line in believed.spent.items()}


@pytest.mark.parametrize(
    "misreports", [{"nobody": 2.0}, {"99": 2.0}, {"12": 0.0}, {"12": float("nan")}]
)
def test_a_misreport_that_makes_no_sense_is_refused(misreports: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(misreports))}'"):
        trained(dpfl.weiavg(**HABITS), misreports=misreports)
