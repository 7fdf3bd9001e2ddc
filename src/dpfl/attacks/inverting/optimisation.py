"""Gradient inversion: records whose gradient is the one that was seen.

``dlg`` (Zhu, Liu, Han, *Deep Leakage from Gradients*, NeurIPS 2019): records x and soft labels y
are moved by L-BFGS until their gradient is the one that was seen,

    min over x, y of |s grad L(x, softmax(y)) - g|^2 / |g|^2.

``idlg`` (Zhao, Mopuri, Bilen, 2020): labels are read from the gradient first. For cross-entropy the
gradient of the last layer's biases, or of the rows of its weights under positive inputs, is
negative for the true class alone. Of several records the most negative classes are taken.

``cosine`` (Geiping, Bauermeister, Droge, Moeller, *Inverting Gradients*, NeurIPS 2020): labels as
above, and

    min over x of 1 - cos(grad L(x), g) + tv TV(x),

TV the mean absolute difference of neighbouring pixels, by Adam on signs of gradients, with steps
that shrink. Records are kept in their range, from 0 to 1 after scaling.

The scale s is 1 where nothing is clipped. Where gradients are clipped the adversary does not know
by how much, and fits it: s = <grad, g> / |grad|^2.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl.core.layout import Layout, trainable
from dpfl.models.checks import in_mode

Algorithm = Literal["dlg", "idlg", "cosine"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_HISTORY = 100  # of L-BFGS
_STEP = 0.1  # of Adam


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an adversary has: a model at known weights, and the gradient that it saw there.

    ``records`` is how many are in the gradient. ``low`` and ``high`` are the ends of the range of a
    record's values, in the shape of a record as the model takes it. ``clipped``: the gradient's
    length is not known.
    """

    model: nn.Module
    weights: Tensor
    gradient: Tensor
    layout: Layout
    records: int
    classes: int
    low: Tensor
    high: Tensor
    clipped: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.low.shape)

    def gradient_of(self, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of the mean loss at the known weights, which can be differentiated again.

        ``x`` are records between 0 and 1, ``y`` probabilities of the classes, one row a record.
        """
        x = self.low + (self.high - self.low) * x
        parameters = {
            name: tensor.requires_grad_()
            for name, tensor in self.layout.unflatten(self.weights).items()
        }
        outputs = functional_call(self.model, parameters, (x,))
        loss = -(y * torch.log_softmax(outputs, dim=1)).sum(dim=1).mean()
        found = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=True, materialize_grads=True
        )
        return torch.cat([one.reshape(-1) for one in found])


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """What an inversion found: records between 0 and 1, their labels, and how far their gradient is
    from the one that was seen.
    """

    records: Tensor
    labels: Tensor
    loss: float


def recovered_labels(seen: Seen) -> Tensor:
    """The labels that the last layer's gradient shows, as many as there are records.

    >>> from dpfl.core.layout import Layout
    >>> model = nn.Linear(3, 4)
    >>> layout = Layout.of_module(model)
    >>> seen = Seen(model=model, weights=layout.read(model), gradient=torch.zeros(16),
    ...             layout=layout, records=1, classes=4, low=torch.zeros(3),
    ...             high=torch.ones(3), clipped=False)
    >>> one = torch.eye(4)[[2]]
    >>> from dataclasses import replace
    >>> recovered_labels(replace(seen, gradient=seen.gradient_of(torch.ones(1, 3), one).detach()))
    tensor([2])
    """
    tensors = seen.layout.unflatten(seen.gradient)
    rows = [one.reshape(seen.classes, -1) for one in tensors.values() if len(one) == seen.classes]
    if not rows:
        return torch.zeros(seen.records, dtype=torch.long)
    slopes = rows[-1].sum(dim=1)
    order = torch.argsort(slopes)
    return order.repeat(math.ceil(seen.records / seen.classes))[: seen.records].sort().values


def invert_gradient(
    seen: Seen,
    algorithm: Algorithm,
    *,
    iterations: int,
    generator: torch.Generator,
    tv: float = 1e-2,
) -> Inverted:
    """Reconstruct the records behind a gradient, once, from a random start."""
    noise = torch.rand(seen.records, *seen.shape, generator=generator)
    x = (0.25 + 0.5 * noise).requires_grad_()
    soft = algorithm == "dlg"
    y = torch.rand(seen.records, seen.classes, generator=generator)
    if not soft:
        y = nn.functional.one_hot(recovered_labels(seen), seen.classes).float() * 1e3
    y = y.requires_grad_(soft)
    with in_mode(seen.model, training=False):
        if algorithm == "cosine":
            loss = _by_signs(seen, x, y.detach().softmax(dim=1), iterations, tv)
        else:
            loss = _by_lbfgs(seen, x, y, iterations)
    return Inverted(records=x.detach(), labels=y.detach().argmax(dim=1), loss=loss)


def _by_lbfgs(seen: Seen, x: Tensor, y: Tensor, iterations: int) -> float:
    """Move records, and soft labels where they are open, until gradients agree."""
    wanted = [one for one in (x, y) if one.requires_grad]
    best: tuple[float, list[Tensor]] = (math.inf, [one.detach().clone() for one in wanted])
    optimizer = torch.optim.LBFGS(
        wanted,
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=_HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        nonlocal best
        optimizer.zero_grad()
        loss = mismatch(seen, seen.gradient_of(x, y.softmax(dim=1)))
        loss.backward()  # type: ignore[no-untyped-call]
        for one in wanted:
            assert one.grad is not None
            one.grad.nan_to_num_(0.0)
        if float(loss.detach()) < best[0]:
            best = float(loss.detach()), [one.detach().clone() for one in wanted]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for one, kept in zip(wanted, best[1], strict=True):
            one.copy_(kept)
    return best[0]


def mismatch(seen: Seen, gradient: Tensor) -> Tensor:
    """The squared distance of gradients, relative to what was seen."""
    target = seen.gradient
    scale = torch.ones(())
    if seen.clipped:
        scale = (gradient @ target) / (gradient @ gradient).clamp_min(1e-30)
    return (scale * gradient - target).square().sum() / target.square().sum().clamp_min(1e-30)


def _by_signs(seen: Seen, x: Tensor, y: Tensor, iterations: int, tv: float) -> float:
    """Turn gradients the same way, with steps that shrink at 3/8, 5/8 and 7/8 of the way."""
    optimizer = torch.optim.Adam([x], lr=_STEP)
    marks = [int(iterations * part / 8) for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, gamma=0.1)
    turned = 1.0
    for _ in range(iterations):
        optimizer.zero_grad()
        gradient = seen.gradient_of(x, y)
        cosine = nn.functional.cosine_similarity(gradient, seen.gradient, dim=0)
        loss = 1 - cosine + tv * total_variation(x)
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        x.grad.nan_to_num_(0.0).sign_()  # features may have no slope at a flat spot
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(0, 1)
        turned = float(1 - cosine.detach())
    return turned


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels; 0 for what is not an image."""
    if x.ndim != 4:
        return torch.zeros(())
    across = x[..., 1:] - x[..., :-1]
    down = x[..., 1:, :] - x[..., :-1, :]
    return across.abs().mean() + down.abs().mean()


def seconds_of_a_step(seen: Seen) -> float:
    """How long one step of an inversion takes, by trying one."""
    x = torch.zeros(seen.records, *seen.shape).requires_grad_()
    y = torch.full((seen.records, seen.classes), 1 / seen.classes)
    began = time.perf_counter()
    with in_mode(seen.model, training=False):
        mismatch(seen, seen.gradient_of(x, y)).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - began


def bytes_of_a_step(model: nn.Module, shape: tuple[int, ...], records: int) -> int:
    """About how much memory one step takes: parameters and activations, some ten times each."""
    sizes: list[int] = []

    def count(module: nn.Module, inputs: object, output: object) -> None:
        sizes.append(output.numel() if isinstance(output, Tensor) else 0)

    hooks = [one.register_forward_hook(count) for one in model.modules() if not [*one.children()]]
    try:
        with torch.no_grad(), in_mode(model, training=False):
            model(torch.zeros(1, *shape))
    finally:
        for hook in hooks:
            hook.remove()
    parameters = sum(one.numel() for one in trainable(model).values())
    return 4 * (8 * parameters + 10 * records * sum(sizes))
