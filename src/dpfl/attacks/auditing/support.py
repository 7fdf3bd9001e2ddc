"""The support test: nothing that an adversary sees depends on data but through noisy integers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from dpfl.core.errors import ConfigurationError
from dpfl.models.preconditioning import linear_head
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method

HOLDS, NOT_RUN = "holds", "not run"


def support_test(
    method: Method, strategy: Strategy, fault: Callable[[], AbstractContextManager[Any]]
) -> str:
    """Run :func:`dpfl.testing.methods.check_releases` on a method, under a ``fault`` if there is
    one.

    Returned is :data:`HOLDS`, what is wrong, or :data:`NOT_RUN`: without Hypothesis (``pip install
    'dpfl[testing]'``), and for cohorts of more than its four clients. It has no statistical error:
    where the test fails, the epsilon of the method is infinite.
    """
    try:
        from dpfl.testing.methods import check_releases
    except ImportError:
        return NOT_RUN
    model = None
    if method.model is not None:
        model = linear_head(nn.Flatten(), 8, size=16, kind="images")
        strategy = strategy.for_model(model)
    try:
        with fault():
            check_releases(strategy, model=model)
    except AssertionError as error:
        return f"broken: {error}"
    except ConfigurationError:  # settings that four clients cannot have
        return NOT_RUN
    return HOLDS
