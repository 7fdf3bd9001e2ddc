from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import binom
from torch import Tensor

from dpfl.core.errors import ConfigurationError, DataError, PrivacyRefusal
from dpfl.core.grid import effective_multiplier, part_width
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.plugs import sampling
from dpfl.plugs.sampling import PoissonBatches, ShuffledBatches, sampler, steps_per_epoch
from dpfl.privacy.events import Event

EXAMPLES, BATCH, STEPS = 50, 10, 10_000


def rng(seed: int = 0) -> SecretRng:
    return SecretRng.simulated(PublicSeed(seed))


def inclusions(batches: list[Tensor], examples: int) -> Tensor:
    """One row a step, one column a record: 1 where the record took part."""
    taken = torch.zeros(len(batches), examples, dtype=torch.float64)
    for row, batch in zip(taken, batches, strict=True):
        row[batch] = 1.0
    return taken


def poisson_draws(seed: int = 0) -> Tensor:
    return inclusions(list(PoissonBatches(EXAMPLES, BATCH).draw(rng(seed), STEPS)), EXAMPLES)


def fixed_size_draws() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(STEPS, EXAMPLES, generator=generator)
    return inclusions(list(scores.argsort(dim=1)[:, :BATCH]), EXAMPLES)


def shuffled_draws() -> Tensor:
    return inclusions(list(ShuffledBatches(EXAMPLES, BATCH).draw(rng(), STEPS)), EXAMPLES)


# Each statistic is in units of its own standard deviation under Poisson sampling: beyond 4 it
# rejects.


def size_mean_score(taken: Tensor, rate: float) -> float:
    steps, examples = taken.shape
    variance = examples * rate * (1 - rate)
    return float((taken.sum(1).mean() - examples * rate) / math.sqrt(variance / steps))


def size_variance_score(taken: Tensor, rate: float) -> float:
    steps, examples = taken.shape
    variance = examples * rate * (1 - rate)
    kurtosis = (1 - 6 * rate * (1 - rate)) / variance
    return float((taken.sum(1).var() / variance - 1) / math.sqrt((2 + kurtosis) / steps))


def neighbouring_steps_score(taken: Tensor, rate: float) -> float:
    centred = (taken - rate) / math.sqrt(rate * (1 - rate))
    products = centred[1:] * centred[:-1]
    return float(products.sum() / math.sqrt(products.numel()))


def worst_pair_score(taken: Tensor, rate: float) -> float:
    """Largest correlation between two records; 1225 pairs stay below 5 standard deviations."""
    centred = (taken - rate) / math.sqrt(rate * (1 - rate))
    correlations = centred.T @ centred / math.sqrt(len(taken))
    return float(correlations.fill_diagonal_(0).abs().max())


RATE = BATCH / EXAMPLES


@pytest.mark.parametrize("seed", range(3))
def test_poisson_batch_sizes_have_a_binomial_mean_and_variance(seed: int) -> None:
    taken = poisson_draws(seed)
    assert abs(size_mean_score(taken, RATE)) < 4
    assert abs(size_variance_score(taken, RATE)) < 4


def test_the_same_statistic_rejects_a_fixed_batch_size() -> None:
    assert abs(size_mean_score(fixed_size_draws(), RATE)) < 4
    assert abs(size_variance_score(fixed_size_draws(), RATE)) > 20
    assert abs(size_variance_score(shuffled_draws(), RATE)) > 20


def test_the_same_statistic_rejects_a_rate_that_is_off_by_three_percent() -> None:
    assert abs(size_mean_score(poisson_draws(), 1.03 * RATE)) > 4


@pytest.mark.parametrize("seed", range(3))
def test_records_join_independently_of_each_other_and_of_the_step_before(seed: int) -> None:
    taken = poisson_draws(seed)
    assert worst_pair_score(taken, RATE) < 5
    assert abs(neighbouring_steps_score(taken, RATE)) < 4


def test_the_same_statistics_reject_pairs_epochs_and_repeats() -> None:
    paired = poisson_draws()
    paired[:, 1] = torch.where(
        torch.rand(STEPS, generator=torch.Generator().manual_seed(0)) < 0.1,
        paired[:, 0],
        paired[:, 1],
    )
    assert worst_pair_score(paired, RATE) > 5
    assert abs(neighbouring_steps_score(shuffled_draws(), RATE)) > 20
    assert abs(neighbouring_steps_score(poisson_draws().repeat_interleave(2, dim=0), RATE)) > 20


def test_every_record_is_taken_at_the_same_rate() -> None:
    counts = poisson_draws().sum(0)
    chi_square = float(((counts - STEPS * RATE) ** 2 / (STEPS * RATE * (1 - RATE))).sum())
    assert abs(chi_square - EXAMPLES) < 4 * math.sqrt(2 * EXAMPLES)


