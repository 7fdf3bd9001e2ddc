"""Releases before round one: a client's answer, and what the server makes of the answers.

Releases have the round numbers -R, ..., -1. A client's answer is a noisy sum over its records; the
server turns the answers into a public buffer of the model.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.grid import LARGEST_RELEASE, Grid
from dpfl.core.random import SecretRng
from dpfl.core.threads import one_thread
from dpfl.core.types import Adjacency, Claims, Cohort, Metrics, State
from dpfl.models.checks import in_mode, outputs_of
from dpfl.models.per_record import rows_of
from dpfl.models.separation import as_written, mixing
from dpfl.numerics import clipping
from dpfl.plugs.base import claiming
from dpfl.plugs.channels import Summed
from dpfl.plugs.preconditioning import Standardising, UnitMean, Whitening
from dpfl.plugs.releases import (
    GramMatrix,
    Histogram,
    Mean,
    Quantile,
    Release,
    Shape,
    sum_of_clipped,
)
from dpfl.privacy.calibrate import calibrate
from dpfl.rounds.enrol import Agreement
from dpfl.rounds.members import Member

_RELEASES = (Mean, GramMatrix, Histogram, Quantile, UnitMean, Whitening, Standardising)
_AT_ONCE = 4096  # records that pass through the model together
_DEVIATIONS = 6.0  # |z| > sqrt(d) + t has a probability of exp(-t^2 / 2) at most


def buffer_shapes(model: nn.Module, releases: tuple[Release, ...]) -> dict[str, Shape]:
    """The shapes of the buffers that releases write; a buffer that the model lacks is refused."""
    buffers = dict(model.named_buffers())
    for release in releases:
        check(
            release.into in buffers,
            "release",
            f"the model has no buffer '{release.into}'",
            f"its buffers are {', '.join(buffers) or 'none'}",
        )
    return {release.into: tuple(buffers[release.into].shape) for release in releases}


def write_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the results of releases into the model's buffers."""
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value.reshape(buffers[name].shape))


@one_thread()
def release_answer(
    agreement: Agreement,
    round_: int,
    member: Member,
    model: nn.Module,
    rng: SecretRng,
    drawn: int = 1,
) -> Tensor:
    """One client's noisy sum of the statistic over its records, where ``drawn`` are asked.

    *Formal guarantees.* Every record's row is computed on its own, scaled into the bound and
    added up in double precision; a row that is not finite counts as zero. The sum is rounded
    onto the grid of the noise that the client's own budget asks for, and noise is added there.
    Over a secure sum the grid is that of a share of the noise that all have in common.
    """
    release = agreement.strategy.releases[round_]
    shard = member.shard
    shape = agreement.buffer_shapes[release.into]
    local = agreement.strategy.local
    total = torch.zeros(release.numbers(shape)).double()
    # Of a whole client there is one contribution, its mean, which is clipped below.
    bound = release.bound
    each = replace(release, bound=1.0) if local.whole else release
    for chosen in torch.split(torch.arange(shard.examples), _AT_ONCE):
        inputs = _inputs_apart(model, release.into, member, shard.features[chosen])
        live = shard.train.counted[slice(*shard.span)][chosen]  # blanks are computed, and left out
        if as_written(release, _RELEASES):
            total += each.clipped_sum(inputs[live], shard.labels[chosen][live], shape)
            continue
        given = inputs, shard.labels[chosen]
        rows = rows_of(lambda x, y: [each.statistic(x, y, shape)], given)
        rows = torch.where(live[:, None], rows, 0.0)
        total += sum_of_clipped(rows, len(chosen), len(total), 1.0 if local.whole else bound)
    if local.whole:
        total = clipping.clip(total / shard.examples, bound)
    multiplier = agreement.release_noise(round_, member.participant)
    grid = agreement.upload_grid(round_, drawn)
    if grid is None:
        return Grid.of(multiplier * bound).noised(total, rng).to(torch.float32)
    noise = grid
    step = grid.step
    if local.own_scale:  # noise as its own budget asks for, whatever the terms call a step
        share = agreement.strategy.channel.noise_share(multiplier * bound, drawn)
        noise = Grid.of(share)
    return noise.noisy_integers(total, rng, LARGEST_RELEASE).mul_(step)


class _Reached(Exception):
    """The module whose input was wanted has been reached, with this input."""


def _inputs_apart(model: nn.Module, buffer: str, member: Member, stored: Tensor) -> Tensor:
    """The same for stored records: record by record, unless the model keeps them apart."""
    batch = member.inputs(stored)
    with in_mode(model, training=False):
        if mixing(model, member.task, member.inputs, tuple(stored.shape[1:])) is None:
            return _inputs_of(model, buffer, batch)
        with torch.no_grad():
            return rows_of(lambda x: [_inputs_of(model, buffer, x)], (batch,))


