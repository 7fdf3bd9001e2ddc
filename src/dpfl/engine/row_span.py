"""Plain SGD on one linear layer of many clients, in the span of their records.

Every gradient of such a layer is a combination of the client's own records, so its weights stay W =
s W0 + A^T X: the start, a factor that only weight decay moves, and a coefficient for every record
and class. With the products K = X X^T of records, outputs are s X W0^T + K A, a step changes the
rows of A that are in its batch, and the distance from the start is read off A and K. A step then
costs records x records instead of records x features: much less for clients with few records. The
layer's bias is one more feature, of value 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dpfl.engine.base import Job
from dpfl.engine.stacks import Chain, Linear
from dpfl.numerics.clipping import clip_factor, stacked_product
from dpfl.plugs.sampling import Draw, sampler

_MOST_NUMBERS = 1 << 24  # of all clients' records, which are laid out once


def spannable(chain: Chain, jobs: Sequence[Job], number: int) -> bool:
    """Whether a phase is plain SGD on one linear layer, and its clients' records are few beside its
    features.
    """
    linear = [step for step in chain if isinstance(step, Linear)]
    if len(linear) != 1 or not all(isinstance(step, Linear | nn.Flatten) for step in chain):
        return False
    features, most = linear[0].weight.shape[1], max(len(job.labels) for job in jobs)
    phases = [job.phases[number] for job in jobs]
    if any(p.clip is not None or p.noise_multiplier > 0 or p.part != "all" for p in phases):
        return False
    looked_at = phases[0].steps * phases[0].batch_size
    return (
        4 * most <= features
        and looked_at >= 2 * most
        and len(jobs) * most * features <= _MOST_NUMBERS
    )


def run_spanned(layer: Linear, jobs: list[Job], number: int, start: Tensor) -> Tensor | None:
    """Run phase ``number`` of all jobs from the rows of ``start``; None where products of records
    are not finite.
    """
    phases, device = [job.phases[number] for job in jobs], start.device
    samplers = [sampler(phase, len(job.labels)) for phase, job in zip(phases, jobs, strict=True)]
    draws = [
        s.draw(job.rng.child("records", number), phases[0].steps)
        for s, job in zip(samplers, jobs, strict=True)
    ]
    classes = layer.weight.shape[0]
    records = pad_sequence(
        [job.inputs(job.features).flatten(1) for job in jobs], batch_first=True
    ).to(device)
    labels = pad_sequence([job.labels for job in jobs], batch_first=True).to(device)
    weights = start[:, layer.weight.slice].reshape(len(jobs), *layer.weight.shape)
    products = stacked_product(records, records.transpose(1, 2))
    at_start = (
        stacked_product(weights, records.transpose(1, 2)).transpose(1, 2).contiguous()
    )  # twice as fast this way round
    if layer.bias is not None:
        products += 1.0
        at_start += start[:, layer.bias.slice][:, None]
    if not bool(torch.isfinite(products).all()):
        return None
    wanted = nn.functional.one_hot(labels, classes).to(torch.float32)
    coefficients = _descend(jobs, number, draws, products, at_start, wanted, _Start(start, layer))
    return coefficients.write(records)


class _Start:
    """Where clients start, and how far from there they are."""

    def __init__(self, start: Tensor, layer: Linear) -> None:
        self.vectors, self.layer = start, layer
        self.factor = torch.ones(len(start), 1, 1, device=start.device)
        self.coefficients = torch.empty(0)

    def write(self, records: Tensor) -> Tensor:
        """Lay out the weights: s W0 + A^T X."""
        vectors = torch.empty_like(self.vectors)
        factor, layer = self.factor[:, 0], self.layer
        moved = stacked_product(self.coefficients.transpose(1, 2), records).flatten(1)
        vectors[:, layer.weight.slice] = torch.addcmul(
            moved, factor, self.vectors[:, layer.weight.slice]
        )
        if layer.bias is not None:
            summed = self.coefficients.sum(dim=1)
            vectors[:, layer.bias.slice] = torch.addcmul(
                summed, factor, self.vectors[:, layer.bias.slice]
            )
        return vectors


def _descend(
    jobs: list[Job],
    number: int,
    draws: Sequence[Draw],
    products: Tensor,
    at_start: Tensor,
    wanted: Tensor,
    place: _Start,
) -> _Start:
    phases, device = [job.phases[number] for job in jobs], products.device
    clients, most, classes = wanted.shape

    sizes, chosen = _table(draws)
    rates = torch.tensor([p.lr for p in phases]) / sizes.clamp_min(1)  # (steps, clients)
    counted = (chosen >= 0).to(torch.float32) * rates[..., None].to(
        torch.float32
    )  # zero for what is in no batch
    rows = (chosen.clamp_min(0) + torch.arange(clients)[:, None] * most).to(device)
    counted = counted[..., None].to(device)
    decay = np.array([p.weight_decay * p.lr for p in phases])
    keep = (
        torch.as_tensor(1 - decay, dtype=torch.float32, device=device)[:, None, None]
        if decay.any()
        else None
    )
    balls = (
        None
        if phases[0].ball is None
        else torch.tensor([p.ball or math.inf for p in phases], device=device)
    )
    start_norms = place.vectors.to(torch.float64).square().sum(dim=1) if keep is not None else None
    flat_products = products.reshape(clients * most, most)
    known = torch.cat([at_start, wanted], dim=2).view(clients * most, 2 * classes)
    own = torch.zeros(clients, most, classes, device=device)  # A
    moved = torch.zeros_like(own)  # K A, kept up to date
    for step, width in enumerate(sizes.max(dim=1).values.tolist()):
        if width:
            shape, flat = (clients, width, -1), rows[step, :, :width].flatten()
            outputs = moved.view(clients * most, classes).index_select(0, flat).view(shape)
            of_records = known.index_select(0, flat).view(shape)
            outputs.addcmul_(place.factor, of_records[..., :classes])
            outputs.sub_(
                outputs.amax(dim=2, keepdim=True)
            ).exp_()  # softmax: three times as fast for few classes
            errors = outputs.div_(outputs.sum(dim=2, keepdim=True)).sub_(of_records[..., classes:])
            errors.mul_(counted[step, :, :width])
        if keep is not None:
            own.mul_(keep)
            moved.mul_(keep)
            place.factor = place.factor * keep
        if width:
            own.view(clients * most, classes).index_add_(
                0, flat, errors.view(clients * width, classes), alpha=-1.0
            )
            moved.baddbmm_(
                flat_products.index_select(0, flat).view(shape).transpose(1, 2), errors, alpha=-1.0
            )
        if balls is not None:
            squares = (own * moved).sum(dim=(1, 2), dtype=torch.float64)
            if keep is not None and start_norms is not None:
                drift = (place.factor[:, 0, 0] - 1).to(torch.float64)
                crossed = (own * at_start).sum(dim=(1, 2), dtype=torch.float64)
                squares = squares + 2 * drift * crossed + drift.square() * start_norms
            inside = clip_factor(squares.clamp_min(0).sqrt(), balls).to(torch.float32)[
                :, None, None
            ]
            if bool((inside < 1).any()):
                own.mul_(inside)
                moved.mul_(inside)
                place.factor = 1 + inside * (place.factor - 1)
    place.coefficients = own
    return place


def _table(draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Batch sizes (steps, clients), and each step's records (steps, clients, widest), -1 where
    there is none.
    """
    sizes = torch.stack([draw.sizes for draw in draws], dim=1)
    widest = int(sizes.max()) if sizes.numel() else 0
    chosen = torch.full((len(draws), len(sizes), widest), -1)
    chosen[torch.arange(widest) < sizes.T[..., None]] = torch.cat([draw.records for draw in draws])
    return sizes, chosen.transpose(0, 1).contiguous()
