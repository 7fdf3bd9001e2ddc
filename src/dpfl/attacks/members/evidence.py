"""What an adversary that knows the candidates' data computes from what it sees of a run.

Everything here uses data, models and what arrives at the server; coins and noise are unknown to the
adversary, and no function takes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dpfl.attacks.observation import Observation, ObservedRound
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Rows
from dpfl.engine import make_engine
from dpfl.engine.base import Batch, Job, batches_of
from dpfl.engine.one_by_one import OneByOne
from dpfl.models.checks import in_mode, outputs_of
from dpfl.rounds import write_buffers
from dpfl.rounds.members import Member

_CERTAIN = 1e-15  # probabilities this close to 0 or 1 count as that
_MOST_NUMBERS = 1 << 25  # entries of gradients held at once
_TINY = 1e-9  # beside the mean square of a contribution: keeps matrices invertible


class Detector:
    """Which of several targets is in what arrives: a regression on all of them at once.

    With D_t the targets' contributions to round t (a row each), h_t that of records known to be
    there, and s the coins, what arrives is c (s D_t + h_t) and noise. All rounds together are
    solved for s with the ridge that is optimal for fair coins, noise variance / (c^2 / 4). Noise
    and c are estimated from the same rounds, so that no claim about noise is believed. Where noise
    is large this is the matched filter of each target, <update, contribution>.
    """

    def __init__(self, targets: int) -> None:
        self._gram = torch.zeros(targets + 1, targets + 1, dtype=torch.float64)
        self._products = torch.zeros(targets + 1, dtype=torch.float64)
        self._square = 0.0
        self._numbers = 0

    def add(self, contributions: Tensor, known: Tensor, update: Tensor) -> None:
        """Add a round: the targets' ``contributions``, that of ``known`` records, and what came."""
        rows = torch.cat([contributions, known[None]])
        self._gram += rows @ rows.T
        self._products += rows @ update
        self._square += float(update @ update)
        self._numbers += len(update)

    def statistics(self) -> Tensor:
        """One number a target, over the std it would have in noise of variance 1; zero where
        nothing was seen.

        >>> detector, two = Detector(2), torch.eye(2, 9).double()
        >>> detector.add(two, torch.ones(9).double(), 1.0 + two[1])
        >>> [round(abs(float(one)), 2) for one in detector.statistics()]
        [0.0, 0.94]
        """
        squares = self._gram.diagonal()
        tiny = _TINY * float(squares.mean())
        if tiny == 0:
            return torch.zeros(len(squares) - 1, dtype=torch.float64)
        ridge = torch.full_like(squares, tiny)
        plain = torch.linalg.solve(self._gram + ridge.diag(), self._products)
        free = max(1, self._numbers - len(squares))
        noise = max(self._square - float(plain @ self._products), 0.0) / free
        scale = float(plain[-1]) if squares[-1] > 0 else 2 * float(plain[:-1].mean())
        mean = float(squares[:-1].mean())
        ridge[:-1] = min(max(4 * noise / max(scale**2, 1e-300), tiny), 1e6 * mean)
        inverse = torch.linalg.inv(self._gram + ridge.diag())
        spread = (inverse @ self._gram @ inverse).diagonal().clamp_min(1e-300).sqrt()
        found: Tensor = inverse @ self._products / spread
        return found[:-1]


# -- what is seen ----------------------------------------------------------------------------------


def start_of(round_: ObservedRound, client: str) -> Tensor:
    """Where a client starts: its own start, or the global model."""
    return round_.plan.starts.get(client, round_.state.model)


def arrived(seen: Observation, round_: ObservedRound, clients: Sequence[str]) -> dict[str, Tensor]:
    """What the server sees of each client that takes part: its own update, or the sum of all."""
    view = seen.server_view(round_)
    found: dict[str, Tensor] = {}
    for place, client in enumerate(view.cohort.ids):
        if client not in clients:
            continue
        if isinstance(view, Rows):
            own = view.matrix[place] + view.origin - start_of(round_, client)
            found[client] = own.double()
        else:
            found[client] = view.vector.double()
    return found


