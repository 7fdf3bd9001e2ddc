"""The secure sum as a channel: what is delivered, and how much noise counts against whom."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from dpfl import testing
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.grid import Grid
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Unit, Who
from dpfl.plugs.channels import Summed
from dpfl.plugs.secure_sum import SecureSum
from dpfl.plugs.stages import Clip, GaussianNoise
from dpfl.privacy.exposure import Exposure

SEED = PublicSeed(0)
RNG = SecretRng.simulated(SEED)


def messages(clients: int, size: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"c{i:03d}": torch.randn(size, generator=generator) for i in range(clients)}


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


@pytest.mark.parametrize("dropouts", [0, 2])
def test_the_laws_of_channels_hold(dropouts: int) -> None:
    for colluders in (0, 1, 3):
        testing.check_channel(SecureSum(tolerated_dropouts=dropouts, colluders=colluders))


class Generous(SecureSum):
    """Counts on the colluders' shares as well."""

    def exposure(self, exposure: Exposure, drawn: int) -> Exposure:
        return exposure.summed(1.0, self.least(drawn))


def test_a_sum_that_counts_on_colluders_is_caught() -> None:
    with pytest.raises(AssertionError, match="shares"):
        testing.check_channel(Generous())


# ---- whose noise counts --------------------------------------------------------------------------


def share(channel: SecureSum, multiplier: float, clip: float) -> GaussianNoise:
    """The noise stage that a strategy over this channel has."""
    missing = channel.tolerated_dropouts + channel.colluders
    return GaussianNoise(
        noise_multiplier=multiplier, clip=clip, distributed=True, tolerated_dropouts=missing
    )


def seen(channel: SecureSum, noise: GaussianNoise, drawn: int, numbers: int = 50) -> Exposure:
    exposure = Clip(clip=noise.clip).exposure(Exposure(unit=Unit.CLIENT, numbers=numbers), drawn)
    return channel.exposure(noise.exposure(exposure, drawn), drawn)


@given(
    drawn=st.integers(2, 300),
    dropouts=st.integers(0, 100),
    colluders=st.integers(0, 20),
    multiplier=st.floats(0.1, 50),
    clip=st.floats(0.01, 100),
)
def test_the_honest_shares_that_must_be_there_carry_all_of_the_noise(
    drawn: int, dropouts: int, colluders: int, multiplier: float, clip: float
) -> None:
    assume(drawn > 2 * dropouts + colluders)
    channel = SecureSum(tolerated_dropouts=dropouts, colluders=colluders)
    noise = share(channel, multiplier, clip)
    honest = drawn - dropouts - colluders
    assert channel.group(drawn).honest == honest
    assert channel.least(drawn) == channel.group(drawn).least == drawn - dropouts
    total = seen(channel, noise, drawn)
    assert total.noise == pytest.approx(noise.std(drawn) * math.sqrt(honest))
    assert total.noise == pytest.approx(multiplier * clip)
    assert total.bound == pytest.approx(clip + Grid.of(multiplier * clip).step * math.sqrt(50))
    assert total.draws == 50 * honest
    assert total.failure == (2.0**-64 if drawn > 64 else 0.0)
    assert total.failure >= channel.group(drawn).failure


@given(dropouts=st.integers(0, 4), colluders=st.integers(0, 4))
def test_clients_who_leave_later_make_nobody_pay_less_than_is_due(
    dropouts: int, colluders: int
) -> None:
    """Fewer shares are larger ones on a coarser grid; the charge is planned for all clients."""
    channel = SecureSum(tolerated_dropouts=dropouts, colluders=colluders)
    noise = share(channel, 2000.0, 1.0)  # so much that the grid costs something
    charged = seen(channel, noise, 40, numbers=10_000)
    for drawn in range(max(2, 2 * dropouts + colluders + 1), 41):
        exposure = Exposure(unit=Unit.CLIENT, bound=1.0, numbers=10_000)
        own = noise.exposure(exposure, drawn).summed(1.0, drawn - dropouts - colluders)
        assert own.noise / own.bound >= charged.noise / charged.bound * (1 - 1e-12)
        assert own.draws <= charged.draws


def carried(noise: GaussianNoise, drawn: int, shares: int) -> float:
    """The std of a sum of some clients' shares, over the clip, measured on 200,000 numbers."""
    claims, total = Claims(epsilon=1.0, delta=1e-5, examples=10), torch.zeros(200_000).double()
    for i in range(shares):
        who = Who(id=f"c{i}", claims=claims, drawn=drawn)
        secret = SecretRng.simulated(SEED.child(drawn, shares, i))
        total += noise.client(torch.zeros(200_000), {}, who, secret)
    return float(total.std()) / noise.clip


@pytest.mark.parametrize(("drawn", "dropouts", "colluders"), [(3, 0, 1), (9, 2, 1), (12, 0, 4)])
def test_any_honest_shares_carry_the_noise_that_is_charged_and_one_fewer_do_not(
    drawn: int, dropouts: int, colluders: int
) -> None:
    """A std of 200,000 numbers is known to 0.16 %, and one share of 8 makes 6 %."""
    channel = SecureSum(tolerated_dropouts=dropouts, colluders=colluders)
    noise = share(channel, 1.7, 2.0)
    charged, honest = seen(channel, noise, drawn), channel.group(drawn).honest
    least = charged.noise / charged.bound
    assert carried(noise, drawn, honest) == pytest.approx(1.7, rel=0.008)
    assert carried(noise, drawn, honest) >= least * 0.992
    assert carried(noise, drawn, honest - 1) < least * 0.96
    counted_on = GaussianNoise(
        noise_multiplier=1.7,
        clip=2.0,
        distributed=True,
        tolerated_dropouts=dropouts + colluders - 1,
    )
    assert carried(counted_on, drawn, honest) < least * 0.96


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("drawn", "dropouts", "colluders"), [(1, 0, 0), (2, 0, 2), (10, 5, 1)])
def test_a_group_that_hides_nobody_is_refused_with_its_numbers(
    drawn: int, dropouts: int, colluders: int
) -> None:
    channel = SecureSum(tolerated_dropouts=dropouts, colluders=colluders)
    for ask in (channel.group, lambda n: channel.exposure(Exposure(unit=Unit.CLIENT), n)):
        with pytest.raises(PrivacyRefusal, match=f"{drawn} members of whom {colluders}") as refused:
            ask(drawn)
        assert refused.value.exit_code == 4


@pytest.mark.parametrize(
    ("name", "value"),
    list(itertools.product(("tolerated_dropouts", "colluders"), (-1, 0.5, "one"))),
)
def test_numbers_of_members_are_whole(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*{value}"):
        SecureSum(**{name: value})  # type: ignore[arg-type]


def test_the_assumptions_name_the_adversary() -> None:
    first, second, *_ = SecureSum(tolerated_dropouts=2, colluders=1).assumptions
    assert "the server is the adversary, and 1 member of a sum may work together" in first
    assert "all drawn clients but 2" in second
    assert "3 clients fewer" in second
    assert "members of its sums are trusted" in SecureSum(colluders=0).assumptions[0]
