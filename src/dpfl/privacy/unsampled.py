"""Releases without sampling: the Gaussian-DP parameter that a budget allows, exactly."""

import math
from functools import lru_cache

from dpfl.core.types import Adjacency
from dpfl.privacy import accountant as bounds
from dpfl.privacy.accountant import AccountantName
from dpfl.privacy.calibrate import LADDER, calibrate, propose, proposed
from dpfl.privacy.events import Event


@lru_cache(maxsize=4096)
def unsampled_multiplier(
    epsilon: float, delta: float, accountant: AccountantName | None = None, numbers: int = 0
) -> float:
    """Least multiplier of one release without sampling, under zero-out adjacency, to nine digits.

    Its reciprocal is the Gaussian-DP parameter mu of a budget: any releases without sampling fit
    into the budget whose reciprocal squared multipliers add up to mu^2, however many they are.
    ``numbers`` is how many noise values all of them draw.

    >>> round(1 / unsampled_multiplier(1.0, 1e-5), 3)
    0.268
    """
    plan = {"sampling": "none", "adjacency": Adjacency.ZERO_OUT, "accountant": accountant}
    high = calibrate(epsilon, delta, 1.0, 1, numbers=numbers, **plan)  # type: ignore[arg-type]
    low = high / LADDER

    def enough(multiplier: float) -> bool:
        event = Event(noise_multiplier=multiplier, numbers=numbers)
        cost = bounds.spend([event], delta, adjacency=Adjacency.ZERO_OUT, accountant=accountant)
        return cost.epsilon <= epsilon

    question = (str(accountant), repr(epsilon), repr(delta), str(numbers))
    stored = proposed("unsampled", *question) or math.inf
    if low < stored <= high and enough(stored) and not enough(stored * (1 - 1e-9)):
        return stored
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    propose(high, "unsampled", *question)
    return high
