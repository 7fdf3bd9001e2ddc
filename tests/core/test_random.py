"""Two kinds of randomness: public seeds that travel, secret generators that never do."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dpfl.core.grid_noise import SCALE, keystream
from dpfl.core.random import PublicSeed, SecretRng

LABELS = st.lists(
    st.one_of(st.text(alphabet="ab:1\x1f", max_size=4), st.integers(-3, 30)), max_size=3
)
DRAWS = 100_000
LOW, HIGH = 0.9926, 1.0074  # 3.3 standard errors of a standard deviation over 1e5 draws


def noise(rng: SecretRng, size: int = DRAWS) -> Tensor:
    """Noise of unit scale; the low digits come from a second draw, so that two equal numbers are no
    accident.
    """
    high, low = rng.grid_noise_(torch.empty(size, 2)).double().T
    return (high + low * 2.0**-26) / SCALE


def scale_is_one(draws: Tensor) -> bool:
    return LOW <= draws.std().item() <= HIGH


def in_a_fork(draw: Callable[[], Tensor]) -> Tensor:
    """Draw in a forked child and send the bytes back through a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, draw().numpy().tobytes())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        received = stream.read()
    os.waitpid(child, 0)
    return torch.frombuffer(bytearray(received), dtype=torch.float64)


# ---- public seeds --------------------------------------------------------------------------------


def test_children_are_named_and_not_ordered() -> None:
    first, second = PublicSeed(7), PublicSeed(7)
    cohort = first.child("cohort", 3)
    model = first.child("model")
    assert second.child("model") == model
    assert second.child("cohort", 3) == cohort
    assert cohort != model


@given(LABELS, LABELS)
def test_two_children_agree_exactly_where_their_names_do(
    one: list[str | int], other: list[str | int]
) -> None:
    assert (PublicSeed(7).child(*one) == PublicSeed(7).child(*other)) == (one == other)


def test_a_label_that_contains_the_separator_is_not_mistaken_for_two_labels() -> None:
    """Client names are labels, and a name is whatever its owner wrote."""
    assert PublicSeed(7).child("a\x1fstr:b") != PublicSeed(7).child("a", "b")


def test_a_number_and_its_text_name_different_children() -> None:
    assert PublicSeed(7).child(3) != PublicSeed(7).child("3")


def test_a_child_depends_on_its_parent_and_differs_from_it() -> None:
    assert PublicSeed(7).child("a") != PublicSeed(8).child("a")
    assert PublicSeed(7).child("a").child("b") != PublicSeed(7).child("b").child("a")
    assert PublicSeed(7).child() != PublicSeed(7)


@given(st.integers(0, 2**128))
def test_equal_seeds_give_equal_streams(value: int) -> None:
    one, other = PublicSeed(value), PublicSeed(value)
    assert torch.equal(
        torch.randn(5, generator=one.generator()), torch.randn(5, generator=other.generator())
    )
    assert np.array_equal(one.numpy().random(5), other.numpy().random(5))
    assert torch.equal(noise(SecretRng.simulated(one), 5), noise(SecretRng.simulated(other), 5))


@pytest.mark.parametrize("bit", [32, 33, 47, 63, 64, 100, 127])
def test_bits_of_the_seed_above_the_thirty_second_matter(bit: int) -> None:
    """torch's own manual_seed keeps 32 bits, which a laptop can search."""
    near, far = PublicSeed(5), PublicSeed(5 + 2**bit)
    assert not torch.equal(
        torch.randn(8, generator=near.generator()), torch.randn(8, generator=far.generator())
    )
    assert not np.array_equal(near.numpy().random(8), far.numpy().random(8))


def test_the_whole_state_of_a_generator_depends_on_the_seed() -> None:
    """Two seeds agree on none (or hardly any) of the 624 words, not just on the first outputs."""
    one, other = (
        PublicSeed(value).generator().get_state().numpy()[24 : 24 + 8 * 624] for value in (1, 2)
    )
    same = np.count_nonzero(one.view("<u8") == other.view("<u8"))
    assert same <= 1


