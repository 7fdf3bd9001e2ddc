"""Over the air: power kept within bounds, noise never below the bill, and a sum that is right on
average.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Claims, Cohort, Shared, Terms, Unit, Who
from dpfl.plugs.base import NoiseMaker
from dpfl.plugs.channels import Summed
from dpfl.plugs.over_the_air import Honest, OverTheAir, Split
from dpfl.privacy.exposure import Exposure
from dpfl.privacy.ledger import Ledger
from dpfl.rounds import Agreement, Plan, Run, enrol, first_state, open_round

LAYOUT = Layout.of({"weight": torch.zeros(4, 5), "bias": torch.zeros(4)})
NUMBERS = 30_000  # of one message: a std is measured to 0.4 %
CLIP = 0.7
HABITS = {"lr": 0.5, "clip": 1.0, "batch_size": 16, "local_steps": 5}


def claims_of(count: int) -> dict[str, Claims]:
    return {f"c{i:05d}": Claims(epsilon=5.0, delta=1e-3, examples=10) for i in range(count)}


def terms_of(population: int) -> Terms:
    return Terms(
        rounds=1,
        population=population,
        expected_cohort=population,
        participations=1,
        smallest_epsilon=1,
        largest_epsilon=1,
        parameters=10,
    )


def messages_of(ids: tuple[str, ...], numbers: int = NUMBERS) -> dict[str, Tensor]:
    """Messages as long as they may be: each of norm CLIP."""
    drawn = {
        client: torch.randn(numbers, generator=PublicSeed(i).generator())
        for i, client in enumerate(ids)
    }
    return {client: CLIP * vector / vector.norm() for client, vector in drawn.items()}


def opened(channel: OverTheAir, clients: int, round_: int = 0) -> tuple[Cohort, Shared]:
    cohort = Cohort.of(claims_of(clients))
    shared = channel.open(
        channel.start(terms_of(clients), LAYOUT), round_, cohort, PublicSeed(3).child(round_)
    )
    return cohort, shared


def sent_by(
    channel: OverTheAir, shared: Shared, cohort: Cohort, message: dict[str, Tensor], draw: int
) -> dict[str, Tensor]:
    return {
        client: channel.send(
            message[client],
            shared,
            Who(id=client, claims=cohort.claims[client], drawn=len(cohort)),
            SecretRng.simulated(PublicSeed(11).child(draw, client)),
        )
        for client in cohort.ids
    }


# ---- how a round's power is used -------------------------------------------------------------------------------------

STRENGTHS = st.lists(st.floats(1e-4, 20), min_size=1, max_size=6)
LEVELS = st.floats(-3, 2.5).map(lambda power: 10**power)
SETTINGS = st.tuples(
    st.sampled_from([1.0, "own", "own_and_receiver"]), st.integers(0, 3)
) | st.tuples(st.floats(0, 1), st.just(0))


def noise_counted_on(
    kappas: list[float],
    signal: float,
    level: float,
    numbers: int,
    receiver: float,
    honest: Honest,
    missing: int,
) -> float:
    """The least noise that any client finds, over all sets of others that may be honest and did not
    get lost.
    """
    own = [level * (kappa - signal) / numbers for kappa in kappas]
    others = int(honest * (len(kappas) - 1)) if not isinstance(honest, str) else 0
    kept = max(0, others - missing)
    least = min(
        own[i] + sum(chosen)
        for i in range(len(own))
        for chosen in itertools.combinations(own[:i] + own[i + 1 :], kept)
    )
    return least + (0.0 if honest == "own" else receiver)


def split_power(
    kappas: list[float],
    multiplier: float,
    numbers: int,
    receiver: float,
    honest: Honest,
    missing: int,
) -> Split:
    channel = OverTheAir(
        clip=1.0,
        noise_multiplier=multiplier,
        receiver_noise=receiver,
        honest=honest,
        tolerated_dropouts=missing,
    )
    return channel.split_power(kappas, numbers)


@given(STRENGTHS, LEVELS, st.integers(1, 2000), st.just(0.0) | LEVELS, SETTINGS)
@settings(max_examples=250, deadline=None)
def test_the_noise_that_is_counted_on_is_enough_and_no_stronger_signal_would_do(
    kappas: list[float],
    multiplier: float,
    numbers: int,
    receiver: float,
    setting: tuple[Honest, int],
) -> None:
    honest, missing = setting
    split = split_power(kappas, multiplier, numbers, receiver, honest, missing)

    def counted(signal: float, level: float) -> float:
        return noise_counted_on(kappas, signal, level, numbers, receiver, honest, missing)

    assert 0 < split.signal <= min(kappas)
    assert 0 <= split.level <= 1
    assert counted(split.signal, split.level) >= multiplier**2 * split.signal
    for kappa in kappas:
        share = split.signal / kappa
        assert share + split.level * (1 - share) <= 1 + 1e-12
    stronger = 1.01 * split.signal
    assert stronger > min(kappas) or counted(stronger, 1.0) < multiplier**2 * stronger
    arriving = receiver + split.level * sum(kappa - split.signal for kappa in kappas) / numbers
    assert split.noise == pytest.approx(arriving, rel=1e-9)


@given(STRENGTHS, LEVELS, st.integers(1, 2000), st.just(0.0) | LEVELS, SETTINGS)
@settings(max_examples=100, deadline=None)
def test_no_power_is_wasted_on_noise_that_nobody_needs(
    kappas: list[float],
    multiplier: float,
    numbers: int,
    receiver: float,
    setting: tuple[Honest, int],
) -> None:
    honest, missing = setting
    split = split_power(kappas, multiplier, numbers, receiver, honest, missing)
    enough = honest != "own" and receiver >= multiplier**2 * min(kappas)
    assert (split.level == 0) == enough
    if split.level > 0:
        counted = noise_counted_on(
            kappas, split.signal, split.level, numbers, receiver, honest, missing
        )
        slack = 1e-6 * multiplier**2 * split.signal + 4e-9 * split.signal * len(kappas) / numbers
        assert counted <= multiplier**2 * split.signal + slack


@given(st.integers(2, 7), LEVELS, st.integers(1, 500), LEVELS, SETTINGS, st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_every_client_of_a_round_is_told_at_least_the_agreed_multiplier(
    clients: int,
    multiplier: float,
    numbers: int,
    receiver: float,
    setting: tuple[Honest, int],
    seed: int,
) -> None:
    honest, missing = setting
    channel = OverTheAir(
        clip=1.0,
        noise_multiplier=multiplier,
        receiver_noise=receiver,
        honest=honest,
        tolerated_dropouts=missing,
        numbers=numbers,
    )
    ids = sorted(claims_of(clients))
    found = channel.multipliers(ids, numbers, PublicSeed(seed), honest)
    assert min(found) >= multiplier * (1 - 1e-12)
    by_all = channel.multipliers(ids, numbers, PublicSeed(seed), 1.0)
    alone = channel.multipliers(ids, numbers, PublicSeed(seed), "own")
    with_receiver = channel.multipliers(ids, numbers, PublicSeed(seed), "own_and_receiver")
    split = channel.split_power(channel.strengths(ids, PublicSeed(seed)), numbers)
    for client, most, least, middle in zip(ids, by_all, alone, with_receiver, strict=True):
        own = split.level * (channel.gain(client, PublicSeed(seed)) ** 2 - split.signal) / numbers
        assert least == pytest.approx(math.sqrt(max(0.0, own) / split.signal), rel=1e-6, abs=1e-9)
        assert least <= middle <= most * (1 + 1e-12)


# ---- what is sent, and what is heard ---------------------------------------------------------------------------------

# Receiver noise, multiplier and which case it makes: all spare power is noise, some of it, none of
# it.
CASES = {"all": (1e-9, 0.06), "some": (1e-9, 1e-3), "none": (1.0, 0.1)}


def channel_of(case: str, honest: Honest = 1.0, power: float = 2.5) -> OverTheAir:
    receiver, multiplier = CASES[case]
    return OverTheAir(
        clip=CLIP,
        noise_multiplier=multiplier,
        power=power,
        receiver_noise=receiver,
        honest=honest,
        numbers=NUMBERS,
    )


@pytest.mark.parametrize("case", CASES)
def test_nobody_sends_more_than_its_power_and_all_of_it_where_noise_is_short(case: str) -> None:
    """What a client sends is its scaled message; the noise that its antenna adds is drawn in the
    air.
    """
    channel = channel_of(case)
    cohort, shared = opened(channel, 5)
    signal, level = shared["power"][:2].tolist()
    assert {"all": level == 1, "some": 0 < level < 1, "none": level == 0}[case]
    message = messages_of(cohort.ids)
    sent = sent_by(channel, shared, cohort, message, 0)
    for client, strength in zip(
        cohort.ids, channel.strengths(cohort.ids, PublicSeed(3).child(0)), strict=True
    ):
        share, gain = signal / strength, channel.gain(client, PublicSeed(3).child(0))
        signal_power = float(sent[client].double().square().sum())
        assert signal_power == pytest.approx(2.5 * share, rel=1e-5)
        noise_power = NUMBERS * channel.artificial_noise(gain, shared)
        assert noise_power == pytest.approx(2.5 * level * (1 - share), rel=1e-6, abs=1e-12)
        assert signal_power + noise_power <= 2.5 * (1 + 1e-6)
        if case == "all":
            assert signal_power + noise_power == pytest.approx(2.5, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_antennas_and_receiver_add_is_what_arrives(case: str) -> None:
    channel = channel_of(case)
    cohort, shared = opened(channel, 5)
    gains = [channel.gain(client, PublicSeed(3).child(0)) for client in cohort.ids]
    added = channel.receiver_noise + sum(
        gain**2 * channel.artificial_noise(gain, shared) for gain in gains
    )
    assert added == pytest.approx(float(shared["power"][2]), rel=1e-9)


def test_a_message_shorter_than_the_clip_takes_less_power() -> None:
    channel = channel_of("none")
    cohort, shared = opened(channel, 3)
    full = sent_by(channel, shared, cohort, messages_of(cohort.ids), 0)
    half = sent_by(
        channel, shared, cohort, {c: m / 2 for c, m in messages_of(cohort.ids).items()}, 0
    )
    for client in cohort.ids:
        assert float(half[client].norm()) == pytest.approx(float(full[client].norm()) / 2, rel=1e-5)


@pytest.mark.parametrize("honest", [1.0, 0.5, "own_and_receiver", "own"])
@pytest.mark.parametrize("case", CASES)
def test_the_noise_at_the_receiver_is_what_is_told_and_never_below_the_bill(
    case: str, honest: Honest
) -> None:
    channel = channel_of(case, honest)
    cohort, shared = opened(channel, 5)
    message = messages_of(cohort.ids)
    sent = sent_by(channel, shared, cohort, message, 0)
    heard = channel.deliver(sent, shared, PublicSeed(0), SecretRng.simulated(PublicSeed(17)))
    assert isinstance(heard, Summed)
    assert heard.ids == cohort.ids
    noise = heard.vector.double() - sum(m.double() for m in message.values())
    std = float(noise.square().mean().sqrt())
    told = channel.metrics(shared)
    signal, _, arriving = shared["power"][:3].tolist()
    assert std == pytest.approx(math.sqrt(arriving / signal) * CLIP, rel=0.015)
    assert std == pytest.approx(float(told["noise_multiplier_of_all"]) * CLIP, rel=0.015)  # type: ignore[arg-type]
    assert std >= CASES[case][1] * CLIP * (1 - 0.015)
    if honest == 1.0 and case != "none":
        assert std == pytest.approx(
            CASES[case][1] * CLIP, rel=0.015
        )  # all of it is counted on, and no more is made
    assert abs(float(noise.mean())) < 4 * std / math.sqrt(NUMBERS)


@pytest.mark.parametrize("case", ["all", "some"])
def test_the_delivered_sum_is_right_on_average(case: str) -> None:
    """Measured along the sum itself, over draws, to less than one percent."""
    channel = channel_of(case)
    cohort, shared = opened(channel, 5)
    message = dict.fromkeys(cohort.ids, messages_of(cohort.ids)[cohort.ids[0]])
    total = len(cohort) * message[cohort.ids[0]].double()
    found = []
    for draw in range(16):
        sent = sent_by(channel, shared, cohort, message, draw)
        heard = channel.deliver(
            sent, shared, PublicSeed(0), SecretRng.simulated(PublicSeed(17).child(draw))
        )
        assert isinstance(heard, Summed)
        found.append(float(heard.vector.double() @ total / (total @ total)))
    assert sum(found) / len(found) == pytest.approx(1, abs=0.01)


def test_a_client_that_is_not_heard_is_not_in_the_sum() -> None:
    channel = OverTheAir(clip=CLIP, noise_multiplier=1e-5, receiver_noise=1e-14, numbers=200)
    cohort, shared = opened(channel, 5)
    message = messages_of(cohort.ids, 200)
    sent = sent_by(channel, shared, cohort, message, 0)
    gone = sent.pop(cohort.ids[2])
    heard = channel.deliver(sent, shared, PublicSeed(0), SecretRng.simulated(PublicSeed(1)))
    assert isinstance(heard, Summed)
    assert gone.shape == (200,)
    assert cohort.ids[2] not in heard.ids
    expected = sum(message[c] for c in heard.ids)
    assert torch.allclose(heard.vector, expected, atol=1e-3)  # type: ignore[arg-type]
    assert float((heard.vector - expected).norm()) < 0.01 * CLIP


def test_all_noise_is_drawn_once_in_the_air_and_none_by_who_sends() -> None:
    """Noise of several antennas on grids of their own would have no common grid."""
    channel = channel_of("all")
    cohort, shared = opened(channel, 3)
    message = messages_of(cohort.ids)
    first, second = (sent_by(channel, shared, cohort, message, draw) for draw in (0, 1))
    assert all(torch.equal(first[client], second[client]) for client in cohort.ids)
    for client in cohort.ids:  # the message itself, at one scale
        scale = float(first[client].norm() / message[client].norm())
        assert torch.allclose(first[client], scale * message[client], rtol=1e-5, atol=0)

    def heard(rng: SecretRng) -> Tensor:
        found = channel.deliver(first, shared, PublicSeed(0), rng)
        assert isinstance(found, Summed)
        return found.vector

    assert torch.equal(
        heard(SecretRng.simulated(PublicSeed(1))), heard(SecretRng.simulated(PublicSeed(1)))
    )
    other = heard(SecretRng.simulated(PublicSeed(2)))
    assert not torch.equal(heard(SecretRng.simulated(PublicSeed(1))), other)
    assert not torch.equal(heard(SecretRng.from_system()), heard(SecretRng.from_system()))


def test_what_is_heard_lies_on_the_grid_of_the_noise_that_arrives() -> None:
    """Whatever was sent: a coordinate tells nothing by its last digits."""
    channel = channel_of("all")
    cohort, shared = opened(channel, 3)
    signal, _, arriving = shared["power"][:3].tolist()
    step = math.sqrt(arriving / signal) * CLIP / 2**20
    for message in (messages_of(cohort.ids), dict.fromkeys(cohort.ids, torch.zeros(NUMBERS))):
        sent = sent_by(channel, shared, cohort, message, 0)
        heard = channel.deliver(sent, shared, PublicSeed(0), SecretRng.simulated(PublicSeed(1)))
        assert isinstance(heard, Summed)
        multiples = heard.vector.double() / step
        small = multiples.abs() < 2**20  # single precision holds these to a fraction of a step
        assert int(small.sum()) > NUMBERS / 2
        assert float((multiples - multiples.round()).abs()[small].max()) < 0.1


def test_the_bill_is_the_multiplier_over_what_was_clipped_before() -> None:
    channel = OverTheAir(clip=0.5, noise_multiplier=3.0)
    (event,) = channel.exposure(Exposure(unit=Unit.CLIENT).clipped(0.5), 10).events()
    assert event.noise_multiplier == pytest.approx(3.0)
    (event,) = channel.exposure(Exposure(unit=Unit.CLIENT).clipped(1.0), 10).events()
    assert event.noise_multiplier == pytest.approx(1.5)  # louder than agreed: billed as such
    (event,) = channel.exposure(
        Exposure(unit=Unit.CLIENT, numbers=10_000).clipped(0.5), 10
    ).events()
    widened = 1 + 3.0 * 100 / 2**20  # by rounding onto the grid
    assert event.noise_multiplier == pytest.approx(3.0 / widened, rel=1e-9)
    assert event.numbers == 10_000


def test_a_multiplier_left_open_is_settled_at_enrolment_and_needed_before() -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=None)
    for ask in (
        lambda: channel.split_power([1.0, 2.0], 5),
        lambda: channel.exposure(Exposure(unit=Unit.CLIENT).clipped(1.0), 2),
    ):
        with pytest.raises(ConfigurationError, match="enrol first"):
            ask()
    assert channel.resolve(terms_of(4).with_noise(2.5)).noise_multiplier == 2.5
    given = OverTheAir(clip=1.0, noise_multiplier=4.0)
    assert given.resolve(terms_of(4).with_noise(2.5)).noise_multiplier == 4.0


# ---- fading ----------------------------------------------------------------------------------------------------------


def test_fading_is_rayleigh_of_mean_power_one() -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0, power=3.0)
    ids = [f"client-{i}" for i in range(20_000)]
    squares = [channel.gain(client, PublicSeed(2)) ** 2 for client in ids]
    assert sum(squares) / len(squares) == pytest.approx(1, rel=0.02)
    for level in (0.1, math.log(2), 2.0):  # |h|^2 is exponential
        below = sum(square < level for square in squares) / len(squares)
        assert below == pytest.approx(1 - math.exp(-level), abs=0.01)
    assert channel.strengths(ids[:50], PublicSeed(2)) == pytest.approx(
        [3 * square for square in squares[:50]]
    )


def test_block_fading_changes_every_round_and_static_fading_never() -> None:
    ids = sorted(claims_of(30))
    first, second = PublicSeed(1).child("round", 0), PublicSeed(1).child("round", 1)
    block = OverTheAir(clip=1.0, noise_multiplier=1.0, fading="block")
    static = OverTheAir(clip=1.0, noise_multiplier=1.0, fading="static")
    assert not set(block.strengths(ids, first)) & set(block.strengths(ids, second))
    assert block.strengths(ids, first) == block.strengths(ids, first)
    assert static.strengths(ids, first) == static.strengths(ids, second)
    assert len(set(static.strengths(ids, first))) == 30


def test_the_gain_seed_chooses_a_static_channel_and_nothing_else() -> None:
    ids, seed = sorted(claims_of(10)), PublicSeed(5)
    static = OverTheAir(clip=1.0, noise_multiplier=1.0, fading="static", gain_seed=1)
    again = OverTheAir(clip=2.0, noise_multiplier=3.0, fading="static", gain_seed=1)
    assert static.strengths(ids, seed) == again.strengths(ids, PublicSeed(6))
    assert not set(static.strengths(ids, seed)) & set(
        replace(static, gain_seed=2).strengths(ids, seed)
    )
    block = OverTheAir(clip=1.0, noise_multiplier=1.0, gain_seed=1)
    assert block.strengths(ids, seed) == replace(block, gain_seed=2).strengths(ids, seed)


def planned(strategy: dpfl.Strategy, clients: int, rounds: int = 3) -> tuple[Agreement, list[Plan]]:
    """Enrol and open every round, without anybody working."""
    agreement = enrol(strategy, claims_of(clients), rounds, LAYOUT)
    ledger = Ledger.create(":memory:", "test")
    ledger.register("run", seeded=True, title="test")
    run = Run(name="run", ledger=ledger, seed=PublicSeed(0), public=PublicSeed(8))
    state = first_state(agreement, torch.zeros(LAYOUT.size))
    return agreement, [
        open_round(agreement, replace(state, round=r), run, lambda _: True) for r in range(rounds)
    ]


@pytest.mark.parametrize("fading", ["block", "static"])
def test_clients_in_a_deep_fade_are_not_drawn(fading: str) -> None:
    strategy = dpfl.airsgd(lr=0.1, clip=1.0, noise_multiplier=2.0, min_gain=0.8, fading=fading)  # type: ignore[arg-type]
    agreement, plans = planned(strategy, 40)
    channel = agreement.strategy.channel
    assert isinstance(channel, OverTheAir)
    heard = []
    for plan in plans:
        seed = PublicSeed(8).child("round", plan.round).child("channel")
        gains = {client: channel.gain(client, seed) for client in agreement.claims}
        assert set(plan.cohort.ids) == {client for client, gain in gains.items() if gain >= 0.8}
        assert 0 < len(plan.cohort) < 40
        weakest = min(gain for gain in gains.values() if gain >= 0.8)
        assert channel.metrics(dict(plan.shared["channel"]))["weakest_gain"] == pytest.approx(
            weakest
        )
        heard.append(plan.cohort.ids)
    assert (len(set(heard)) == 1) == (fading == "static")


def test_a_round_in_which_nobody_is_heard_passes() -> None:
    strategy = dpfl.airsgd(lr=0.1, clip=1.0, noise_multiplier=2.0, min_gain=50.0)
    _, (plan, *_) = planned(strategy, 6)
    assert plan.cohort.ids == ()
    assert not plan.over


def test_a_projection_is_drawn_afresh_every_round_and_a_message_has_its_length() -> None:
    strategy = dpfl.dprp(lr=0.1, clip=1.0, dimension=7, noise_multiplier=2.0)
    agreement, plans = planned(strategy, 4, rounds=4)
    seeds = {bytes(plan.shared["stage1"]["seed"].tolist()) for plan in plans}
    assert len(seeds) == 4
    for plan in plans:
        assert agreement.strategy.channel.metrics(dict(plan.shared["channel"]))["channel_uses"] == 7


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"power": -1.0}, "power = -1"),
        ({"power": 0.0}, "power = 0"),
        ({"power": math.inf}, "power = inf"),
        ({"power": math.nan}, "power = nan"),
        ({"clip": 0.0}, "clip = 0"),
        ({"clip": -2.0}, "clip = -2"),
        ({"receiver_noise": -1.0}, "receiver_noise = -1"),
        ({"min_gain": -0.1}, "min_gain = -0.1"),
        ({"tolerated_dropouts": -1}, "tolerated_dropouts = -1"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier = nan"),
        ({"fading": "slow"}, "fading = 'slow'"),
        ({"honest": 1.5}, "honest = 1.5"),
        ({"honest": -0.1}, "honest = -0.1"),
        ({"honest": math.nan}, "honest = nan"),
        ({"honest": "x"}, "honest = 'x'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace(".", r"\.")):
        OverTheAir(**{"clip": 1.0, "noise_multiplier": 1.0, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("honest", [1.0, 0.5])
def test_one_client_cannot_hide_among_others(honest: Honest) -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0, honest=honest)
    with pytest.raises(ConfigurationError, match="nobody to hide among"):
        channel.start(terms_of(1), LAYOUT)
    assert int(channel.start(terms_of(2), LAYOUT)["numbers"]) == LAYOUT.size


@pytest.mark.parametrize("honest", ["own", "own_and_receiver", 0.0])
def test_one_client_may_rely_on_noise_that_is_not_the_others(honest: Honest) -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0, honest=honest)
    assert not channel.shares_noise
    assert int(channel.start(terms_of(1), LAYOUT)["numbers"]) == LAYOUT.size


@pytest.mark.parametrize("honest", [1.0, 0.25])
def test_where_others_are_counted_on_the_round_knows_it(honest: Honest) -> None:
    assert OverTheAir(clip=1.0, noise_multiplier=1.0, honest=honest).shares_noise


@pytest.mark.parametrize("method", [dpfl.weiavg, dpfl.robust_hdp, dpfl.dpfedavg, dpfl.pfa])
def test_a_method_that_looks_at_rows_is_refused_at_construction(method: object) -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="rows"):
        replace(method(**HABITS), channel=channel)  # type: ignore[operator]


def test_the_channel_delivers_sums_and_is_never_deployed() -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0)
    assert not channel.sees_rows
    assert channel.simulated
    assert isinstance(channel, NoiseMaker)


@pytest.mark.parametrize(
    ("honest", "missing", "counted"),
    [(0.5, 0, 5), (0.5, 2, 3), (1.0, 2, 8), (0.1, 5, 1), ("own", 5, 1)],
)
def test_who_is_missing_may_be_among_the_honest(honest: Honest, missing: int, counted: int) -> None:
    channel = OverTheAir(clip=1.0, tolerated_dropouts=missing)
    assert channel.counted_clients(10, honest) == counted


def test_a_message_of_another_length_than_noise_was_planned_for_is_refused() -> None:
    channel = OverTheAir(clip=1.0, noise_multiplier=1.0, numbers=4)
    cohort = Cohort.of({c: Claims(epsilon=1.0, delta=1e-5, examples=5) for c in "ab"})
    shared = channel.open({"numbers": torch.tensor([4])}, 0, cohort, PublicSeed(1).child("x"))
    who = Who(id="a", claims=cohort.claims["a"], drawn=2)
    assert channel.send(torch.ones(4), shared, who, SecretRng.simulated(PublicSeed(2))).shape == (
        4,
    )
    with pytest.raises(ConfigurationError, match="5 numbers, noise was planned for 4"):
        channel.send(torch.ones(5), shared, who, SecretRng.simulated(PublicSeed(2)))
