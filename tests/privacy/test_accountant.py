"""Every epsilon is an upper bound, and the reference values are met."""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from scipy import optimize, special

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.types import Adjacency
from dpfl.privacy.accountant import _with_sampler, epsilon, quick_epsilon, shown, spend
from dpfl.privacy.events import Event

GOLDEN = Path(__file__).parent.parent / "golden" / "epsilon.csv"
ACCOUNTANTS = {
    "dp_accounting.PLD pessimistic disc=1e-4": "pld",
    "analytic_gaussian": "pld",
    "dp_accounting.RDP improved default_orders": "rdp",
    "dp_accounting.RDP WBK19-Thm27 improved default_orders": "rdp",
}
ADD_REMOVE, ZERO_OUT, REPLACE_ONE = Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def analytic_gaussian(mu: float, delta: float) -> float:
    """Exact epsilon of a Gaussian release with sensitivity / std = mu (Balle and Wang 2018, Theorem
    8).
    """

    def excess(value: float) -> float:
        first = special.ndtr(mu / 2 - value / mu)
        return float(first - math.exp(value + special.log_ndtr(-mu / 2 - value / mu)) - delta)

    return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, 500.0, xtol=1e-12))


@functools.cache
def golden_rows() -> tuple[dict[str, str], ...]:
    with GOLDEN.open(newline="") as stream:
        return tuple(csv.DictReader(stream))


def golden_event(row: dict[str, str]) -> Event:
    fixed = row["sampling"] == "wor"
    rate = (
        int(row["sample_size"]) / int(row["population"]) if fixed else float(row["sampling_rate"])
    )
    return Event(
        noise_multiplier=float(row["noise_multiplier_z"]),
        sampling="uniform" if fixed else "poisson",
        sampling_rate=rate,
        steps=int(row["rounds_T"]),
    )


COMPUTED = [row for row in golden_rows() if row["accountant"] in ACCOUNTANTS]
LOWER = [row for row in golden_rows() if row["role"].startswith(("lower_bound", "lower estimate"))]


def row_id(row: dict[str, str]) -> str:
    return f"{row['config_id']}-{row['adjacency']}-{row['accountant'].replace(' ', '_')}"


# ---- reference values ----------------------------------------------------------------------------


def test_the_reference_file_holds_what_these_tests_rest_on() -> None:
    assert len(COMPUTED) >= 122
    assert sum(row["role"].startswith("lower_bound") for row in LOWER) >= 9
    assert sum(row["role"] == "lower estimate" for row in LOWER) >= 70
    assert {row["adjacency"] for row in COMPUTED} == {"add_remove", "replace_one"}


@pytest.mark.parametrize("row", COMPUTED, ids=row_id)
def test_epsilon_agrees_with_the_reference(row: dict[str, str]) -> None:
    event = golden_event(row)
    found = epsilon(
        event.noise_multiplier,
        event.sampling_rate,
        event.steps,
        float(row["delta"]),
        sampling=event.sampling,
        adjacency=row["adjacency"],
        accountant=ACCOUNTANTS[row["accountant"]],
    )
    assert found == pytest.approx(float(row["epsilon"]), abs=1e-3)


@pytest.mark.parametrize("row", LOWER, ids=row_id)
def test_what_is_reported_is_never_below_a_lower_bound(row: dict[str, str]) -> None:
    found = spend((golden_event(row),), float(row["delta"]), adjacency=Adjacency(row["adjacency"]))
    assert found.epsilon >= float(row["epsilon"]) - 1e-6  # the file keeps six decimals


@pytest.mark.parametrize(
    "row", [row for row in LOWER if row["role"].startswith("lower_bound")], ids=row_id
)
def test_the_quick_bound_is_never_below_an_attained_lower_bound(row: dict[str, str]) -> None:
    found = quick_epsilon(
        (golden_event(row),), float(row["delta"]), adjacency=Adjacency(row["adjacency"])
    )
    assert found >= float(row["epsilon"])


# ---- laws over random mechanisms -----------------------------------------------------------------


