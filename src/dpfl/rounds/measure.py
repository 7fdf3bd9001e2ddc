"""An accounted evaluation: a client's answer, and what the server makes of the answers."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import LARGEST_RELEASE, Grid
from dpfl.core.random import SecretRng
from dpfl.core.threads import one_thread
from dpfl.core.types import Downlink, State
from dpfl.engine.trace import channels_last
from dpfl.models.checks import in_mode, outputs_of
from dpfl.models.per_record import rows_of
from dpfl.models.separation import as_written, mixing
from dpfl.plugs.accounted_metric import AccountedMetric
from dpfl.plugs.base import Participant
from dpfl.plugs.channels import Channel
from dpfl.plugs.measures import Accuracy, BinnedAuc, Estimate, MeanLoss, Measure, exact_sum
from dpfl.rounds.codec import encode_upload
from dpfl.rounds.enrol import Agreement, Run
from dpfl.rounds.members import Member
from dpfl.rounds.plans import Admission
from dpfl.rounds.release import write_buffers

_RECORDS_AT_ONCE = 512


@one_thread()
def measured_answer(
    measure: Measure,
    models: Sequence[nn.Module],
    member: Member,
    std: float,
    rng: SecretRng,
    *,
    summed: bool = False,
) -> Tensor:
    """One client's noisy sums over its test records, one row per model.

    ``summed`` says that clients' integers are added up, and need a public bound.

    *Formal guarantees.* Every record's statistic is computed on its own and lies in the unit ball
    for each model; a blank has a constant one; sums are exact. They are rounded onto the grid of
    the noise, and noise of ``std`` is added there.
    """
    totals = torch.stack([_total(measure, model, member) for model in models])
    grid = Grid.of(std)
    return grid.noised(totals, rng, LARGEST_RELEASE) if summed else grid.noised(totals, rng)


def _total(measure: Measure, model: nn.Module, member: Member) -> Tensor:
    """The exact sum of the statistics of a client's test records."""
    shard = member.shard
    task = member.task
    numbers = measure.numbers
    parameters = {k: v.data for k, v in model.named_parameters()}
    parts = shard.test_features, shard.test_labels, shard.test.counted[slice(*shard.test_span)]
    total = torch.zeros(numbers, dtype=torch.float64)

    def rows(batch: Tensor, targets: Tensor) -> list[Tensor]:
        outputs = task.outputs(lambda x: outputs_of(model, parameters, x), batch)
        return [measure.statistic(task, outputs, targets)]

    with torch.no_grad(), in_mode(model, training=False):
        apart = as_written(measure, (Accuracy, MeanLoss, BinnedAuc)) and not mixing(
            model, task, member.inputs, tuple(shard.test_features.shape[1:])
        )
        batches = (torch.split(part, _RECORDS_AT_ONCE) for part in parts)
        for features, targets, live in zip(*batches, strict=True):
            if not len(targets):
                continue
            batch = member.inputs(features)
            if apart:
                statistics = rows(channels_last(batch), targets)[0]
            else:
                statistics = rows_of(rows, (batch, targets))
            counted = torch.where(live[:, None], statistics.double(), measure.blank(task))
            total += exact_sum(counted, len(targets), numbers)
    return total


def records_of(member: Member) -> int:
    """How many test records a client has: a public number."""
    return len(member.shard.test_labels)


def answer_noise(agreement: Agreement, round_: int, participant: Participant, asked: int) -> float:
    """The noise that one of ``asked`` clients adds to its answer: all of it, or a share over a
    secure sum.
    """
    noise = agreement.release_noise(round_, participant)
    return agreement.strategy.channel.noise_share(noise, asked)


def measured_upload(
    accounted: AccountedMetric,
    agreement: Agreement,
    member: Member,
    download: Downlink,
    model: nn.Module,
    run: str,
    rng: SecretRng,
) -> bytes:
    """A client's answer to a measurement, as it travels: whole multiples of its grid's step.

    ``download`` holds the published model, and says which measurement this is and how many are
    asked. It is written into ``model``.
    """
    round_ = download.round
    agreement.layout.write(download.start, model)
    write_buffers(model, download.shared.get("buffers", {}))
    std = answer_noise(agreement, round_, member.participant, download.drawn)
    measure = accounted.measure(member.task)
    summed = agreement.strategy.secure
    (answer,) = measured_answer(measure, [model], member, std, rng, summed=summed)
    return encode_upload(answer, run, round_, member.id, Grid.of(std))


def pooled(
    measure: Measure, answers: Mapping[str, Tensor], stds: Mapping[str, float], records: int
) -> Estimate:
    """The value over all test records of those who answered, from one row of each.

    Sums add up whatever their noise: the value means the same for any budgets.
    """
    total = torch.stack([answers[client] for client in sorted(answers)]).sum(dim=0)
    variance = sum(stds[client] ** 2 for client in answers)
    return measure.estimate(total, variance, records)


def hidden(channel: Channel, drawn: int) -> bool:
    """Whether so many clients can be added up: always, but over a secure sum of too few."""
    try:
        channel.group(drawn)
    except PrivacyRefusal:
        return False
    return True


def planned_measurement(
    accounted: AccountedMetric,
    agreement: Agreement,
    state: State,
    run: Run,
    admit: Admission,
    members: Mapping[str, Member],
    model: nn.Module,
) -> Estimate | None:
    """Measure the published model after a round, as planned; None if nobody could answer.

    Every client with test records is charged first; whose plan does not cover it abstains. Over a
    secure sum those who are left add up shares of one noise, and nobody sees a single answer;
    nothing is measured where they are too few to be hidden among each other.
    """
    number = state.round // accounted.every - 1
    round_ = agreement.measurement(number)
    task = next(iter(members.values())).task
    measure = accounted.measure(task)
    asked = {client: own for client, own in members.items() if records_of(own)}
    abstaining = admit(round_, asked)
    model = copy.deepcopy(model)  # what others use is left as it is
    published = agreement.strategy.step.published(dict(state.plugs["step"]), state.model)
    agreement.layout.write(published, model)
    write_buffers(model, state.buffers)
    stds = {}
    answers = {}
    records = 0
    there = {client: own for client, own in sorted(asked.items()) if client not in abstaining}
    if there and not hidden(agreement.strategy.channel, len(there)):
        return None
    for client, own in there.items():
        std = stds[client] = answer_noise(agreement, round_, own.participant, len(there))
        secret = run.secret("measured", number, client)
        summed = agreement.strategy.secure
        (answers[client],) = measured_answer(measure, [model], own, std, secret, summed=summed)
        records += records_of(own)
    return pooled(measure, answers, stds, records) if answers else None