# -- what follows from candidates' data ------------------------------------------------------------


def batch_of(member: Member, places: Tensor | None = None) -> Batch:
    """Records of a ``member`` as the model takes them, with their targets.

    ``places`` are the numbers of those that are wanted; left out, all of them are.
    """
    chosen = slice(None) if places is None else places
    features = member.inputs(member.shard.features[chosen])
    return Batch(features, member.shard.labels[chosen], member.task)


def confidence(seen: Observation, batch: Batch) -> Tensor:
    """The logit of the probability that the published model gives the true class, or minus the
    loss where the task has no classes; one number a record.
    """
    own = seen.simulation
    task = batch.task
    model = own.work.model
    parameters = own.layout.unflatten(own.published())
    write_buffers(model, own.state.buffers)
    with torch.no_grad(), in_mode(model, training=False):
        outputs = task.outputs(partial(outputs_of, model, parameters), batch.features)
        chances = task.probabilities(outputs) if task.targets == "classes" else None
        if chances is None:
            return -task.losses(outputs, batch.labels).double()
        own_class = chances.gather(1, batch.labels.long()[:, None])[:, 0]
        return torch.logit(own_class.double(), eps=_CERTAIN)


def record_gradients(model: nn.Module, layout: Layout, vector: Tensor, batch: Batch) -> Tensor:
    """The gradient of every record's loss, a row each, in evaluation mode.

    Where torch cannot differentiate many records at once, they are taken one by one.
    """
    parameters = layout.unflatten(vector)

    def loss(parameters: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
        return Batch(feature[None], label[None], batch.task).losses(model, parameters).sum()

    together = vmap(grad(loss), in_dims=(None, 0, 0))
    parts = [vector.new_zeros(0, layout.size)]
    with in_mode(model, training=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        try:
            for some in batches_of(batch, max(1, _MOST_NUMBERS // layout.size)):
                found = together(parameters, some.features, some.labels)
                flat = [found[block.name].reshape(len(some.labels), -1) for block in layout]
                parts.append(torch.cat(flat, dim=1))
            return torch.cat(parts).double()
        except (RuntimeError, ValueError, TypeError):
            singles = batches_of(batch, 1)
            plain = OneByOne(one_at_a_time=True)
            alone = [plain.mean_gradient(model, layout, vector, one) for one in singles]
            return torch.stack(alone).double()


def updates_without_noise(
    seen: Observation, round_: ObservedRound, members: Sequence[Member]
) -> list[Tensor]:
    """The updates of ``members`` in a round, from where they start, by their local work without
    noise.

    A part of the model that stays at a client is unknown: it starts as it does for everyone.
    """
    own = seen.simulation
    personal = seen.simulation.strategy.personal
    model = own.work.model
    layout = own.layout
    number = round_.state.round
    write_buffers(model, round_.state.buffers)
    seed = PublicSeed(0).child("adversary", number)
    jobs = []
    for member in members:
        start = start_of(round_, member.id)
        start = start if personal is None else personal.merge(start, None, layout)
        jobs.append(
            Job(
                client=member.id,
                start=start,
                phases=tuple(
                    replace(phase.in_round(number), noise_multiplier=0.0, sum_only=False)
                    for phase in own.agreement.phases(member.participant)
                ),
                features=member.shard.features,
                labels=member.shard.labels,
                rng=SecretRng.simulated(seed.child(member.id)),
                inputs=member.inputs,
                task=member.task,
            )
        )
    found = make_engine(own.engine, own.device).run(model, layout, jobs)
    starts = [start_of(round_, job.client) for job in jobs]
    if personal is not None:
        parts = zip(starts, jobs, found, strict=True)
        found = [personal.split(start, job.start, own, layout)[0] for start, job, own in parts]
    return [(after - start).double() for start, after in zip(starts, found, strict=True)]