def random_mechanisms(count: int, seed: int) -> list[tuple[float, float, int, float]]:
    """(noise, rate, steps, delta), with noise high enough that each evaluation takes well under a
    second.
    """
    random = np.random.default_rng(seed)
    return [
        (
            round(float(random.uniform(1.2, 4.0)), 3),
            round(float(10 ** random.uniform(-2.5, -0.3)), 4),
            int(10 ** random.uniform(0.5, 3)),
            float(10.0 ** random.integers(-7, -3)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), random_mechanisms(8, seed=1))
def test_rdp_is_never_below_pld(noise: float, rate: float, steps: int, delta: float) -> None:
    tight = epsilon(noise, rate, steps, delta, accountant="pld")
    loose = epsilon(noise, rate, steps, delta, accountant="rdp")
    assert loose >= tight - 1e-3
    assert epsilon(noise, rate, steps, delta) == tight


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), random_mechanisms(5, seed=2))
def test_more_noise_costs_less_and_more_steps_more_data_or_a_smaller_delta_cost_more(
    noise: float, rate: float, steps: int, delta: float
) -> None:
    base = epsilon(noise, rate, steps, delta)
    assert epsilon(noise * 1.3, rate, steps, delta) < base
    assert epsilon(noise, rate, steps * 2, delta) > base
    assert epsilon(noise, rate * 1.3, steps, delta) > base
    assert epsilon(noise, rate, steps, delta / 10) > base


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), random_mechanisms(4, seed=3))
def test_replacing_costs_more_than_leaving_out(
    noise: float, rate: float, steps: int, delta: float
) -> None:
    left_out = epsilon(noise, rate, steps, delta)
    assert epsilon(noise, rate, steps, delta, adjacency=ZERO_OUT) == left_out
    assert epsilon(noise, rate, steps, delta, adjacency=REPLACE_ONE) >= left_out - 1e-6


@pytest.mark.parametrize("sampling", ["poisson", "none"])
@pytest.mark.parametrize(
    ("noise", "steps", "delta"),
    [(1.0, 1, 1e-5), (4.0, 10, 1e-6), (20.0, 300, 1e-4), (3.0, 2, 1e-8)],
)
@pytest.mark.parametrize(
    ("adjacency", "sensitivity"), [(ADD_REMOVE, 1.0), (ZERO_OUT, 1.0), (REPLACE_ONE, 2.0)]
)
def test_without_sampling_epsilon_is_that_of_the_analytic_gaussian(
    noise: float, steps: int, delta: float, adjacency: Adjacency, sensitivity: float, sampling: str
) -> None:
    exact = analytic_gaussian(sensitivity * math.sqrt(steps) / noise, delta)
    tight = epsilon(
        noise, 1.0, steps, delta, sampling=sampling, adjacency=adjacency, accountant="pld"
    )
    assert exact - 1e-9 <= tight <= exact + 1e-3
    loose = epsilon(
        noise, 1.0, steps, delta, sampling=sampling, adjacency=adjacency, accountant="rdp"
    )
    assert exact <= loose <= 1.3 * exact + 0.5


@pytest.mark.parametrize("noise", [1.0, 5.0])
def test_a_fixed_size_sample_of_everyone_is_no_sample(noise: float) -> None:
    whole = epsilon(noise, 1.0, 3, 1e-5, sampling="uniform", adjacency=REPLACE_ONE)
    assert whole == epsilon(noise, 1.0, 3, 1e-5, sampling="none", adjacency=REPLACE_ONE)
    assert whole >= analytic_gaussian(2 * math.sqrt(3) / noise, 1e-5)


