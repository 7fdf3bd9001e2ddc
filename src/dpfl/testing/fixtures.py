"""What the laws are tried on: a small layout, terms, a cohort, and hostile vectors."""

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Claims, Cohort, Terms, Who

LAYOUT = Layout.of(
    {
        "body.weight": torch.zeros(4, 3),
        "body.bias": torch.zeros(4),
        "head.weight": torch.zeros(2, 4),
        "head.bias": torch.zeros(2),
    }
)
TERMS = Terms(
    rounds=5,
    population=8,
    expected_cohort=4.0,
    participations=3,
    smallest_epsilon=0.5,
    largest_epsilon=8.0,
    parameters=LAYOUT.size,
    noise_multiplier=1.3,
    public=("c0", "c1"),
)
_ODD = st.sampled_from(
    [0.0, -0.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan")]
)
_NUMBER = st.floats(-100, 100, width=32)


def _vectors(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    return st.lists(numbers, min_size=LAYOUT.size, max_size=LAYOUT.size).map(torch.tensor)


VECTOR = _vectors(_NUMBER) | _vectors(_NUMBER | _ODD)
"""Half of them ordinary: among odd numbers alone, hardly a vector would stay finite."""

SEED = st.integers(0, 2**64 - 1).map(PublicSeed)


def always(law: Callable[..., None]) -> None:
    """Try a law on what Hypothesis finds; an AssertionError names the counterexample."""
    settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )(law)()


def a_client(drawn: int = 4) -> Who:
    """A client that a stage acts for."""
    return Who(id="a", claims=Claims(epsilon=1.0, delta=1e-5, examples=10), drawn=drawn)


def cohort_of(size: int) -> Cohort:
    """A cohort of clients that claim different things."""
    return Cohort.of(
        {f"c{i}": Claims(epsilon=0.5 + i, delta=1e-5, examples=10 + i) for i in range(size)}
    )


def std_ratio(plug: object, noise: Tensor, stated: float) -> None:
    """The std of some 200,000 numbers is the one stated, within 2 %."""
    ratio = float(noise.double().std()) / stated
    assert 0.98 < ratio < 1.02, f"{plug} adds {ratio:.3f} times the noise that it states"
