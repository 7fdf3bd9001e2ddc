"""How much noise phases of local work leave in an update."""

from collections.abc import Sequence

from dpfl.core.phases import Phase
from dpfl.plugs.sampling import PoissonBatches, sampler


def noise_variance(phases: Sequence[Phase], examples: int, parameters: int) -> float:
    """Variance of the noise in an update, summed over its coordinates: p x (lr clip z / b)^2 x the
    sum over steps of :func:`step_responses` squared.

    Without momentum, weight decay and proximal term that is steps x lr^2 x p x (clip z / b)^2,
    Robust-HDP's Eq. 3 and 7. With a fixed expected batch size b it is exact for what DP-SGD adds;
    how later gradients change with the noise of earlier steps is left out, as in the paper.
    """
    total = 0.0
    for phase in phases:
        batches = sampler(phase, examples)
        size = batches.expected_size if isinstance(batches, PoissonBatches) else phase.batch_size
        std = phase.lr * phase.noise_multiplier * (phase.clip or 0.0) / size
        responses, kept = step_responses(phase)
        # products: a power that is too large would be an error, not infinite
        total = total * kept * kept + sum(h * h for h in responses) * parameters * std * std
    return total


def step_responses(phase: Phase) -> tuple[list[float], float]:
    """How far each step's gradient moves the weights by the end of a phase, in units of -lr, the
    last step first; and how much is left of a change of the weights that the phase begins with.

    The weights are a linear filter of the gradients (:class:`dpfl.core.phases.Phase`), so both
    follow from running it on one unit. Without momentum and pulls all of them are 1.

    >>> phase = Phase(steps=3, batch_size=8, sampling="poisson", lr=0.1, momentum=0.5)
    >>> step_responses(phase)
    ([1.0, 1.5, 1.75], 1.0)
    """
    pull = phase.weight_decay + phase.proximal
    lr = phase.lr
    if not (phase.momentum or pull):
        return [1.0] * phase.steps, 1.0
    responses = []
    w = 1.0
    m = 1.0
    for _ in range(phase.steps):
        responses.append(w)
        m = phase.momentum * m - pull * lr * w
        w += m
    kept = 1.0
    m = 0.0
    for _ in range(phase.steps):  # the start has changed as well, so only weight decay pulls at it
        m = phase.momentum * m + phase.weight_decay * kept + phase.proximal * (kept - 1)
        kept -= lr * m
    return responses, kept