@pytest.mark.parametrize("at_once", [1, 7])
def test_drawing_in_small_chunks_keeps_the_law(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", at_once * EXAMPLES)
    taken = poisson_draws()
    assert len(taken) == STEPS
    assert abs(size_mean_score(taken, RATE)) < 4
    assert abs(size_variance_score(taken, RATE)) < 4
    assert abs(neighbouring_steps_score(taken, RATE)) < 4
    assert worst_pair_score(taken, RATE) < 5


def test_more_records_than_a_chunk_holds_are_drawn_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", 10)
    batches = list(PoissonBatches(1000, 500).draw(rng(), 40))
    assert len(batches) == 40
    assert max(int(batch.max()) for batch in batches) > 900
    assert abs(sum(map(len, batches)) - 20_000) < 5 * math.sqrt(40 * 250)


@given(examples=st.integers(1, 40), extra=st.integers(0, 100), steps=st.integers(1, 20))
def test_a_batch_as_large_as_the_data_takes_everything_in_every_step(
    examples: int, extra: int, steps: int
) -> None:
    records = PoissonBatches(examples, examples + extra)
    assert records.rate == 1.0
    assert records.expected_size == examples
    batches = list(records.draw(rng(), steps))
    assert len(batches) == steps
    assert all(torch.equal(batch, torch.arange(examples)) for batch in batches)


def test_empty_batches_occur_as_often_as_the_law_says() -> None:
    examples, steps = 20, 4000
    sizes = torch.tensor([len(batch) for batch in PoissonBatches(examples, 1).draw(rng(), steps)])
    probability = (1 - 1 / examples) ** examples  # 0.358
    score = (int((sizes == 0).sum()) - steps * probability) / math.sqrt(
        steps * probability * (1 - probability)
    )
    assert abs(score) < 4


@given(
    examples=st.integers(1, 60),
    batch=st.integers(1, 80),
    steps=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_poisson_batches_hold_distinct_records_of_the_client(
    examples: int, batch: int, steps: int, seed: int
) -> None:
    batches = list(PoissonBatches(examples, batch).draw(rng(seed), steps))
    assert len(batches) == steps
    for indices in batches:
        assert len(indices.unique()) == len(indices)
        assert bool(((indices >= 0) & (indices < examples)).all())


@given(
    examples=st.integers(1, 10_000),
    batch=st.integers(1, 20_000),
    steps=st.integers(0, 10_000),
    z=st.floats(0, 100),
)
def test_a_poisson_event_states_the_rate_the_steps_and_the_multiplier(
    examples: int, batch: int, steps: int, z: float
) -> None:
    event = PoissonBatches(examples, batch).event(z, steps, 100)
    rate = min(1.0, batch / examples)
    charged = effective_multiplier(z, 100, PoissonBatches(examples, batch).parts)
    assert event == Event(
        noise_multiplier=charged,
        steps=steps,
        sampling="poisson",
        sampling_rate=rate,
        numbers=100 if z else 0,
    )
    assert charged <= z


@given(examples=st.integers(1, 5_000), batch=st.integers(1, 300))
def test_a_batch_hardly_ever_has_more_parts_than_are_charged(examples: int, batch: int) -> None:
    """The tail beyond is below what the surcharge for one noise value covers; one part less would
    not be.
    """
    batches = PoissonBatches(examples, batch)
    most = batches.parts * part_width(batch)
    assert binom.sf(most, examples, batches.rate) <= 1e-25 or most >= examples
    fewer = (batches.parts - 1) * part_width(batch)
    assert fewer == 0 or binom.sf(fewer, examples, batches.rate) > 1e-26


@given(examples=st.integers(1, 10_000), batch=st.integers(1, 10_000))
def test_the_denominator_is_the_expected_size_of_a_batch(examples: int, batch: int) -> None:
    assert math.isclose(
        PoissonBatches(examples, batch).expected_size, min(examples, batch), rel_tol=1e-12
    )


@given(
    examples=st.integers(1, 40),
    batch=st.integers(1, 50),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_shuffled_batches_take_every_record_once_an_epoch(
    examples: int, batch: int, epochs: int, seed: int
) -> None:
    an_epoch = steps_per_epoch(examples, batch)
    batches = list(ShuffledBatches(examples, batch).draw(rng(seed), epochs * an_epoch))
    assert len(batches) == epochs * an_epoch
    for epoch in range(epochs):
        records = torch.cat(batches[epoch * an_epoch : (epoch + 1) * an_epoch])
        assert torch.equal(records.sort().values, torch.arange(examples))


def test_shuffled_epochs_come_in_different_orders() -> None:
    first, second = ShuffledBatches(100, 100).draw(rng(), 2)
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.arange(100))


def test_noise_over_shuffled_batches_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match="shuffle"):
        ShuffledBatches(100, 10).event(1.0, 5, 3)
    with pytest.raises(ConfigurationError, match="shuffle"):
        Phase(steps=1, batch_size=10, sampling="shuffle", lr=0.1, clip=1.0, noise_multiplier=1.0)


def test_shuffled_batches_without_noise_admit_that_nothing_is_hidden() -> None:
    assert ShuffledBatches(100, 10).event(0.0, 5, 3) == Event(noise_multiplier=0.0, steps=5)


@pytest.mark.parametrize(
    ("kind", "law"), [("poisson", PoissonBatches), ("shuffle", ShuffledBatches)]
)
def test_the_sampler_of_a_phase_follows_its_sampling(kind: str, law: type) -> None:
    phase = Phase(steps=1, batch_size=10, sampling=kind, lr=0.1)  # type: ignore[arg-type]
    assert sampler(phase, 100) == law(100, 10)


def test_a_client_without_data_has_no_sampler() -> None:
    with pytest.raises(DataError, match="has no data"):
        sampler(Phase(steps=1, batch_size=10, sampling="poisson", lr=0.1), 0)
