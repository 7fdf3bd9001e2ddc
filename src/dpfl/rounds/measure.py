"""An accounted evaluation: a client's answer, and what the server makes of the answers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpfl.core.grid import Grid
from dpfl.core.random import SecretRng
from dpfl.engine.process import one_thread
from dpfl.engine.trace import channels_last
from dpfl.models.checks import in_mode, outputs_of
from dpfl.plugs.measures import Estimate, Measure
from dpfl.rounds.members import Member

_RECORDS_AT_ONCE = 512


@one_thread()
def measured_answer(
    measure: Measure, models: Sequence[nn.Module], member: Member, std: float, rng: SecretRng
) -> Tensor:
    """One client's noisy sums over its test records, one row per model.

    *Formal guarantees.* Every record's statistic is computed on its own and lies in the unit ball
    for each model; sums are exact. They are rounded onto the grid of the noise, and noise of
    ``std`` is added there.
    """
    totals = torch.stack([_total(measure, model, member) for model in models])
    return Grid.of(std).noised(totals, rng)


def _total(measure: Measure, model: nn.Module, member: Member) -> Tensor:
    """The exact sum of the statistics of a client's test records."""
    shard, parameters = member.shard, dict(model.named_parameters())
    parts = shard.test_features, shard.test_labels
    total = torch.zeros(measure.numbers, dtype=torch.float64)
    with torch.no_grad(), in_mode(model, training=False):
        batches = (torch.split(part, _RECORDS_AT_ONCE) for part in parts)
        for features, targets in zip(*batches, strict=True):
            batch = channels_last(member.inputs(features))
            outputs = member.task.outputs(lambda x: outputs_of(model, parameters, x), batch)
            total += measure.summed(member.task, outputs, targets)
    return total


def records_of(member: Member) -> int:
    """How many test records a client has: a public number."""
    return len(member.shard.test_labels)


def pooled(
    measure: Measure, answers: Mapping[str, Tensor], stds: Mapping[str, float], records: int
) -> Estimate:
    """The value over all test records of those who answered, from one row of each.

    Sums add up whatever their noise: the value means the same for any budgets.
    """
    total = torch.stack([answers[client] for client in sorted(answers)]).sum(dim=0)
    variance = sum(stds[client] ** 2 for client in answers)
    return measure.estimate(total, variance, records)
