"""Checks of numbers: what is not finite is refused, whatever type it has."""

from typing import Any

import numpy as np
import pytest

from dpfl.core.checks import finite, not_negative, positive, share, whole_number
from dpfl.core.errors import ConfigurationError
from dpfl.core.types import Budget, Claims

INFINITE = [np.float16("inf"), np.float32("inf"), np.float64("inf"), np.longdouble("inf")]
NOT_FINITE: list[Any] = [*INFINITE, float("inf"), float("nan"), np.float32("nan"), 10**400]


@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_is_not_finite_is_refused_of_every_type(value: Any) -> None:
    assert not finite(value)
    for one in (positive, not_negative, share):
        with pytest.raises(ConfigurationError, match="given = "):
            one("here", given=value)
    with pytest.raises(ConfigurationError, match="given = "):
        whole_number("here", "given", value)
    with pytest.raises(ConfigurationError):
        Budget(epsilon=value, delta=1e-5)
    assert not Claims(epsilon=value, delta=1e-5, examples=10).usable


@pytest.mark.parametrize("value", [1, 1.0, np.float16(1.0), np.float32(1.0), np.int64(1)])
def test_finite_numbers_pass_of_every_type(value: Any) -> None:
    assert finite(value)
    positive("here", given=value)
    not_negative("here", given=value)
    share("here", given=value)
    assert whole_number("here", "given", value) == 1
    assert Claims(epsilon=value, delta=1e-5, examples=10).usable


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="given = "):
        positive("here", given=value)
