"""Uploads that get lost: each on its own, at the rate given, by the public seed."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.plugs.channels import Summed
from dpfl.plugs.secure_sum import SecureSum
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Run, Uplink
from dpfl.runs.sections import RunSection
from dpfl.sim.truth import lost_on_the_way

SEED = PublicSeed(0)
RNG = SecretRng.simulated(SEED)


def uploads(clients: int) -> list[Uplink]:
    return [Uplink(client=f"c{i:03d}", payload=bytes([i])) for i in range(clients)]


def run_of(seed: PublicSeed = SEED) -> Run:
    return Run(name="run", ledger=Ledger.create(":memory:", "test"), seed=None, public=seed)


def heard(sent: list[Uplink], rate: float, run: Run, round_: int = 0) -> dict[str, bytes]:
    """What is left of a round's uploads after the simulator has lost some."""
    left = lost_on_the_way(sent, rate, run, round_)
    return {uplink.client: uplink.payload for uplink in left if uplink.payload is not None}


def losses(rate: float, clients: int, rounds: int) -> Tensor:
    sent, run = uploads(clients), run_of()
    lost = torch.ones(rounds, clients, dtype=torch.float64)
    for i in range(rounds):
        for client in heard(sent, rate, run, i):
            lost[i, int(client[1:])] = 0.0
    return lost


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_each_message_is_lost_on_its_own_with_the_rate_given(rate: float) -> None:
    clients, rounds = 20, 2000
    lost = losses(rate, clients, rounds)
    variance = rate * (1 - rate)
    mean_score = (float(lost.mean()) - rate) / math.sqrt(variance / lost.numel())
    spread_score = (float(lost.sum(1).var()) / (clients * variance) - 1) / math.sqrt(2 / rounds)
    following = (lost[1:] - rate) * (lost[:-1] - rate) / variance
    assert abs(mean_score) < 4
    assert abs(spread_score) < 4.5
    assert abs(float(following.sum())) < 4 * math.sqrt(following.numel())
    assert (
        abs((float(lost.mean()) - 1.1 * rate) / math.sqrt(variance / lost.numel())) > 4
    )  # 10 % off would be seen


def test_what_is_not_lost_arrives_as_it_was_sent_and_what_is_lost_says_so() -> None:
    sent, run = uploads(50), run_of()
    arrived = heard(sent, 0.5, run)
    assert 0 < len(arrived) < 50
    assert all(arrived.get(u.client) in (u.payload, None) for u in sent)
    after = lost_on_the_way(sent, 0.5, run, 0)
    assert sorted(u.client for u in after) == sorted(u.client for u in sent)
    assert all((u.payload is None) == ("lost" in u.reason) for u in after)


def test_losses_are_a_function_of_the_public_seed_and_of_the_round() -> None:
    sent, run = uploads(50), run_of()
    first = set(heard(sent, 0.5, run))
    assert first == set(heard(sent[::-1], 0.5, run_of()))
    assert first != set(heard(sent, 0.5, run, 1))
    assert first != set(heard(sent, 0.5, run_of(SEED.child("other"))))


def test_a_sum_with_losses_is_the_sum_of_those_it_names() -> None:
    sent = {f"c{i:03d}": torch.randn(7, generator=SEED.child(i).generator()) for i in range(20)}
    left = heard(uploads(20), 0.4, run_of())
    arrived = SecureSum().deliver({client: sent[client] for client in left}, {}, SEED, RNG)
    assert isinstance(arrived, Summed)
    assert 0 < len(arrived.ids) < 20
    assert arrived.ids == tuple(sorted(left))
    expected = torch.stack([sent[client] for client in arrived.ids]).double().sum(0)
    assert arrived.vector.dtype == torch.float64
    assert torch.allclose(arrived.vector, expected, rtol=0, atol=1e-14)


def test_nothing_is_lost_at_rate_zero_and_everything_at_rate_one() -> None:
    sent, run = uploads(30), run_of()
    assert heard(sent, 0.0, run) == {u.client: u.payload for u in sent}
    assert heard(sent, 1.0, run) == {}


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ValidationError, match="dropout"):
        RunSection(rounds=1, dropout=rate)
