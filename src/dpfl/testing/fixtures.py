"""What the laws are tried on: a small layout, terms, a cohort, and hostile vectors."""

from collections.abc import Callable
from functools import wraps

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Claims, Cohort, Terms, Who

_SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in _SHAPES.items()})
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
    denominator=7.5,
)
CLIENT = Who(id="a", claims=Claims(epsilon=1.0, delta=1e-5, examples=10), drawn=4)
_ODD = [0.0, -0.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), float("-inf"), float("nan")]
_NUMBER = st.floats(-100, 100, width=32)
_TRIALS = settings(
    max_examples=60, deadline=None, database=None, derandomize=True, report_multiple_bugs=False
)


def _vectors(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    return st.lists(numbers, min_size=LAYOUT.size, max_size=LAYOUT.size).map(torch.tensor)


VECTOR = _vectors(_NUMBER) | _vectors(_NUMBER | st.sampled_from(_ODD))
"""Half of them ordinary: among odd numbers alone, hardly a vector would stay finite."""

SEED = st.integers(0, 2**64 - 1).map(PublicSeed)


def always(*drawn: st.SearchStrategy[object]) -> Callable[[Callable[..., None]], None]:
    """Try the law below at once, on what Hypothesis draws.

    The text of its AssertionError has the counterexample: arguments that break the law again.
    """

    def try_law(law: Callable[..., None]) -> None:
        @wraps(law)
        def trial(**arguments: object) -> None:
            try:
                law(**arguments)
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                shown = ", ".join(
                    f"{name} = {value.tolist() if isinstance(value, Tensor) else value}"
                    for name, value in arguments.items()
                )
                raise AssertionError(f"{kind}{error}; counterexample: {shown}") from error

        _TRIALS(given(*drawn)(trial))()

    return try_law


def cohort(size: int) -> Cohort:
    """A cohort of clients that claim different things."""
    claims = [Claims(epsilon=0.5 + i, delta=1e-5, examples=10 + i) for i in range(size)]
    return Cohort.of({f"c{i}": claim for i, claim in enumerate(claims)})


def cohorts(least: int, most: int) -> st.SearchStrategy[Cohort]:
    """Cohorts of so many clients."""
    return st.integers(least, most).map(cohort)


def well_formed(plug: object, found: Tensor, shape: tuple[int, ...]) -> None:
    """A result has this shape, and is finite."""
    assert found.shape == shape, f"{plug} gives {tuple(found.shape)} numbers, not {shape}"
    assert bool(torch.isfinite(found).all()), f"{plug} gives numbers that are not finite"


def has_std(plug: object, noise: Tensor, stated: float) -> None:
    """The std of some 200,000 numbers is the one stated, within 2 %."""
    ratio = float(noise.double().std()) / stated
    assert 0.98 < ratio < 1.02, f"{plug} adds {ratio:.3f} times the noise that it states"
