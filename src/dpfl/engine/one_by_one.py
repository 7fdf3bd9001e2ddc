"""The slow, plain engine: one client after the other, per-record gradients written out. The oracle, and for debugging."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from dpfl.client.sampling import PoissonBatches, sampler
from dpfl.core.errors import DpflError
from dpfl.core.layout import Layout
from dpfl.core.linalg import clip_factor
from dpfl.core.types import Phase
from dpfl.engine.process import one_thread
from dpfl.protocols import Job

_MOST_NUMBERS = 1 << 25  # per-record gradient entries held at once


class OneByOne:
    """Runs any supported module."""

    def blocks(self, plans: Sequence[tuple[Phase, ...]]) -> list[list[int]]:
        """Each client is a block of its own."""
        return [[i] for i in range(len(plans))]

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job; an error names the client and the phase."""
        with one_thread():
            return [self._client(model, layout, job) for job in jobs]

    def _client(self, model: nn.Module, layout: Layout, job: Job) -> Tensor:
        vector = job.start.clone()
        for number, phase in enumerate(job.phases):
            try:
                vector = self._phase(model, layout, job, phase, number, vector)
            except (RuntimeError, IndexError) as error:
                raise DpflError(
                    f"client '{job.client}', phase {number}",
                    f"the model failed on its data ({error})",
                    "check model and data",
                ) from error
        return vector

    def _phase(self, model: nn.Module, layout: Layout, job: Job, phase: Phase, number: int, start: Tensor) -> Tensor:
        records = sampler(phase, len(job.labels))
        batches = records.draw(job.rng.child("records", number), phase.steps)
        noise = job.rng.child("noise", number)
        dropout = job.rng.child("dropout", number)
        vector = start.clone()
        buffer = torch.empty_like(vector)
        for batch in batches:
            features, labels = job.features[batch], job.labels[batch]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(dropout.integer())
                if phase.clip is None:
                    gradient = _mean_gradient(model, layout, vector, features, labels)
                else:
                    gradient = self.clipped_sum(model, layout, vector, features, labels, phase.clip)
            if phase.noise_multiplier > 0 and phase.clip is not None:
                gradient = gradient + phase.noise_multiplier * phase.clip * noise.normal_(buffer)
            if phase.clip is not None:
                gradient = gradient / (records.expected_size if isinstance(records, PoissonBatches) else len(batch))
            vector = vector - phase.lr * (gradient + phase.weight_decay * vector)
            if phase.ball is not None:
                vector = start + into_ball(vector - start, phase.ball)
        return vector

    def clipped_sum(
        self, model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor, clip: float
    ) -> Tensor:
        """Sum of per-record gradients, each within ``clip``; a non-finite one counts as zero."""
        parameters = layout.unflatten(vector)

        def loss(parameters: dict[str, Tensor], feature: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, _on_copies(model, parameters), (feature.unsqueeze(0),))
            return F.cross_entropy(logits, label.unsqueeze(0))

        total = torch.zeros_like(vector)
        at_once = max(1, _MOST_NUMBERS // max(layout.size, 1))
        for some_features, some_labels in zip(
            torch.split(features, at_once), torch.split(labels, at_once), strict=True
        ):
            if len(some_labels) == 0:
                continue
            gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(
                parameters, some_features, some_labels
            )
            rows = torch.cat([gradients[block.name].reshape(len(some_labels), -1) for block in layout], dim=1)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            rows = torch.where(torch.isfinite(norms)[:, None], rows, torch.zeros_like(rows))
            total = total + clip_factor(norms, clip).to(rows.dtype) @ rows
        return total


def into_ball(difference: Tensor, radius: float | Tensor) -> Tensor:
    """Scale a difference (or each row, to its own radius) to at most ``radius``."""
    norm = torch.linalg.vector_norm(difference, dim=-1, keepdim=True, dtype=torch.float64)
    return difference * clip_factor(norm, radius).to(difference.dtype)


def _mean_gradient(model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in layout.unflatten(vector).items()}
    loss = F.cross_entropy(functional_call(model, _on_copies(model, parameters), (features,)), labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return layout.flatten(dict(zip(parameters, gradients, strict=True)))


def _on_copies(model: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add copies of the buffers: whatever a layer writes into one stays here."""
    return {**parameters, **{name: buffer.clone() for name, buffer in model.named_buffers()}}
