"""Releases before round one: a client's answer, and what the server makes of the answers.

Releases have the round numbers -R, ..., -1. A client's answer is a noisy sum over its records; the
server turns the answers into a public buffer of the model.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError
from dpfl.core.grid import LARGEST_RELEASE, Grid
from dpfl.core.random import SecretRng
from dpfl.core.types import Adjacency, Claims, Cohort, Metrics, State
from dpfl.engine.process import one_thread
from dpfl.models.checks import in_mode, outputs_of
from dpfl.numerics import clipping
from dpfl.plugs.channels import Summed
from dpfl.plugs.releases import Release, Shape
from dpfl.privacy.calibrate import calibrate
from dpfl.rounds.enrol import Agreement
from dpfl.rounds.members import Member

_AT_ONCE = 1 << 24  # numbers of the statistic held at once


def buffer_shapes(model: nn.Module, releases: tuple[Release, ...]) -> dict[str, Shape]:
    """The shapes of the buffers that releases write; a buffer that the model lacks is refused."""
    buffers = dict(model.named_buffers())
    for release in releases:
        problem = f"the model has no buffer '{release.into}'"
        known = f"its buffers are {', '.join(buffers) or 'none'}"
        check(release.into in buffers, "release", problem, known)
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
    release, shard = agreement.strategy.releases[round_], member.shard
    shape = agreement.buffer_shapes[release.into]
    numbers = release.numbers(shape)
    total = torch.zeros(numbers, dtype=torch.float64)
    for chosen in torch.split(torch.arange(shard.examples), max(1, _AT_ONCE // max(numbers, 1))):
        inputs = _inputs_of(model, release.into, member.inputs(shard.features[chosen]))
        rows = release.statistic(inputs, shard.labels[chosen], shape)
        problem = f"gives {tuple(rows.shape)} for {len(chosen)} records, not {numbers} a record"
        good = rows.shape == (len(chosen), numbers)
        check(good, "release", problem, "match statistic and numbers")
        total += clipping.clip(rows.to(torch.float32), release.bound).to(torch.float64).sum(dim=0)
    noise = agreement.release_noise(round_, member.participant) * release.bound
    grid = agreement.upload_grid(round_, drawn)
    if grid is None:
        return Grid.of(noise).noised(total, rng).to(torch.float32)
    return grid.noisy_integers(total, rng, LARGEST_RELEASE).mul_(grid.step)


class _Reached(Exception):
    """The module whose input was wanted has been reached, with this input."""


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
    remedy = "use a module that forward calls"
    raise ConfigurationError("release", f"the owner of '{buffer}' is never called", remedy)


def combined(
    agreement: Agreement, state: State, cohort: Cohort, messages: Mapping[str, Tensor]
) -> tuple[State, Metrics]:
    """The state with the buffer that the answers make.

    Answers count by how precise they are, (records / noise)^2, as far as claims tell; a false claim
    moves the buffer, never what anyone is charged.
    """
    precision = {client: _precision(cohort.claims[client]) for client in messages}
    total = sum(precision.values())
    mean = torch.zeros(agreement.terms.releases[state.round][1], dtype=torch.float64)
    for client, message in sorted(messages.items()):
        share = precision[client] / total if total > 0 else 1 / len(messages)
        mean += share * message.to(torch.float64) / max(1, cohort.claims[client].examples)
    return _written(agreement, state, mean, len(messages))


def combined_sum(
    agreement: Agreement, state: State, cohort: Cohort, total: Summed
) -> tuple[State, Metrics]:
    """The state with the buffer that the sum of the answers makes; as it was without answers.

    The sum is divided by all records that those who answered claim.
    """
    records = sum(max(1, cohort.claims[client].examples) for client in total.ids)
    return _written(agreement, state, total.vector / max(1, records), len(total.ids))


def _written(
    agreement: Agreement, state: State, mean: Tensor, answers: int
) -> tuple[State, Metrics]:
    """The state with the buffer that a noisy mean makes, where there were answers."""
    if not answers:
        nothing: Metrics = {"answers": 0, "used": "no"}
        return replace(state, round=state.round + 1), nothing
    release = agreement.strategy.releases[state.round]
    shape = agreement.buffer_shapes[release.into]
    result = release.result(mean, shape).to(torch.float32)
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