@given(st.floats(0.6, 5.0), st.floats(0.005, 0.5), st.integers(1, 60))
@settings(max_examples=4)
def test_a_fixed_size_sample_lies_between_an_attained_pair_and_the_moments_bound(
    noise: float, rate: float, steps: int
) -> None:
    """Replacing one unit by another is at least as telling as Poisson samples of a sum that moves
    by two clips.
    """
    plan = {"delta": 1e-5, "sampling": "uniform", "adjacency": REPLACE_ONE}
    found = epsilon(noise, rate, steps, **plan)  # type: ignore[arg-type]
    attained = epsilon(noise / 2, rate, steps, 1e-5)  # pessimistic itself, by less than the slack
    assert (
        attained * 0.995 - 2e-3
        <= found
        <= epsilon(noise, rate, steps, **plan, accountant="rdp") + 1e-3
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "expected", "lower"),
    [
        (1.0, 0.05, 200, 2000**-1.1, 22.308614, 19.815618),
        (1.5, 0.05, 200, 2000**-1.1, 8.053369, 6.971155),
        (1.0, 0.1, 100, 1e-3, 25.391196, 22.564065),
        (1.0, 0.01, 500, 1e-5, 11.046332, 10.257791),
        (2.693446, 0.05, 30, 0.000501187233627272, 0.819038, 0.749706),
    ],
)
def test_fixed_size_samples_cost_what_an_independent_computation_found(
    noise: float, rate: float, steps: int, delta: float, expected: float, lower: float
) -> None:
    found = epsilon(
        noise, rate, steps, delta, sampling="uniform", adjacency=REPLACE_ONE, accountant="pld"
    )
    assert found == pytest.approx(expected, abs=1e-3)
    assert found > lower


@pytest.mark.parametrize(("noise", "delta"), [(2.0, 1e-9), (2.0, 1e-12), (0.05, 1e-5)])
def test_fixed_size_samples_have_a_tighter_bound_than_rdp_at_very_small_deltas_and_noise(
    noise: float, delta: float
) -> None:
    event = Event(noise_multiplier=noise, sampling="uniform", sampling_rate=0.1, steps=3)
    tight = spend((event,), delta, adjacency=REPLACE_ONE)
    loose = spend((event,), delta, adjacency=REPLACE_ONE, accountant="rdp")
    assert (tight.accountant, loose.accountant) == ("PLD", "RDP")
    assert epsilon(noise / 2, 0.1, 3, delta) * 0.999 <= tight.epsilon <= loose.epsilon


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, ZERO_OUT, REPLACE_ONE])
def test_poisson_samples_keep_their_accountant_at_very_small_deltas(adjacency: Adjacency) -> None:
    event = Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.1, steps=10)
    assert spend((event,), 1e-9, adjacency=adjacency).accountant == "PLD"


@pytest.mark.parametrize("rate", [1 / 3, 0.1, 1e-9, 0.12345678912345, 0.4999999999])
def test_a_fixed_size_sample_is_never_billed_as_a_smaller_one(rate: float) -> None:
    """The accountant wants whole numbers: rounding the rate must not round it down."""
    found = epsilon(2.0, rate, 5, 1e-5, sampling="uniform", adjacency=REPLACE_ONE)
    smaller = epsilon(
        2.0, math.floor(rate * 10**6) / 10**6, 5, 1e-5, sampling="uniform", adjacency=REPLACE_ONE
    )
    assert found >= smaller


def test_rdp_under_replace_one_uses_the_doubled_sensitivity() -> None:
    """dp-accounting 0.6.0 alone says 4.73 here; the exact value is 9.997."""
    found = epsilon(1.0, 1.0, 1, 1e-5, sampling="none", adjacency=REPLACE_ONE, accountant="rdp")
    assert found >= 9.9
    assert epsilon(1.0, 1.0, 1, 1e-5, sampling="none", accountant="rdp") == pytest.approx(
        4.7285, abs=1e-3
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [2.0, 5.0])
def test_replace_one_is_add_remove_with_half_the_noise(noise: float, accountant: str) -> None:
    doubled = epsilon(
        noise, 1.0, 4, 1e-5, sampling="none", adjacency=REPLACE_ONE, accountant=accountant
    )
    assert doubled == pytest.approx(
        epsilon(noise / 2, 1.0, 4, 1e-5, sampling="none", accountant=accountant), abs=1e-4
    )


