"""The slow, plain engine: one client after the other, per-record gradients written out. The oracle,
and for debugging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from dpfl.core.errors import DpflError
from dpfl.core.grid import Grid
from dpfl.core.layout import Layout
from dpfl.core.random import NoiseAhead, SecretRng
from dpfl.core.types import Phase
from dpfl.engine.base import Job
from dpfl.engine.process import check_arithmetic, one_thread
from dpfl.numerics.clipping import LARGEST_NORM, clip_factor, squared_norms
from dpfl.plugs.sampling import PoissonBatches, sampler

_MOST_NUMBERS = 1 << 25  # per-record gradient entries held at once


class OneByOne:
    """Runs any supported module, on any device that torch knows."""

    def __init__(self, device: str = "cpu", *, one_at_a_time: bool = False) -> None:
        self.device = torch.device(device)
        self.one_at_a_time = one_at_a_time

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Each client is a block of its own."""
        return [[i] for i in range(len(plans))]

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job; an error names the client and the phase."""
        if any(phase.noise_multiplier > 0 for job in jobs for phase in job.phases):
            check_arithmetic()
        with one_thread():
            return [self._client(model, layout, job) for job in jobs]

    def _client(self, model: nn.Module, layout: Layout, job: Job) -> Tensor:
        vector = job.start.to(self.device, copy=True)
        for number, phase in enumerate(job.phases):
            try:
                vector = self._phase(model, layout, job, phase, number, vector)
            except (RuntimeError, IndexError) as error:
                raise DpflError(
                    f"client '{job.client}', phase {number}",
                    f"the model failed on its data ({error})",
                    "check model and data",
                ) from error
        return vector.cpu()

    def _phase(
        self, model: nn.Module, layout: Layout, job: Job, phase: Phase, number: int, start: Tensor
    ) -> Tensor:
        records = sampler(phase, len(job.labels))
        batches = records.draw(job.rng.child("records", number), phase.steps)
        noise = NoiseAhead(job.rng.child("noise", number), layout.size, phase.steps)
        dropout = job.rng.child("dropout", number)
        vector = start.clone()
        grid = None  # noise is drawn where its generator is, on the CPU
        if phase.noise_multiplier > 0 and phase.clip is not None:
            grid = Grid.of(phase.noise_multiplier * phase.clip)
        for batch in batches:
            features = job.inputs(job.features[batch].to(self.device))
            labels = job.labels[batch].to(self.device)
            with self._dropout_from(dropout):
                if phase.clip is None:
                    gradient = self.mean_gradient(model, layout, vector, features, labels)
                else:
                    gradient = self.clipped_sum(model, layout, vector, features, labels, phase.clip)
            if grid is not None:
                gradient = grid.noised(gradient, noise)
            if phase.clip is not None:
                expected = (
                    records.expected_size
                    if isinstance(records, PoissonBatches)
                    else max(len(batch), 1)
                )
                gradient = gradient.div_(expected).to(vector.dtype)
            if phase.weight_decay:
                gradient = gradient.add_(vector, alpha=phase.weight_decay)
            if phase.part != "all":
                gradient[still(layout, phase)] = 0.0
            vector = vector.sub_(gradient, alpha=phase.lr)
            if phase.ball is not None:
                vector = into_ball(vector, start, phase.ball)
        return vector

    @contextmanager
    def _dropout_from(self, rng: SecretRng) -> Iterator[None]:
        """Seed torch's own generator, which dropout layers draw from, and leave it as it was.

        Only the generator in question: ``torch.manual_seed`` seeks out every accelerator, at a
        tenth of a small step's cost.
        """
        seed = rng.integer()
        if self.device.type == "cuda":
            with torch.random.fork_rng(devices=[self.device]):
                torch.cuda.manual_seed(seed)
                yield
            return
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)

    def mean_gradient(
        self, model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor
    ) -> Tensor:
        """Gradient of the mean loss of a batch: plain SGD."""
        if len(labels) == 0:
            return torch.zeros_like(vector)
        parameters = {
            name: tensor.detach().requires_grad_()
            for name, tensor in layout.unflatten(vector).items()
        }
        loss = F.cross_entropy(
            functional_call(model, on_copies(model, parameters), (features,)), labels
        )
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return layout.flatten(dict(zip(parameters, gradients, strict=True)))

    def clipped_sum(
        self,
        model: nn.Module,
        layout: Layout,
        vector: Tensor,
        features: Tensor,
        labels: Tensor,
        clip: float,
    ) -> Tensor:
        """Sum in double precision of per-record gradients, each within ``clip``; a non-finite one
        counts as zero.
        """
        parameters = layout.unflatten(vector)

        def loss(parameters: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, on_copies(model, parameters), (feature.unsqueeze(0),))
            return F.cross_entropy(logits, label.unsqueeze(0))

        # torch has no batched recurrent layers, nor buffers written to in a batch: such records are
        # done one by one.
        one_at_a_time = self.one_at_a_time or any(
            isinstance(module, nn.RNNBase) for module in model.modules()
        )
        total = torch.zeros_like(vector, dtype=torch.float64)
        gradient = grad(loss)
        at_once = 1 if one_at_a_time else max(1, _MOST_NUMBERS // max(layout.size, 1))
        for first in range(0, len(labels), at_once):
            some = slice(first, first + at_once)
            if one_at_a_time:
                found = self._alone(model, parameters, features[some], labels[some])
            else:
                found = vmap(gradient, in_dims=(None, 0, 0), randomness="different")(
                    parameters, features[some], labels[some]
                )
            rows = torch.cat([found[b.name].reshape(len(labels[some]), -1) for b in layout], dim=1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            whole = (norms <= LARGEST_NORM) & (record_norms(features[some]) <= LARGEST_NORM)
            rows = torch.where(whole[:, None], rows, torch.zeros_like(rows))
            total += clip_factor(norms, clip) @ rows.to(torch.float64)
        return total

    @staticmethod
    def _alone(
        model: nn.Module, parameters: dict[str, Tensor], feature: Tensor, label: Tensor
    ) -> dict[str, Tensor]:
        """One record's gradient, by plain autograd."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        with torch.enable_grad():
            loss = F.cross_entropy(
                functional_call(model, on_copies(model, leaves), (feature,)), label
            )
        found = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))


def record_norms(features: Tensor) -> Tensor:
    """Norm of every record, in double precision."""
    rows = features.flatten(1)
    rows = rows if rows.is_floating_point() else rows.to(torch.float64)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def still(layout: Layout, phase: Phase) -> slice:
    """What a phase that moves only a part leaves as it is."""
    return layout.head if phase.part == "body" else slice(0, layout.head.start)


def into_ball(vector: Tensor, centre: Tensor, radius: float | Tensor) -> Tensor:
    """Bring a vector (or each row, to its own radius) back to within ``radius`` of ``centre``; what
    is within stays.
    """
    difference = vector - centre
    factor = clip_factor(squared_norms(difference).sqrt().unsqueeze(-1), radius).to(vector.dtype)
    outside = factor < 1
    return (
        torch.where(outside, centre + difference * factor, vector)
        if bool(outside.any())
        else vector
    )


def on_copies(model: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add copies of the buffers, on the parameters' device: whatever a layer writes into one stays
    here.
    """
    device = next(iter(parameters.values())).device
    return {
        **parameters,
        **{name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()},
    }
