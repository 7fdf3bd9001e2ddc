"""Clipped per-record gradients of a whole model in one forward and one backward, by the rules of
its layers.

*Formal guarantees.* The sum returned is over per-record gradients of norm at most ``clip`` each,
provided that the model treats records apart (:func:`dpfl.models.check_model` tries it) and calls
each of its layers once. A layer called twice is noticed and refused here, as is one whose output
was changed in place; the caller then writes per-record gradients out. Before a model is computed
this way at all, it is tried on made-up records against the slow path (:func:`agrees`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import Inputs
from dpfl.engine.base import Job
from dpfl.engine.layer_rules import RULES, recurrent
from dpfl.engine.one_by_one import OneByOne, on_copies, record_norms
from dpfl.engine.pieces import Piece
from dpfl.engine.recurrent import Tap, unrollable, unrolled
from dpfl.numerics.clipping import LARGEST_INPUT, LARGEST_NORM, clip_factor

MICRO_BATCH = 256
_AGREEMENT = (
    1e-2  # deep networks round that differently; a piece left out, or a record mistaken, costs more
)
_MOST_NUMBERS = 1 << 27  # float32 numbers held for one micro-batch


class NotBookable(Exception):
    """The model does something that the layers' rules do not cover."""


def bookable(model: nn.Module) -> bool:
    """Whether every parameter belongs to a layer that has a rule."""
    covered = {id(p) for m in _layers(model) for p in m.parameters(recurse=False)}
    return {id(p) for p in model.parameters()} == covered and not any(
        isinstance(m, nn.Embedding) and (m.max_norm is not None or m.scale_grad_by_freq)
        for m in model.modules()
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    return [
        m
        for m in model.modules()
        if type(m) in RULES or (isinstance(m, nn.RNNBase) and unrollable(m))
    ]


@dataclass(frozen=True)
class Watch:
    """What is looked up in a model once for many steps: its layers' names, and how it is to be
    called.
    """

    names: dict[nn.Module, str]
    flattened: list[nn.Module]
    in_place: bool
    tied: bool

    @classmethod
    def of(cls, model: nn.Module) -> Watch:
        """Look at a model as it is now."""
        layers, modules = set(_layers(model)), dict(model.named_modules())
        return cls(
            {module: name for name, module in modules.items() if module in layers},
            [module for module in modules.values() if type(module) is nn.Flatten],
            any(getattr(module, "inplace", False) for module in modules.values()),
            len(list(model.parameters()))
            < sum(1 for _ in model.named_parameters(remove_duplicate=False)),
        )


@dataclass
class _Book:
    """What one forward leaves behind: every layer's input, and the tensors whose gradients are
    wanted.
    """

    names: dict[nn.Module, str]
    copies: bool
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    versions: dict[nn.Module, int] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    output_versions: dict[nn.Module, int] = field(default_factory=dict)
    taps: dict[nn.Module, list[Tap]] = field(default_factory=dict)

    def keep(
        self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """Write down a layer's input and output, as a forward hook."""
        self._once(module)
        self.inputs[module] = arguments[0].detach()
        self.versions[module] = arguments[0]._version
        self.outputs[module] = output if output.requires_grad else output.requires_grad_()
        self.output_versions[module] = (
            output._version
        )  # torch itself may have added a bias in place: that is not later
        return (
            output.clone() if self.copies else None
        )  # an activation may work in place on what follows

    def unroll(self, module: nn.RNNBase, x: Tensor, *state: Any) -> tuple[Tensor, Any]:
        """Stand in for a recurrent layer."""
        self._once(module)
        if state or not isinstance(x, Tensor) or x.ndim != 3:
            raise NotBookable(
                f"layer '{self.names[module]}' is given a state, or packed or single texts"
            )
        output, last, self.taps[module] = unrolled(module, x)
        return output, last

    def _once(self, module: nn.Module) -> None:
        if module in self.inputs or module in self.taps:
            raise NotBookable(f"layer '{self.names[module]}' is called twice")

    def wanted(self) -> list[Tensor]:
        """All tensors whose gradients are wanted, in a fixed order."""
        changed = any(
            output._version != self.output_versions[module]
            for module, output in self.outputs.items()
        )
        if changed and not self.copies:
            raise NotBookable("a layer's output was changed in place")
        if any(
            self.inputs[module]._version != version for module, version in self.versions.items()
        ):
            raise NotBookable("a layer's input was changed in place after it was read")
        return [
            *self.outputs.values(),
            *(gate for taps in self.taps.values() for tap in taps for gate in tap.gates),
        ]


@contextmanager
def _watched(watch: Watch, book: _Book) -> Iterator[None]:
    hooks = [
        module.register_forward_hook(book.keep) for module in book.names if type(module) in RULES
    ]
    stood_in = [module for module in book.names if isinstance(module, nn.RNNBase)]
    for module in stood_in:
        module.forward = lambda x, *state, _module=module: book.unroll(_module, x, *state)
    try:
        with _slopes_laid_out(watch):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in stood_in:
            del module.forward


@contextmanager
def _slopes_laid_out(watch: Watch) -> Iterator[None]:
    hooks = [module.register_forward_pre_hook(_lay_out_slopes) for module in watch.flattened]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _lay_out_slopes(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Lay out the gradient of what is flattened as the image is: else torch copies larger ones back
    and forth.
    """
    if arguments[0].requires_grad and arguments[0].ndim == 4:
        arguments[0].register_hook(fast_layout)  # type: ignore[no-untyped-call]


def clipped_sum(
    model: nn.Module,
    layout: Layout,
    vector: Tensor,
    features: Tensor,
    labels: Tensor,
    clip: float,
    watch: Watch | None = None,
) -> Tensor:
    """Sum in double precision of per-record gradients, each within ``clip``; a non-finite one
    counts as zero.
    """
    if len(labels) == 0:
        return torch.zeros_like(vector, dtype=torch.float64)
    watch = Watch.of(model) if watch is None else watch
    book = _Book(watch.names, copies=watch.in_place)
    with _watched(watch, book), torch.enable_grad():
        state = on_copies(model, layout.unflatten(vector))
        logits = functional_call(model, state, (fast_layout(features),), tie_weights=watch.tied)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        slopes = torch.autograd.grad(loss, book.wanted(), allow_unused=True)
    with torch.no_grad():
        return _combined(layout, book, list(slopes), clip, record_norms(features))


def fast_layout(tensor: Tensor) -> Tensor:
    """Channels last for images and kernels: pooling and convolution are several times faster that
    way on a CPU.
    """
    if tensor.ndim != 4:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    if (
        tensor.shape[1] == 1
    ):  # one channel is contiguous either way, and torch takes it for channels first
        _, _, height, width = tensor.shape
        return tensor.as_strided(tensor.shape, (height * width, 1, width, 1))
    return tensor


def _combined(
    layout: Layout, book: _Book, slopes: list[Tensor | None], clip: float, of_records: Tensor
) -> Tensor:
    device = of_records.device
    pieces, squares = _pieces(
        book, slopes, torch.zeros_like(of_records, dtype=torch.bool), spoilt=False
    )
    broken = ~(
        squares <= LARGEST_NORM**2
    )  # whatever is not finite in a or d shows here, and so does their product
    broken |= ~(of_records <= LARGEST_NORM)
    for _, piece in pieces:
        if piece.of_inputs is not None:
            broken |= ~(piece.of_inputs <= LARGEST_INPUT**2)
    if bool(broken.any()):
        pieces, squares = _pieces(book, slopes, broken, spoilt=True)
    # In units of the clip: products with the factor itself may fall below the smallest normal
    # number where a clip is small or an input large, and their rounding could then exceed the clip.
    factor = (clip_factor(squares.sqrt(), clip) / clip).to(torch.float32)
    total = torch.zeros(layout.size, dtype=torch.float64, device=device)
    blocks = {block.name: block for block in layout}
    for module, piece in pieces:
        prefix = f"{book.names[module]}." if book.names[module] else ""
        for name, gradient in piece.weighted(factor).items():
            total[blocks[prefix + name].slice] = gradient.reshape(-1)
    return total.mul_(clip)


def _pieces(
    book: _Book, slopes: list[Tensor | None], broken: Tensor, *, spoilt: bool
) -> tuple[list[tuple[nn.Module, Piece]], Tensor]:
    """Ask every layer's rule; broken records are taken out first, because zero times infinity is
    not zero.
    """

    def whole(x: Tensor) -> Tensor:
        return x.masked_fill(broken.reshape(-1, *[1] * (x.ndim - 1)), 0) if spoilt else x

    pieces: list[tuple[nn.Module, Piece]] = []
    found = iter(slopes)
    for module in book.outputs:
        d = next(found)
        if d is not None:
            pieces.append(
                (module, RULES[type(module)](module, whole(book.inputs[module]), whole(d)))
            )
    for module, taps in book.taps.items():
        for tap in taps:
            each = [next(found) for _ in tap.gates]
            if all(d is not None for d in each):
                halves = [whole(d) for d in each if d is not None]
                pieces.append(
                    (
                        module,
                        recurrent(module, tap.suffix, whole(tap.inputs), whole(tap.hidden), halves),
                    )
                )
    squares = torch.zeros(len(broken), dtype=torch.float64, device=broken.device)
    for _, piece in pieces:
        squares += piece.squares
    return pieces, squares


def numbers_per_record(model: nn.Module, features: Tensor) -> int:
    """About how many numbers book-keeping holds for one record: inputs, outputs and their
    gradients, and patches.
    """
    total = 0

    def count(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        nonlocal total
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            total += 2 * first.numel() + (
                arguments[0].numel() if isinstance(arguments[0], Tensor) else 0
            )
            if isinstance(module, nn.Conv2d):
                total += first.numel() // module.out_channels * math.prod(module.weight.shape[1:])
            if isinstance(module, nn.RNNBase):
                total += 16 * first.numel() * module.num_layers

    hooks = [m.register_forward_hook(count) for m in model.modules() if not list(m.children())]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # dropout must not draw here
            functional_call(
                model, on_copies(model, dict(model.named_parameters())), (features[:1],)
            )
    finally:
        for hook in hooks:
            hook.remove()
    return max(total, 1)


def agrees(
    model: nn.Module, layout: Layout, inputs: Inputs, shape: tuple[int, ...], device: torch.device
) -> bool:
    """Try both paths on made-up records: the rules of layers cannot see what a model does between
    them.

    Two batch sizes, because a layer's first axis may have a record's length by chance; a clip that
    all records exceed, so that every norm counts. Dropout is off, since the two paths draw
    differently. Whatever goes wrong means no.
    """
    modes = {module: module.training for module in model.modules()}
    generator = PublicSeed(0).generator()
    vector = layout.read(model).to(device)
    try:
        model.eval()
        for count in (2, 3):
            features = inputs(inputs.made_up(count, shape, generator).to(device))
            labels = torch.arange(count, device=device) % 2
            exact = OneByOne(str(device), one_at_a_time=True).clipped_sum(
                model, layout, vector, features, labels, 1e-6
            )
            fast = clipped_sum(model, layout, vector, features, labels, 1e-6)
            if not float((fast - exact).norm()) <= _AGREEMENT * float(exact.norm()):
                return False
        return True
    except Exception:
        return False
    finally:
        for module, mode in modes.items():
            module.training = mode


class Booked(OneByOne):
    """One client after the other, in one pass per step wherever the layers' rules cover the
    model.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        # By the model itself: an address may be another model's tomorrow.
        self._sizes: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = WeakKeyDictionary()
        self._agrees: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], bool]] = (
            WeakKeyDictionary()
        )
        self._watches: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()

    def run(self, model: nn.Module, layout: Layout, jobs: Sequence[Job]) -> list[Tensor]:
        """Run every job, in one pass per step if a trial shows that it gives what the slow path
        gives.
        """
        plain = OneByOne(str(self.device))
        self._watches.pop(model, None)  # it may have changed since
        for job in jobs:
            shape, known = tuple(job.features.shape[1:]), self._agrees.setdefault(model, {})
            if shape not in known and any(phase.clip is not None for phase in job.phases):
                known[shape] = agrees(model, layout, job.inputs, shape, self.device)
            if not known.get(shape, True):
                return plain.run(model, layout, jobs)
        return super().run(model, layout, jobs)

    def _at_once(self, model: nn.Module, features: Tensor) -> int:
        """How many records fit into bounded memory; a function of model and shape alone."""
        shape, known = tuple(features.shape[1:]), self._sizes.setdefault(model, {})
        if shape not in known:
            each = numbers_per_record(model, features.to(next(model.parameters()).device))
            known[shape] = min(MICRO_BATCH, max(1, _MOST_NUMBERS // each))
        return known[shape]

    def _watch(self, model: nn.Module) -> Watch:
        return self._watches.get(model) or self._watches.setdefault(model, Watch.of(model))

    def mean_gradient(
        self, model: nn.Module, layout: Layout, vector: Tensor, features: Tensor, labels: Tensor
    ) -> Tensor:
        """Gradient of the mean loss of a batch, with images in the layout that is fastest."""
        with _slopes_laid_out(self._watch(model)):
            return super().mean_gradient(model, layout, vector, fast_layout(features), labels)

    def clipped_sum(
        self,
        model: nn.Module,
        layout: Layout,
        vector: Tensor,
        features: Tensor,
        labels: Tensor,
        clip: float,
    ) -> Tensor:
        """Sum of clipped per-record gradients, in micro-batches of bounded memory."""
        watch = self._watch(model)
        try:
            at_once = self._at_once(model, features) if len(labels) > 1 else MICRO_BATCH
            if len(labels) <= at_once:
                return clipped_sum(model, layout, vector, features, labels, clip, watch)
            parts = zip(torch.split(features, at_once), torch.split(labels, at_once), strict=True)
            empty = torch.zeros_like(vector, dtype=torch.float64)
            return sum(
                (clipped_sum(model, layout, vector, x, y, clip, watch) for x, y in parts), empty
            )
        except NotBookable:
            return super().clipped_sum(model, layout, vector, features, labels, clip)