# ---- refusals and limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "adjacency", "accountant"),
    [
        ("uniform", ADD_REMOVE, None),
        ("uniform", ADD_REMOVE, "rdp"),
        ("uniform", ADD_REMOVE, "pld"),
        ("uniform", ZERO_OUT, None),
        ("uniform", ZERO_OUT, "rdp"),
        ("poisson", REPLACE_ONE, "rdp"),
        ("poisson", REPLACE_ONE, "renyi"),
        ("uniform", ADD_REMOVE, "renyi"),
    ],
)
def test_a_combination_without_a_proof_is_refused(
    sampling: str, adjacency: Adjacency, accountant: str | None
) -> None:
    with pytest.raises(PrivacyRefusal) as caught:
        epsilon(1.0, 0.1, 10, 1e-5, sampling=sampling, adjacency=adjacency, accountant=accountant)
    assert caught.value.remedy


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 1.5, math.nan])
def test_a_delta_outside_the_open_unit_interval_is_refused(delta: float) -> None:
    event = Event(noise_multiplier=1.0)
    for ask in (spend, quick_epsilon):
        with pytest.raises(ConfigurationError, match="delta"):
            ask((event,), delta, adjacency=ADD_REMOVE)


@pytest.mark.parametrize("sampling", ["none", "poisson", "uniform"])
def test_no_noise_is_infinite(sampling: str) -> None:
    nothing = Event(noise_multiplier=0.0, sampling=sampling, sampling_rate=1.0)
    much = Event(noise_multiplier=100.0)
    for history in ((nothing,), (much, nothing)):
        found = spend(history, 1e-5, adjacency=REPLACE_ONE)
        assert found.epsilon == math.inf
        assert "not private" in found.accountant
        assert quick_epsilon(history, 1e-5, adjacency=REPLACE_ONE) == math.inf


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_zero_steps_and_an_empty_history_cost_nothing(noise: float) -> None:
    for history in ((), (Event(noise_multiplier=noise, steps=0),)):
        assert spend(history, 1e-5, adjacency=ADD_REMOVE).epsilon == 0.0
        assert quick_epsilon(history, 1e-5, adjacency=ADD_REMOVE) == 0.0


@pytest.mark.parametrize("noise", [1.0, 0.0])
@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_a_sampling_rate_of_zero_costs_nothing_whatever_the_noise(
    noise: float, sampling: str
) -> None:
    history = (Event(noise_multiplier=noise, sampling=sampling, sampling_rate=0.0, steps=7),)
    assert spend(history, 1e-5, adjacency=REPLACE_ONE).epsilon == 0.0
    assert quick_epsilon(history, 1e-5, adjacency=REPLACE_ONE) == 0.0


def test_the_probability_of_a_failed_clip_is_taken_out_of_delta() -> None:
    event = Event(noise_multiplier=3.0, steps=4, failure=1e-6)
    found = spend((event,), 1e-5, adjacency=ADD_REMOVE)
    assert found.delta == 1e-5
    assert found.epsilon == pytest.approx(epsilon(3.0, 1.0, 4, 6e-6, sampling="none"), abs=1e-6)
    assert (
        found.epsilon >= analytic_gaussian(2 / 3.0, 6e-6) > analytic_gaussian(2 / 3.0, 1e-5) + 1e-3
    )
    assert quick_epsilon((event,), 1e-5, adjacency=ADD_REMOVE) >= found.epsilon


@pytest.mark.parametrize("steps", [10, 11, 1000])
def test_failures_that_eat_all_of_delta_leave_no_guarantee(steps: int) -> None:
    history = (Event(noise_multiplier=50.0, steps=steps, failure=1e-6),)
    assert spend(history, 1e-5, adjacency=ADD_REMOVE).epsilon == math.inf


def test_samples_of_both_kinds_compose_as_one_and_not_by_adding_up() -> None:
    fixed = Event(noise_multiplier=4.0, sampling="uniform", sampling_rate=0.1, steps=20)
    poisson = Event(noise_multiplier=3.0, sampling="poisson", sampling_rate=0.05, steps=30)
    whole = Event(noise_multiplier=30.0, steps=2)
    found = spend((fixed, poisson, whole), 1e-5, adjacency=REPLACE_ONE)
    parts = [
        spend((event,), 1e-5, adjacency=REPLACE_ONE).epsilon for event in (fixed, poisson, whole)
    ]
    assert found.accountant == "PLD"
    assert max(parts) < found.epsilon < 0.9 * sum(parts)
    for name in ("rdp", "renyi"):
        with pytest.raises(PrivacyRefusal, match="Poisson samples under replace_one"):
            spend((fixed, poisson), 1e-5, adjacency=REPLACE_ONE, accountant=name)


