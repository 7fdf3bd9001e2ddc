"""What an engine is given, and what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from dpfl.core.layout import Layout
from dpfl.core.random import SecretRng
from dpfl.core.types import Phase
from dpfl.data.inputs import NUMBERS, Inputs
from dpfl.models.checks import outputs_of
from dpfl.models.separation import mixing
from dpfl.numerics.clipping import within_bounds
from dpfl.tasks import CLASSIFICATION, Task


class Batch(NamedTuple):
    """Records as the model takes them, and their targets; ``live`` says which of them count.

    ``slots`` are the records' numbers among ``most``, drawn in secret: they decide which records
    are computed together where a model is computed record by record.
    """

    features: Tensor
    labels: Tensor
    task: Task = CLASSIFICATION
    live: Tensor | None = None
    slots: Tensor | None = None
    most: int = 0

    def counted(self) -> Tensor:
        """Which records count: no blanks, and none that is not finite or is too large."""
        bounded = within_bounds(self.features)
        return bounded if self.live is None else bounded & self.live

    def losses(self, model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        """One loss per record, of a model with these parameters."""
        outputs = self.task.outputs(partial(outputs_of, model, parameters), self.features)
        return self.task.losses(outputs, self.labels)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One client's local work in one round.

    ``start`` is the flat vector of the model it starts from. ``features`` and ``labels`` are all of
    its training records as they are stored, with their targets; ``inputs`` turns a stored batch
    into what the model takes, and ``task`` has the loss. Records, noise and dropout are drawn from
    ``rng``. ``live`` says which records count, and which are blanks (:mod:`dpfl.data.units`); None
    where all count. ``memory`` is that of the shard that the records are from.
    """

    client: str
    start: Tensor
    phases: tuple[Phase, ...]
    features: Tensor
    labels: Tensor
    rng: SecretRng
    inputs: Inputs = NUMBERS
    task: Task = CLASSIFICATION
    live: Tensor | None = None
    memory: dict[str, tuple[object, Tensor]] = field(default_factory=dict, repr=False)


@runtime_checkable
class Engine(Protocol):
    """Runs phases.

    Laws: the result depends on the jobs only, not on how many workers there are; every engine
    agrees with ``one_by_one`` to 5e-5 relative error of the update with noise off, and in
    distribution with noise on.
    """

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Group clients into blocks that one worker takes whole.

        ``plans`` are the clients' phases in canonical order; the result is a pure function of them.
        """
        ...

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Return each client's model after its work, in the order of the jobs.

        Of a phase with ``sum_only`` come exact integers in double precision instead.
        """
        ...


def clips_records(job: Job) -> bool:
    """Whether gradients of single records are clipped, so that records must be kept apart."""
    return any(phase.clip is not None and not phase.whole for phase in job.phases)


def mixing_of(model: nn.Module, jobs: Sequence[Job]) -> str | None:
    """Say why a model is not known to keep jobs' records apart; None if it is."""
    kinds = {(id(x.task), id(x.inputs), tuple(x.features.shape[1:])): x for x in jobs}
    reasons = (mixing(model, x.task, x.inputs, key[2]) for key, x in kinds.items())
    return next(filter(None, reasons), None)


def batches_of(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into smaller ones of this size; an empty one into none.

    >>> import torch
    >>> [len(part.labels) for part in batches_of(Batch(torch.zeros(5, 2), torch.zeros(5)), 2)]
    [2, 2, 1]
    """
    firsts = range(0, len(batch.labels), size)
    parts = (slice(first, first + size) for first in firsts)
    live = batch.live
    return [
        Batch(batch.features[p], batch.labels[p], batch.task, None if live is None else live[p])
        for p in parts
    ]
