"""The slow, plain engine: one client after the other, per-record gradients written out.

The other engines are tested against it; it is also the one to debug with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.errors import PrivacyRefusal
from dpfl.core.grid import LARGEST_SUM, Grid
from dpfl.core.layout import Block, Layout
from dpfl.core.phases import Clipping, Phase
from dpfl.core.random import NoiseAhead, SecretRng
from dpfl.core.threads import one_thread
from dpfl.engine.base import Batch, Job, batches_of
from dpfl.engine.process import check_arithmetic, failures_of
from dpfl.models.per_record import Plan, apart, plan_for
from dpfl.numerics.clipping import LARGEST_NORM, clip_factor, layer_factors, squared_norms
from dpfl.plugs.sampling import PoissonBatches, ShuffledBatches, sampler

_MOST_NUMBERS = 1 << 25  # per-record gradient entries held at once
_MOST_HELD = 1 << 27  # numbers of all kinds


class OneByOne:
    """Runs any supported module, on any device that torch knows.

    Records are differentiated apart from each other, whatever the model does
    (:mod:`dpfl.models.per_record`). With ``one_at_a_time`` every record is differentiated alone, by
    plain autograd, for models that are known to keep records apart.
    """

    watched: ClassVar[bool] = True  # a model may do anything

    def __init__(self, device: str = "cpu", *, one_at_a_time: bool = False) -> None:
        self.device = torch.device(device)
        self.one_at_a_time = one_at_a_time
        self._plans: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Each client is a block of its own."""
        return [[i] for i in range(len(plans))]

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job; an error names the client and the phase."""
        check_arithmetic(jobs)
        with one_thread():
            return [self._run_job(model, layout, job) for job in jobs]

    def _run_job(self, model: nn.Module, layout: Layout, job: Job) -> Tensor:
        vector = job.start.to(self.device, copy=True)
        for number in range(len(job.phases)):
            with failures_of(f"client '{job.client}', phase {number}"):
                vector = self._run_phase(model, layout, job, number, vector)
        return vector.cpu()

    def _run_phase(
        self, model: nn.Module, layout: Layout, job: Job, number: int, start: Tensor
    ) -> Tensor:
        """Run phase ``number`` of a job from ``start``, step by step."""
        phase = job.phases[number]
        vector = start.clone()
        buffer = torch.zeros_like(start)
        records = sampler(phase, len(job.labels))
        noise = NoiseAhead(job.rng.child("noise", number), layout.size, phase.steps)
        dropout = job.rng.child("dropout", number)
        places = job.rng.child("places", number)
        still = {"all": slice(0), "head": slice(layout.head.start), "body": layout.head}[phase.part]
        for rows in records.draw(job.rng.child("records", number), phase.steps):
            features = job.inputs(job.features[rows].to(self.device))
            live = None if job.live is None else job.live[rows].to(self.device)
            batch = Batch(features, job.labels[rows].to(self.device), job.task, live)
            if phase.clip is not None and not phase.whole and self.watched:
                batch = _in_secret_places(batch, records, places)
            with self._dropout_from(dropout), _unwritten(vector, *model.parameters()):
                gradient = self._gradient(phase, model, layout, vector, batch)
            if phase.sum_only:
                grid = Grid.of(phase.noise_multiplier * (phase.clip or 0.0))
                return grid.noisy_integers(gradient, noise, LARGEST_SUM).neg_()
            if phase.clip is not None:
                if phase.noise_multiplier > 0:  # drawn where its generator is, on the CPU
                    grid = Grid.of(phase.noise_multiplier * phase.clip)
                    gradient = grid.noised(gradient, noise)
                count = max(len(rows), 1)
                size = records.expected_size if isinstance(records, PoissonBatches) else count
                gradient = gradient.div_(size).to(vector.dtype)
            if phase.weight_decay:
                gradient.add_(vector, alpha=phase.weight_decay)
            if phase.proximal:
                gradient.add_(vector - start, alpha=phase.proximal)
            gradient[still] = 0.0
            if phase.momentum:
                gradient = buffer.mul_(phase.momentum).add_(gradient)
            vector.sub_(gradient, alpha=phase.lr)
            if phase.ball is not None:
                apart = vector - start
                factor = clip_factor(squared_norms(apart).sqrt(), phase.ball).to(vector.dtype)
                vector = start + apart * factor if bool(factor < 1) else vector
        return vector

    def _gradient(
        self, phase: Phase, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch
    ) -> Tensor:
        """What a step adds up: a mean gradient, clipped as a whole or not, or clipped ones."""
        if phase.clip is None:
            return self.mean_gradient(model, layout, vector, batch)
        if phase.whole:
            return self.clipped_mean(model, layout, vector, batch, phase.clip)
        return self.clipped_sum(model, layout, vector, batch, phase.clip, phase.clipping)

    @contextmanager
    def _dropout_from(self, rng: SecretRng) -> Iterator[None]:
        """Seed torch's own generator, which dropout layers draw from, and leave it as it was.

        Only the generator of this device: ``torch.manual_seed`` seeks out every accelerator, at a
        tenth of a small step's cost.
        """
        generator = torch.default_generator
        if self.device.type == "cuda":
            generator = torch.cuda.default_generators[self.device.index or 0]
        state = generator.get_state()
        generator.manual_seed(rng.integer())
        try:
            yield
        finally:
            generator.set_state(state)

    def mean_gradient(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch
    ) -> Tensor:
        """Gradient of the mean loss of a batch, for plain SGD; zero for an empty batch.

        Blanks are left out of the sum, and counted in what it is divided by.
        """
        share = 1.0
        live = batch.live
        if live is not None and not bool(live.all()):
            share = float(live.sum()) / len(live)
            batch = Batch(batch.features[live], batch.labels[live], batch.task)
        if len(batch.labels) == 0:
            return torch.zeros_like(vector)
        gradient = layout.flatten(_gradients(model, layout.unflatten(vector), batch))
        return gradient if share == 1.0 else gradient.mul_(share)

    def clipped_mean(
        self, model: nn.Module, layout: Layout, vector: Tensor, batch: Batch, clip: float
    ) -> Tensor:
        """Mean gradient of a batch in double precision, of norm at most ``clip`` as a whole.

        A mean that is not finite counts as zero.
        """
        mean = self.mean_gradient(model, layout, vector, batch).double()
        norm = torch.linalg.vector_norm(mean)
        clipped = mean * clip_factor(norm, clip)
        return clipped if bool(norm <= LARGEST_NORM) else torch.zeros_like(mean)

    def clipped_sum(
        self,
        model: nn.Module,
        layout: Layout,
        vector: Tensor,
        batch: Batch,
        clip: float,
        clipping: Clipping = "flat",
    ) -> Tensor:
        """Sum in double precision of per-record gradients, each of norm at most ``clip``.

        A record whose gradient is not finite counts as zero.
        """
        parameters = layout.unflatten(vector)
        total = torch.zeros_like(vector, dtype=torch.float64)
        for some, found in self._each(model, parameters, batch):
            if len(some.labels) == 0:
                continue  # a call of blanks
            rows = torch.cat([x.reshape(len(x), x.shape[1:].numel()) for x in found], dim=1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            whole = (norms <= LARGEST_NORM) & some.counted()
            rows = torch.where(whole[:, None], rows, torch.zeros_like(rows))
            total += _weighted(layout, rows.to(torch.float64), norms, clip, clipping)
        return total

    def _each(
        self, model: nn.Module, parameters: dict[str, Tensor], batch: Batch
    ) -> Iterator[tuple[Batch, list[Tensor]]]:
        """Some records after the others, and the gradient of each, in the order of the layout.

        How many calls there are is public; which records are in one is drawn in secret.
        """
        if self.one_at_a_time:
            for one in batches_of(batch, 1):
                yield one, [x[None] for x in _gradients(model, parameters, one).values()]
            return

        def gradients(feature: Tensor, label: Tensor) -> list[Tensor]:
            return list(_gradients(model, parameters, Batch(feature, label, batch.task)).values())

        plans = self._plans.setdefault(model, {})
        key = (batch.features.shape[1:], batch.labels.shape[1:], repr(batch.task), model.training)
        if key not in plans:
            plans[key] = plan_for(gradients, (batch.features, batch.labels))
        plan = plans[key]
        size = max(1, sum(x.numel() for x in parameters.values()))
        width = max(1, min(_MOST_NUMBERS // size, _MOST_HELD // max(1, plan.numbers)))
        slots = torch.arange(len(batch.labels)) if batch.slots is None else batch.slots
        for first in range(0, max(batch.most, len(slots)), width):
            chosen = ((slots >= first) & (slots < first + width)).nonzero().flatten()
            live = None if batch.live is None else batch.live[chosen]
            some = Batch(batch.features[chosen], batch.labels[chosen], batch.task, live)
            yield some, apart(gradients, some[:2], plan)[0]


def _in_secret_places(
    batch: Batch, records: PoissonBatches | ShuffledBatches, places: SecretRng
) -> Batch:
    """Give the records of a batch slots among as many as a batch can have, which is public."""
    count = len(batch.labels)
    most = records.largest
    check(
        count <= most,
        "sampling",
        f"a batch has more than {most} records",
        "train again: this is bad luck",
        PrivacyRefusal,
    )
    return batch._replace(slots=places.permutations(1, most)[0][:count], most=most)


@contextmanager
def _unwritten(*tensors: Tensor) -> Iterator[None]:
    """Refuse a model that writes to its parameters when it is applied: records would show there
    without noise. A model's trial may not have come to it.
    """
    # torch raises a version whenever the tensor or a view of it is written to.
    versions = [tensor._version for tensor in tensors]
    yield
    check(
        versions == [tensor._version for tensor in tensors],
        "model",
        "writes to its parameters when it is applied",
        "let it only read them",
        PrivacyRefusal,
    )


def _weighted(
    layout: Layout, rows: Tensor, norms: Tensor, clip: float, clipping: Clipping
) -> Tensor:
    """Sum of per-record gradients (rows, of these norms), each brought within the clip."""
    if clipping == "flat":
        return clip_factor(norms, clip) @ rows
    layers = layout.layers
    places = {name: torch.cat([*map(_places, blocks)]) for name, blocks in layers.items()}
    parts = {name: rows[:, own].square().sum(dim=1) for name, own in places.items()}
    factors = layer_factors(parts, norms.square(), clip, clipping, len(layers))
    total = torch.zeros_like(rows[0])
    for name, own in places.items():
        total[own] = factors[name] @ rows[:, own]
    return total


def _places(block: Block) -> Tensor:
    return torch.arange(block.slice.start, block.slice.stop)


def _gradients(model: nn.Module, parameters: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Gradients of the mean loss of a batch, by plain autograd; zero where nothing is used."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    with torch.enable_grad():
        loss = batch.losses(model, leaves).mean()
    wanted = list(leaves.values())
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