def test_one_accountant_reads_a_whole_history_where_one_can() -> None:
    """Adding up the parts' epsilons would be a much worse bound."""
    one = Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.05, steps=40)
    other = Event(noise_multiplier=5.0, steps=3)
    found = spend((one, other), 1e-5, adjacency=ADD_REMOVE)
    parts = [spend((event,), 1e-5, adjacency=ADD_REMOVE).epsilon for event in (one, other)]
    assert found.accountant == "PLD"
    assert max(parts) < found.epsilon < 0.9 * sum(parts)


def test_order_and_grouping_of_a_history_do_not_matter() -> None:
    one, other = Event(noise_multiplier=6.0), Event(noise_multiplier=9.0)
    a = spend((one, other, one, one), 1e-5, adjacency=ADD_REMOVE)
    b = spend((other, one.times(3)), 1e-5, adjacency=ADD_REMOVE)
    assert a == b
    assert a.epsilon == pytest.approx(analytic_gaussian(math.sqrt(3 / 36 + 1 / 81), 1e-5), abs=1e-3)


# ---- quick bounds --------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
@pytest.mark.parametrize(
    "history",
    [
        (Event(noise_multiplier=1.5, sampling="poisson", sampling_rate=0.02, steps=100),),
        (Event(noise_multiplier=30.0, sampling="poisson", sampling_rate=0.3, steps=800),),
        (Event(noise_multiplier=5.0, steps=10),),
        (Event(noise_multiplier=200.0, steps=50),),
        (
            Event(noise_multiplier=2.0, sampling="poisson", sampling_rate=0.001, steps=500),
            Event(noise_multiplier=8.0),
        ),
    ],
    ids=["subsampled", "much noise", "whole", "tiny", "mixed"],
)
def test_the_quick_bound_is_a_bound_and_not_far_off(
    history: tuple[Event, ...], adjacency: Adjacency
) -> None:
    fine = spend(history, 1e-5, adjacency=adjacency).epsilon
    quick = quick_epsilon(history, 1e-5, adjacency=adjacency)
    assert fine - 1e-6 <= quick <= 1.02 * fine


def test_very_little_noise_gives_a_number_without_exhausting_memory() -> None:
    """At 1e-4 the losses of this step would need half a billion points."""
    found = epsilon(0.02, 0.01, 2, 1e-5)
    assert found > 1000


@pytest.mark.parametrize("noise", [1e-5, 1e-100, 1e-200])
def test_next_to_no_noise_gives_a_bound_and_no_crash(noise: float) -> None:
    history = (Event(noise_multiplier=noise, sampling="poisson", sampling_rate=0.01, steps=2),)
    assert spend(history, 1e-5, adjacency=ADD_REMOVE).epsilon > 1000
    assert quick_epsilon(history, 1e-5, adjacency=ADD_REMOVE) > 1000


# ---- shown to people -----------------------------------------------------------------------------


@given(st.floats(0, 1e6), st.integers(0, 6))
@example(1.0000000001, 3)
@example(0.1 + 0.2, 3)
@example(1.1, 3)
@example(5e-324, 3)
def test_what_is_shown_is_never_below_what_was_computed(value: float, digits: int) -> None:
    text = shown(value, digits)
    assert float(text) >= value
    assert float(text) <= value + 10.0**-digits * (1 + 1e-6)
    small = digits >= 2 and 0 < value < 10 ** (
        1 - digits
    )  # shown to two figures, down to a billionth
    assert len(text.partition(".")[2]) == (
        min(9, 1 - math.floor(math.log10(value))) if small else digits
    )
    assert not small or value < 1e-8 or float(text) <= 1.11 * value


@given(st.integers(0, 10**7))
def test_a_value_that_has_only_the_digits_shown_is_shown_as_it_is(thousandths: int) -> None:
    """Rounding up must not turn 1.1 into 1.101 over the last bit of a binary fraction."""
    text = shown(thousandths / 1000)
    assert float(text) == thousandths / 1000
    assert thousandths < 10 or text == f"{thousandths / 1000:.3f}"


def test_an_infinite_epsilon_is_shown_in_words() -> None:
    assert shown(math.inf) == "infinite"