def _inputs_of(model: nn.Module, buffer: str, batch: Tensor) -> Tensor:
    """The input of the module that owns a buffer, one flat row a record."""

    def stop(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        raise _Reached(arguments[0])

    owner = model.get_submodule(buffer.rpartition(".")[0])
    handle = owner.register_forward_pre_hook(stop)
    try:
        with torch.no_grad(), in_mode(model, training=False):
            outputs_of(model, {}, batch)
    except _Reached as reached:
        inputs: Tensor = reached.args[0]
        return inputs.flatten(1).to(torch.float32)
    finally:
        handle.remove()
    raise ConfigurationError(
        "release", f"the owner of '{buffer}' is never called", "use a module that forward calls"
    )


def combined(
    agreement: Agreement, state: State, cohort: Cohort, messages: Mapping[str, Tensor]
) -> tuple[State, Metrics]:
    """The state with the buffer that the answers make.

    Answers count by how precise they are, (records / noise)^2, as far as claims tell; a false claim
    moves the buffer, never what anyone is charged. One that is longer than what it claims to add up
    can be is scaled down to that.
    """
    precision = {client: _precision(cohort.claims[client]) for client in messages}
    total = sum(precision.values())
    variance = 0.0
    bound = agreement.strategy.releases[state.round].bound
    mean = torch.zeros(agreement.terms.releases[state.round][1], dtype=torch.float64)
    for client, message in sorted(messages.items()):
        share = precision[client] / total if total > 0 else 1 / len(messages)
        units = _units(agreement, cohort.claims[client])
        noise = _claimed_noise(agreement, state.round, client, cohort.claims[client])
        longest = bound * (units + noise * (math.sqrt(len(message)) + _DEVIATIONS))
        mean += share * clipping.clip(message.to(torch.float64), longest) / units
        variance += (share * noise / units) ** 2 if share else 0.0
    return _written(agreement, state, mean, len(messages), math.sqrt(variance))


def combined_sum(
    agreement: Agreement, state: State, cohort: Cohort, total: Summed
) -> tuple[State, Metrics]:
    """The state with the buffer that the sum of the answers makes; as it was without answers.

    The sum is divided by all records that those who answered claim, each counted as much as its
    client's own scale makes of it.
    """
    counted = 0.0
    own_scale = agreement.strategy.local.own_scale
    for client in total.ids:
        claims = cohort.claims[client]
        noise = _claimed_noise(agreement, state.round, client, claims) if own_scale else 1.0
        counted += _units(agreement, claims) / noise
    drawn = max(1, len(cohort))
    counted = max(counted, 1e-30)
    noise = agreement.terms.release_noise[state.round]
    share = agreement.strategy.channel.noise_share(noise, drawn)
    std = share * math.sqrt(len(total.ids)) / counted
    return _written(agreement, state, total.vector / counted, len(total.ids), std)


def _units(agreement: Agreement, claims: Claims) -> int:
    """How many contributions a client's answer adds up, as it claims."""
    return 1 if agreement.strategy.local.whole else max(1, claims.examples)


def _claimed_noise(agreement: Agreement, round_: int, client: str, claims: Claims) -> float:
    """The noise multiplier of a release that a client's claims lead to; infinite if to none."""
    found = claiming({client: claims}, some=False)
    with suppress(PrivacyRefusal):  # claims that nobody could plan with
        return agreement.release_noise(round_, found[0]) if found else math.inf
    return math.inf


def _written(
    agreement: Agreement, state: State, mean: Tensor, answers: int, std: float
) -> tuple[State, Metrics]:
    """The state with the buffer that a noisy mean makes, where there were answers.

    ``std`` is that of the noise, relative to the bound of one contribution.
    """
    if not answers:
        nothing: Metrics = {"answers": 0, "used": "no"}
        return replace(state, round=state.round + 1), nothing
    release = agreement.strategy.releases[state.round]
    shape = agreement.buffer_shapes[release.into]
    std = std * release.bound if math.isfinite(std) else 0.0
    result = release.result(mean, shape, std).to(torch.float32)
    good = bool(torch.isfinite(result).all())
    buffers = {**state.buffers, release.into: result} if good else dict(state.buffers)
    metrics: Metrics = {"answers": answers, "used": "yes" if good else "no"}
    return replace(state, round=state.round + 1, buffers=buffers), metrics


def _precision(claims: Claims) -> float:
    if not claims.usable:
        return 0.0
    noise = calibrate(
        claims.epsilon, claims.delta, 1.0, 1, sampling="none", adjacency=Adjacency.ZERO_OUT
    )
    return (claims.examples / noise) ** 2
