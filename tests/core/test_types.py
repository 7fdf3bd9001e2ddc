"""The nouns of a round refuse what cannot be."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, strategies as st

from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.types import Budget, Claims, ClientSettings, Cohort, Observer, Phase, Rows, Unit

ANYONE = Claims(epsilon=1.0, delta=1e-5, examples=10)
WHOLE = st.none() | st.integers(1, 100)


# ---- Budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0])
def test_a_budget_refuses_an_epsilon_that_is_no_positive_finite_number(epsilon: float) -> None:
    with pytest.raises(ConfigurationError, match="epsilon"):
        Budget(epsilon=epsilon, delta=1e-5)


@pytest.mark.parametrize("delta", [math.nan, math.inf, -math.inf, 0.0, 1.0, -1e-5, 1.5])
def test_a_budget_refuses_a_delta_outside_the_open_unit_interval(delta: float) -> None:
    with pytest.raises(ConfigurationError, match="delta"):
        Budget(epsilon=1.0, delta=delta)


@given(st.floats(0, 1e300, exclude_min=True), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_budget_keeps_every_positive_epsilon_with_a_proper_delta(
    epsilon: float, delta: float
) -> None:
    budget = Budget(epsilon=epsilon, delta=delta, unit=Unit.RECORD, observer=Observer.SERVER)
    assert (budget.epsilon, budget.delta) == (epsilon, delta)


def test_a_budget_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(epsilon=1.0, delta=1e-5).epsilon = math.inf  # type: ignore[misc]


def test_no_field_that_decides_privacy_has_a_default() -> None:
    for missing in ({"epsilon": 1.0}, {"delta": 1e-5}):
        with pytest.raises(TypeError):
            Budget(**missing)


# ---- ClientSettings ------------------------------------------------------------------------------


def test_a_practice_refuses_both_steps_and_epochs() -> None:
    with pytest.raises(ConfigurationError, match="both given"):
        ClientSettings(local_steps=3, local_epochs=1)


@pytest.mark.parametrize("name", ["batch_size", "local_steps", "local_epochs"])
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf])
def test_a_practice_refuses_counts_that_are_not_whole_and_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ClientSettings(**{name: value})


@pytest.mark.parametrize("lr", [0.0, -0.1, math.nan, math.inf])
def test_a_practice_refuses_a_learning_rate_that_is_no_positive_number(lr: float) -> None:
    with pytest.raises(ConfigurationError, match="lr"):
        ClientSettings(lr=lr)


@st.composite
def client_settings(draw: st.DrawFn) -> ClientSettings:
    length = draw(st.sampled_from(["local_steps", "local_epochs"]))
    return ClientSettings(
        batch_size=draw(WHOLE), lr=draw(st.none() | st.floats(1e-6, 10)), **{length: draw(WHOLE)}
    )


@given(client_settings(), client_settings())
def test_an_own_practice_wins_and_the_default_fills_the_rest(
    own: ClientSettings, default: ClientSettings
) -> None:
    merged = own.over(default)
    assert merged.batch_size == (
        own.batch_size if own.batch_size is not None else default.batch_size
    )
    assert merged.lr == (own.lr if own.lr is not None else default.lr)
    own_length = (own.local_steps, own.local_epochs)
    expected = (
        own_length if own_length != (None, None) else (default.local_steps, default.local_epochs)
    )
    assert (merged.local_steps, merged.local_epochs) == expected


def test_own_steps_replace_default_epochs_instead_of_meeting_them() -> None:
    merged = ClientSettings(local_steps=5).over(
        ClientSettings(local_epochs=2, batch_size=8, lr=0.1)
    )
    assert merged == ClientSettings(local_steps=5, batch_size=8, lr=0.1)


# ---- Phase ---------------------------------------------------------------------------------------


def test_a_phase_refuses_noise_over_shuffled_batches() -> None:
    """Shuffled batches billed as Poisson samples: 1.95 claimed where at least 11 is true."""
    with pytest.raises(ConfigurationError, match="shuffle batches"):
        Phase(steps=1, batch_size=4, sampling="shuffle", lr=0.1, clip=1.0, noise_multiplier=1.0)


def test_a_phase_refuses_noise_without_a_clip() -> None:
    with pytest.raises(ConfigurationError, match="nothing is clipped"):
        Phase(steps=1, batch_size=4, sampling="poisson", lr=0.1, noise_multiplier=1.0)


def test_shuffled_batches_without_noise_and_poisson_ones_with_it_are_accepted() -> None:
    plain = Phase(steps=1, batch_size=4, sampling="shuffle", lr=0.1)
    private = Phase(
        steps=1, batch_size=4, sampling="poisson", lr=0.1, clip=1.0, noise_multiplier=1.0
    )
    assert plain.noise_multiplier == 0 and plain.clip is None
    assert private.noise_multiplier == 1.0


# ---- Cohort and rows -----------------------------------------------------------------------------


@given(st.lists(st.text(max_size=4), unique=True, max_size=8), st.randoms(use_true_random=False))
def test_a_cohort_is_sorted_by_id_however_it_was_gathered(ids: list[str], random: object) -> None:
    shuffled = list(ids)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one = Cohort.of(dict.fromkeys(ids, ANYONE))
    other = Cohort.of(dict.fromkeys(shuffled, ANYONE))
    assert one.ids == other.ids == tuple(sorted(ids))
    assert len(one) == len(ids)


@pytest.mark.parametrize("ids", [("b", "a"), ("a", "a")], ids=["unsorted", "twice"])
def test_a_cohort_in_another_order_or_with_a_client_twice_is_refused(ids: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="sorted and distinct"):
        Cohort(ids=ids, claims=dict.fromkeys(ids, ANYONE))


def test_a_cohort_does_not_change_with_the_mapping_it_was_made_from() -> None:
    claims = {"a": ANYONE}
    cohort = Cohort.of(claims)
    claims["b"] = ANYONE
    assert set(cohort.claims) == {"a"} and len(cohort) == 1


def test_rows_need_one_row_per_client() -> None:
    layout = Layout.of({"w": torch.zeros(2)})
    cohort = Cohort.of({"a": ANYONE, "b": ANYONE})
    with pytest.raises(ConfigurationError, match="3 rows for 2 clients"):
        Rows(matrix=torch.zeros(3, 2), origin=torch.zeros(2), cohort=cohort, layout=layout)
