from __future__ import annotations

import math

import torch
from torch import Tensor

from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Unit
from dpfl.plugs.channels import Digital
from dpfl.plugs.over_the_air import OverTheAir
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


def test_a_channel_that_loses_nothing_hides_nobody() -> None:
    exposure = Exposure(unit=Unit.CLIENT).clipped(1.0).noised(2.0)
    assert Digital().exposure(exposure, 10).events() == exposure.events()


def test_a_channel_says_what_the_server_sees_and_whether_it_can_be_deployed() -> None:
    assert Digital().sees_rows
    assert not SecureSum().sees_rows
    assert not SecureSum().simulated
    assert OverTheAir(clip=1.0).simulated
    assert not Digital().simulated