def test_a_generator_is_fresh_each_time_it_is_asked_for() -> None:
    seed = PublicSeed(3)
    used = seed.generator()
    first = torch.rand(4, generator=used)
    assert not torch.equal(torch.rand(4, generator=used), first)
    assert torch.equal(torch.rand(4, generator=seed.generator()), first)


# ---- secret generators: no way out ---------------------------------------------------------------


@pytest.mark.parametrize(
    "rng", [SecretRng.from_system(), SecretRng.simulated(PublicSeed(1))], ids=["system", "seeded"]
)
@pytest.mark.parametrize(
    "leak",
    [
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda rng: pickle.dumps({"deep": [rng]}),
        lambda rng: copy.deepcopy([rng]),
    ],
    ids=["copy", "deepcopy", "pickle", "pickle inside", "deepcopy inside"],
)
def test_a_secret_generator_cannot_be_copied_or_serialised(
    rng: SecretRng, leak: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError, match="never"):
        leak(rng)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_protocol_serialises_a_secret_generator(protocol: int) -> None:
    with pytest.raises(TypeError, match="never serialised"):
        pickle.dumps(SecretRng.from_system(), protocol)


def test_printing_a_secret_generator_tells_its_kind_and_nothing_else() -> None:
    for show in (repr, str, "{}".format):
        assert show(SecretRng.from_system()) == "SecretRng(system)"
        assert show(SecretRng.simulated(PublicSeed(987654321))) == "SecretRng(simulated)"


def test_a_secret_generator_has_no_attribute_dictionary() -> None:
    with pytest.raises(TypeError):
        vars(SecretRng.from_system())


def test_a_generator_and_its_children_say_whether_they_are_seeded() -> None:
    simulated, system = SecretRng.simulated(PublicSeed(1)), SecretRng.from_system()
    assert simulated.seeded and simulated.child("a").seeded
    assert not system.seeded and not system.child("a").seeded


# ---- secret generators: unpredictable ------------------------------------------------------------


def test_system_generators_differ_even_where_every_global_generator_is_seeded() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        released = []
        for _ in range(2):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            rng = SecretRng.from_system()
            released.append(
                (noise(rng, 8), rng.chosen(8, 8, 0.5), rng.integer(), noise(rng.child("a"), 8))
            )
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    one, other = released
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    assert one[2] != other[2]
    assert not torch.equal(one[3], other[3])


def test_children_of_a_system_generator_are_fresh_even_under_one_name() -> None:
    rng = SecretRng.from_system()
    assert not torch.equal(noise(rng.child("a"), 8), noise(rng.child("a"), 8))


def test_a_forked_child_does_not_repeat_its_parents_noise() -> None:
    rng = SecretRng.from_system()
    noise(rng, 3)  # in the middle of its stream
    children = [in_a_fork(lambda: noise(rng, 16)) for _ in range(2)]
    own = noise(rng, 16)
    assert all(len(draws) == 16 for draws in children)
    assert not torch.isin(children[0], torch.cat([children[1], own])).any()
    assert not torch.isin(children[1], own).any()


def test_a_simulated_generator_repeats_itself_in_a_fork() -> None:
    """The counterpart: shows that the test above can tell a repeated stream from a fresh one."""
    rng = SecretRng.simulated(PublicSeed(4))
    assert torch.equal(in_a_fork(lambda: noise(rng, 16)), noise(rng, 16))


