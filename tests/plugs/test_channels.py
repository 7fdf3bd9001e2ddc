from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Unit
from dpfl.plugs.channels import Digital, Summed
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


def test_a_channel_that_loses_nothing_hides_nobody() -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(1.0).noised(2.0)
    for channel in (Digital(), SecureSum()):
        assert channel.exposure(exposure, 10).events() == exposure.events()


def test_a_channel_says_what_the_server_sees_and_whether_it_can_be_deployed() -> None:
    assert Digital().sees_rows
    assert not SecureSum().sees_rows
    assert SecureSum().simulated
    assert not Digital().simulated