def test_a_delta_below_what_the_curves_can_carry_is_refused() -> None:
    with pytest.raises(PrivacyRefusal, match="1e-12"):
        epsilon(10.0, 1.0, 400, 1e-13, sampling="none")
    assert math.isfinite(epsilon(10.0, 1.0, 400, 1e-12, sampling="none"))


# ---- the noise sampler's own distance to the ideal law -------------------------------------------


SAMPLED = Event(noise_multiplier=1.1, sampling="poisson", sampling_rate=0.02, steps=300)
HISTORIES = [
    (SAMPLED,),
    (Event(noise_multiplier=5.0, steps=9),),
    (SAMPLED, Event(noise_multiplier=9.0)),
]


def drawing(history: tuple[Event, ...], numbers: int) -> tuple[Event, ...]:
    return tuple(replace(event, numbers=numbers) for event in history)


@pytest.mark.parametrize("history", HISTORIES, ids=["sampled", "whole", "mixed"])
@pytest.mark.parametrize("numbers", [1, 7850, 10**9])
def test_the_sampler_is_charged_by_its_formula(history: tuple[Event, ...], numbers: int) -> None:
    """The ideal curve at delta' holds epsilon', and epsilon' + 1e-7 with all of delta is what is
    reported.
    """
    delta = 1e-5
    found = spend(drawing(history, numbers), delta, adjacency=ADD_REMOVE).epsilon
    drawn = numbers * sum(event.steps for event in history)
    ideal_delta = (delta - (1 + math.exp(found)) * (1.53e-23 * drawn + 1e-16)) * math.exp(-5e-8)
    needed = spend(history, ideal_delta, adjacency=ADD_REMOVE).epsilon + 1e-7
    assert needed - 1e-9 <= found <= needed + 1e-4
    assert found > spend(history, delta, adjacency=ADD_REMOVE).epsilon


def test_the_sampler_is_charged_once_for_the_whole_history() -> None:
    many = [Event(noise_multiplier=9.0 + i / 8, steps=1, numbers=100) for i in range(8)]
    ideal = spend([replace(event, numbers=0) for event in many], 1e-5, adjacency=ADD_REMOVE).epsilon
    assert spend(many, 1e-5, adjacency=ADD_REMOVE).epsilon == pytest.approx(ideal + 1e-7, abs=2e-8)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "renyi"])
def test_every_accountant_charges_the_sampler(accountant: str) -> None:
    ideal = spend((SAMPLED,), 1e-5, adjacency=ADD_REMOVE, accountant=accountant).epsilon
    assert (
        spend(drawing((SAMPLED,), 10**6), 1e-5, adjacency=ADD_REMOVE, accountant=accountant).epsilon
        > ideal
    )


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (
            Event(noise_multiplier=30.0, steps=10**4, numbers=10**8 + 1),
            1e-3,
        ),  # more than 1e12 numbers
        (
            Event(noise_multiplier=30.0, steps=10**2, numbers=10**7),
            1e-12,
        ),  # more than a tenth of delta
        (Event(noise_multiplier=0.17, numbers=1), 1e-5),  # epsilon above 40
    ],
    ids=["numbers", "delta", "epsilon"],
)
def test_where_the_sampler_would_take_too_much_there_is_no_guarantee(
    event: Event, delta: float
) -> None:
    assert math.isfinite(spend((replace(event, numbers=0),), delta, adjacency=ADD_REMOVE).epsilon)
    assert spend((event,), delta, adjacency=ADD_REMOVE).epsilon == math.inf


def test_ideal_noise_is_not_charged_for_a_sampler() -> None:
    assert spend((SAMPLED,), 1e-5, adjacency=ADD_REMOVE).epsilon == epsilon(1.1, 0.02, 300, 1e-5)


# ---- caches --------------------------------------------------------------------------------------


def test_no_epsilon_touches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DPFL_CACHE", str(folder))
    _with_sampler.cache_clear()
    event = Event(noise_multiplier=1.3, sampling="poisson", sampling_rate=0.03, steps=77)
    epsilon(1.3, 0.03, 77, 1e-5)
    spend((event,), 1e-5, adjacency=REPLACE_ONE)
    quick_epsilon((event,), 1e-5, adjacency=ADD_REMOVE)
    assert not folder.exists()