@pytest.fixture
def asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the operating system was asked for, call by call."""
    calls: list[int] = []
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: calls.append(size) or urandom(size))
    return calls


DRAWN: dict[str, Callable[[SecretRng], object]] = {
    "noise": lambda rng: rng.grid_noise_(torch.empty(8)).tolist(),
    "coins": lambda rng: rng.chosen(10, 10, 0.5).tolist(),
    "permutation": lambda rng: rng.permutation(50).tolist(),
    "integer": lambda rng: rng.integer(),
    "seed": lambda rng: rng.secret_seed(),
}
EVERY_DRAW = pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)


@EVERY_DRAW
def test_a_system_generator_is_made_when_it_is_first_drawn_from_and_once(
    drawn: Callable[[SecretRng], object], asked_of_the_system: list[int]
) -> None:
    rng = SecretRng.from_system()
    child = rng.child("a").child("b", 3)
    assert not rng.seeded and repr(rng) == "SecretRng(system)"
    assert asked_of_the_system == []
    first = drawn(rng)
    assert asked_of_the_system == [32]
    assert drawn(rng) != first
    assert asked_of_the_system == [32]
    drawn(child)
    assert asked_of_the_system == [32, 32]


@EVERY_DRAW
def test_a_simulated_generator_asks_nothing_of_the_system(
    drawn: Callable[[SecretRng], object], asked_of_the_system: list[int]
) -> None:
    rng = SecretRng.simulated(PublicSeed(1))
    drawn(rng)
    drawn(rng.child("a"))
    assert asked_of_the_system == []


@EVERY_DRAW
@given(
    st.lists(st.tuples(LABELS, st.booleans()), max_size=4),
    st.lists(st.tuples(LABELS, st.booleans()), max_size=4),
)
def test_equal_seeds_give_equal_streams_whatever_was_asked_of_children(
    drawn: Callable[[SecretRng], object],
    before: list[tuple[list[str | int], bool]],
    between: list[tuple[list[str | int], bool]],
) -> None:
    """Naming children, and drawing from them, moves neither the parent's stream nor another
    child's.
    """
    plain, busy = (SecretRng.simulated(PublicSeed(8)) for _ in range(2))
    for asked in (before, between):
        for labels, draws in asked:
            child = busy.child(*labels)
            if draws:
                drawn(child)
        assert drawn(busy) == drawn(plain)
    assert drawn(busy.child("late")) == drawn(SecretRng.simulated(PublicSeed(8)).child("late"))


@EVERY_DRAW
def test_a_child_named_before_or_after_its_parent_draws_is_the_same(
    drawn: Callable[[SecretRng], object],
) -> None:
    rng = SecretRng.simulated(PublicSeed(9))
    early = rng.child("a")
    drawn(rng)
    assert drawn(early) == drawn(rng.child("a"))


@pytest.mark.parametrize("drawn_before", [0, 3], ids=["untouched", "in the middle of its stream"])
@pytest.mark.parametrize("parent_first", [True, False])
def test_forks_and_their_parent_all_have_streams_of_their_own(
    drawn_before: int, parent_first: bool
) -> None:
    rng, named = SecretRng.from_system(), SecretRng.from_system().child("named before the fork")
    for each in (rng, named):
        if drawn_before:
            noise(each, drawn_before)

    def both() -> Tensor:
        return torch.cat([noise(rng, 8), noise(named, 8), noise(rng, 8), noise(rng.child("x"), 8)])

    own = [both()] if parent_first else []
    streams = [in_a_fork(both), in_a_fork(lambda: in_a_fork(both)), in_a_fork(both)]
    drawn = torch.cat([*own, *streams, both()])
    assert len(drawn) == 32 * (4 + parent_first)
    assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("drawn_before", [0, 3])
def test_a_fork_asks_the_system_once_and_then_has_one_stream(
    drawn_before: int, asked_of_the_system: list[int]
) -> None:
    rng = SecretRng.from_system()
    if drawn_before:
        noise(rng, drawn_before)

    def how_often() -> Tensor:
        asked_of_the_system.clear()
        for _ in range(3):
            noise(rng, 2)
        return torch.tensor(asked_of_the_system, dtype=torch.float64)

    assert in_a_fork(how_often).tolist() == [32.0]


def test_a_simulated_generator_goes_on_in_a_fork_where_it_was() -> None:
    rng = SecretRng.simulated(PublicSeed(4))
    noise(rng, 5)
    assert torch.equal(in_a_fork(lambda: noise(rng, 16)), noise(rng, 16))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for rng in (SecretRng.from_system(), SecretRng.simulated(PublicSeed(1)).child("x")):
        noise(rng, 10)
        rng.chosen(3, 3, 0.5)
        rng.permutation(5)
        rng.integer()
    PublicSeed(1).generator()
    PublicSeed(1).numpy().random()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


# ---- the law of what is drawn --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_unit_scale_and_the_test_would_see_three_percent(seed: int) -> None:
    draws = (
        SecretRng.simulated(PublicSeed(seed)).grid_noise_(torch.empty(DRAWS)).to(torch.float64)
        / SCALE
    )
    assert scale_is_one(draws)
    assert not scale_is_one(0.97 * draws)
    assert not scale_is_one(1.03 * draws)


def test_noise_is_normal_in_its_tails_too() -> None:
    draws = noise(SecretRng.simulated(PublicSeed(12)))
    assert abs(draws.mean().item()) < 4 / math.sqrt(DRAWS)
    for threshold in (1.0, 2.0, 3.0):
        expected = math.erfc(threshold / math.sqrt(2))
        error = math.sqrt(expected * (1 - expected) / DRAWS)
        assert abs((draws.abs() > threshold).double().mean().item() - expected) < 4 * error


def test_noise_is_drawn_in_place_into_a_tensor_of_any_shape() -> None:
    out = torch.zeros(3, 4)
    assert SecretRng.from_system().grid_noise_(out) is out
    assert (out != 0).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("round", 1, "client", "a"), ("round", 1, "client", "b")),
        (("round", 1, "client", "a"), ("round", 2, "client", "a")),
        (("stage", 0), ("stage", 1)),
        (("layer", 10), ("layer", 11)),
        ((), ("work",)),
    ],
    ids=["clients", "rounds", "stages", "layers", "parent and child"],
)
def test_streams_of_different_children_are_uncorrelated(
    one: tuple[str | int, ...], other: tuple[str | int, ...]
) -> None:
    root = SecretRng.simulated(PublicSeed(21))
    left = noise(root.child(*one) if one else SecretRng.simulated(PublicSeed(21)))
    right = noise(root.child(*other))
    for shifted in (right, right.roll(1), right.abs()):
        correlation = torch.corrcoef(torch.stack([left, shifted]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(DRAWS)


def test_successive_blocks_of_one_stream_are_uncorrelated() -> None:
    rng = SecretRng.simulated(PublicSeed(22))
    blocks = torch.stack([noise(rng, 20_000) for _ in range(4)])
    off_diagonal = torch.corrcoef(blocks) - torch.eye(4, dtype=torch.float64)
    assert off_diagonal.abs().max().item() < 4 / math.sqrt(20_000)


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.016, 0.5, 0.999, 1.0])
def test_coins_fall_as_often_as_the_rate_says(rate: float) -> None:
    coins = SecretRng.simulated(PublicSeed(5)).chosen(200, 1000, rate)
    error = math.sqrt(max(rate * (1 - rate), 1e-12) / coins.numel())
    assert abs(coins.double().mean().item() - rate) <= 5 * error


def test_noise_and_coins_of_one_generator_do_not_share_a_stream() -> None:
    key = b"k" * 32
    streams = [keystream(key, purpose).update(bytes(64)) for purpose in range(6)]
    assert len(set(streams)) == 6


def test_a_permutation_holds_everything_once() -> None:
    order = SecretRng.from_system().permutation(50)
    assert sorted(order.tolist()) == list(range(50))


def test_integers_use_most_of_their_sixty_two_bits() -> None:
    rng = SecretRng.simulated(PublicSeed(6))
    values = [rng.integer() for _ in range(200)]
    assert len(set(values)) == 200
    for bit in range(62):
        assert 50 < sum(value >> bit & 1 for value in values) < 150
