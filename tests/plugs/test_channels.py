from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.errors import ConfigurationError
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Unit
from dpfl.plugs.channels import Digital, Dropout, Summed
from dpfl.plugs.secure_sum import SecureSum
from dpfl.privacy.exposure import Exposure

SEED = PublicSeed(0)
RNG = SecretRng.simulated(SEED)


def messages(clients: int, size: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"c{i:03d}": torch.randn(size, generator=generator) for i in range(clients)}


def test_a_digital_channel_delivers_every_message_as_it_was_sent() -> None:
    sent = messages(5) | {"odd": torch.tensor([math.nan, math.inf, -0.0, 1e-45])}
    arrived = Digital().deliver(sent, {}, SEED, RNG)
    assert isinstance(arrived, dict)
    assert list(arrived) == list(sent)
    assert all(
        arrived[client].numpy().tobytes() == sent[client].numpy().tobytes() for client in sent
    )


@given(clients=st.integers(1, 40), size=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_a_secure_sum_is_the_sum_and_nothing_but_the_sum(
    clients: int, size: int, seed: int
) -> None:
    sent = messages(clients, size, seed)
    arrived = SecureSum().deliver(sent, {}, SEED, RNG)
    assert isinstance(arrived, Summed)
    expected = torch.stack(list(sent.values())).to(torch.float64).sum(0)
    assert torch.allclose(arrived.vector.to(torch.float64), expected, atol=1e-5 * clients)
    assert arrived.ids == tuple(sorted(sent))
    assert set(vars(arrived)) == {"vector", "ids"}


@given(seed=st.integers(0, 2**32), order=st.permutations(range(12)))
def test_a_secure_sum_does_not_depend_on_who_came_first(seed: int, order: list[int]) -> None:
    sent = messages(12, seed=seed)
    names = list(sent)
    shuffled = {names[i]: sent[names[i]] for i in order}
    first, second = (SecureSum().deliver(these, {}, SEED, RNG) for these in (sent, shuffled))
    assert isinstance(first, Summed)
    assert isinstance(second, Summed)
    assert torch.equal(first.vector, second.vector)


def losses(rate: float, clients: int, rounds: int) -> Tensor:
    sent = messages(clients, size=1)
    lost = torch.ones(rounds, clients, dtype=torch.float64)
    for i in range(rounds):
        for client in Dropout(rate=rate, through=Digital()).deliver(sent, {}, SEED.child(i), RNG):
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


def test_what_is_not_lost_arrives_as_it_was_sent() -> None:
    sent = messages(50)
    arrived = Dropout(rate=0.5, through=Digital()).deliver(sent, {}, SEED, RNG)
    assert isinstance(arrived, dict)
    assert 0 < len(arrived) < 50
    assert all(torch.equal(message, sent[client]) for client, message in arrived.items())


def test_losses_are_a_function_of_the_public_seed() -> None:
    channel, sent = Dropout(rate=0.5, through=Digital()), messages(50)
    shuffled = dict(reversed(sent.items()))
    first = channel.deliver(sent, {}, SEED, RNG)
    assert isinstance(first, dict)
    assert set(first) == set(channel.deliver(shuffled, {}, SEED, RNG))  # type: ignore[arg-type]
    assert set(first) != set(channel.deliver(sent, {}, SEED.child("other"), RNG))  # type: ignore[arg-type]


def test_a_sum_with_losses_is_the_sum_of_those_it_names() -> None:
    sent = messages(20)
    arrived = Dropout(rate=0.4, through=SecureSum()).deliver(sent, {}, SEED, RNG)
    assert isinstance(arrived, Summed)
    assert 0 < len(arrived.ids) < 20
    expected = torch.stack([sent[client] for client in arrived.ids]).double().sum(0)
    assert arrived.vector.dtype == torch.float64
    assert torch.allclose(arrived.vector, expected, rtol=0, atol=1e-14)


def test_nothing_is_lost_at_rate_zero_and_everything_at_rate_one() -> None:
    sent = messages(30)
    kept = Dropout(rate=0.0, through=Digital()).deliver(sent, {}, SEED, RNG)
    assert isinstance(kept, dict)
    assert set(kept) == set(sent)
    assert Dropout(rate=1.0, through=Digital()).deliver(sent, {}, SEED, RNG) == {}
    nothing = Dropout(rate=1.0, through=SecureSum()).deliver(sent, {}, SEED, RNG)
    assert isinstance(nothing, Summed)
    assert nothing.ids == ()
    assert torch.equal(nothing.vector, torch.zeros(7))


def test_losing_messages_hides_nobody() -> None:
    """A channel that loses messages at random is no sampling anyone may count on."""
    exposure = Exposure(unit=Unit.CLIENT).clipped(1.0).noised(2.0)
    for channel in (
        Digital(),
        SecureSum(),
        Dropout(rate=0.9, through=Digital()),
        Dropout(rate=0.9, through=SecureSum()),
    ):
        assert channel.exposure(exposure, 10).events() == exposure.events()


def test_a_lossy_channel_shows_what_the_one_underneath_shows_and_is_never_deployed() -> None:
    assert Dropout(rate=0.1, through=Digital()).sees_rows
    assert not Dropout(rate=0.1, through=SecureSum()).sees_rows
    assert Dropout(rate=0.1, through=Digital()).simulated
    assert SecureSum().simulated
    assert not Digital().simulated


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="probability"):
        Dropout(rate=rate, through=Digital())
