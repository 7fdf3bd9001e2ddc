"""Try on made-up records whether a model and a loss treat records apart, and keep none of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from dpfl.core.checks import check
from dpfl.core.layout import trainable
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import Inputs
from dpfl.models.outputs import outputs_of
from dpfl.tasks import Task

_MANY = 300  # records on which a loss is tried: more than are computed at once
_LARGE = 33  # records on which a model is tried
_MOST_NUMBERS = 1 << 22  # of their outputs


@contextmanager
def nothing_written(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose parameters change when it is applied: records would stay in them.

    Parameters are then put back. Buffers may change, since only copies of them do.
    """
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    yield
    after = {name: own.detach() for name, own in model.named_parameters()}
    written = [
        name
        for name, own in after.items()
        if not torch.equal(own.nan_to_num(), before[name].nan_to_num())
    ]
    for name in written:
        after[name].copy_(before[name])
    check(
        not written,
        f"model parameter '{next(iter(written), '')}'",
        "changes when the model is applied, so that records would stay in it without noise",
        "leave that out, or keep it in a buffer, which stays as is",
    )


def _apart(old: Tensor, new: Tensor) -> bool:
    """Whether two computations of the same records agree, as far as rounding lets them.

    What is small is held against its own size: a mixture must not pass because all of it is small.
    """
    old = old.double()
    new = new.double()
    size = float(old.nan_to_num(0.0, 0.0, 0.0).abs().max()) if old.numel() else 0.0
    return torch.allclose(old, new, rtol=1e-3, atol=min(1e-4, 1e-3 * size), equal_nan=True)


def try_losses(outputs: Tensor, task: Task, target_shape: tuple[int, ...]) -> None:
    """Refuse a loss that is not one number per record, or that mixes records.

    Tried on few records and on many: a loss may look for the hardest ones of a large batch.
    """
    most = min(_MANY, _MOST_NUMBERS // max(1, outputs[0].numel()))
    for count in {len(outputs), max(len(outputs), most)}:
        some = outputs[torch.arange(count) % len(outputs)]
        targets = task.made_up(count, target_shape, PublicSeed(0).generator())
        losses = task.losses(some, targets)
        for i in range(0, count, max(1, count // 16)):
            alone = task.losses(some[i : i + 1], targets[i : i + 1])
            problem = "gives a record "
            check(
                _apart(losses[i : i + 1], alone),
                "task",
                f"{problem}another loss when others are there",
                "compute each record's loss from that record alone",
            )


def _moved(model: nn.Module) -> dict[str, Tensor]:
    """The learned parameters moved by about a tenth: behind a layer of zeros nothing shows."""
    generator = PublicSeed(1).generator()
    found = {}
    for name, own in trainable(model).items():
        size = float(own.detach().square().mean().sqrt()) or 1.0
        shift = 2 * torch.rand(own.shape, generator=generator) - 1
        found[name] = own.detach() + 0.2 * size * shift.to(own.device)
    return found


def try_records(model: nn.Module, shape: tuple[int, ...], task: Task, inputs: Inputs) -> Tensor:
    """Run made-up records through the model; refuse it if one of them changes another's outputs.

    Each record is replaced by another one, with the same draws of dropout. In evaluation, where
    nothing is drawn, each record is also tried alone. Returns the outputs of the model as it is;
    records are tried with weights that are moved a little, unless these give nothing finite.
    """
    count = 3 if task.width != 3 else 4  # records and classes must not be taken for each other
    records, others = _made_up(inputs, shape, count)
    written = records._version  # torch counts what writes to a tensor or to a view of it
    given = _scores(model, {}, records, task)
    check(
        records._version == written,
        "model",
        "writes into the records that it is given",
        "let no first layer be in place",
    )
    check(
        bool(torch.isfinite(given).all()),
        "model",
        "gives scores that are not finite for made-up records",
        "check its layers",
    )
    remembered = _attributes(model)
    moved = _moved(model)
    if not bool(torch.isfinite(_scores(model, moved, records, task)).all()):
        moved = {}
    problem = "gives a record other scores when another one is in the batch"
    remedy = "let every record be computed apart (recurrent layers, attention: batch_first)"
    scores = partial(_scores, model, moved, task=task)
    alone = not model.training
    pairs = _pairs(scores, records, others, alone=alone)
    most = min(_LARGE, _MOST_NUMBERS // max(1, given[0].numel(), records[0].numel()))
    if most > count:
        pairs = chain(pairs, _large(scores, *_made_up(inputs, shape, most), alone=alone))
    check(
        all(_apart(old, new) for old, new in pairs),
        "model",
        f"{problem}, so no record can be clipped on its own",
        remedy,
    )
    for name, value in _attributes(model).items():
        same = name not in remembered or remembered[name].shape != value.shape
        same = same or torch.equal(remembered[name], value)
        check(
            same,
            f"model attribute '{name}'",
            "is another one with other records, and so keeps something of them",
            "let the model keep nothing of its input from one batch to the next",
        )
    return given


def _made_up(inputs: Inputs, shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Two batches of made-up records."""
    generator = PublicSeed(0).generator()
    first, second = (inputs(inputs.made_up(count, shape, generator)) for _ in range(2))
    return first, second


def _pairs(
    scores: Callable[[Tensor], Tensor], records: Tensor, others: Tensor, *, alone: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores that must agree: each record is replaced in turn, or left ``alone``."""
    before = scores(records)
    for i in range(len(records)):
        mixed = records.clone()
        unchanged = torch.arange(len(records)) != i
        mixed[i] = others[i]
        yield before[unchanged], scores(mixed)[unchanged]
        if alone:
            yield before[i : i + 1], scores(records[i : i + 1])


def _large(
    scores: Callable[[Tensor], Tensor], records: Tensor, others: Tensor, *, alone: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same in a large batch: its first half is replaced, or its last records are left
    ``alone``, since experts may have room for the first ones only.
    """
    half = len(records) // 2
    before = scores(records)
    yield before[half:], scores(torch.cat([others[:half], records[half:]]))[half:]
    if alone:
        yield before[-2:], scores(records[-2:])


def _attributes(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the tensors that a model holds beside its parameters and buffers.

    Caches that depend on the shape of records stay the same while that does.
    """
    return {
        f"{name}.{attribute}".removeprefix("."): value.detach().clone()
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _seed(model: nn.Module) -> Callable[[int], object]:
    """Seed what a model's dropout draws from; on the CPU, no accelerator is looked for."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return torch.default_generator.manual_seed if on_cpu else torch.manual_seed


def _scores(model: nn.Module, weights: dict[str, Tensor], records: Tensor, task: Task) -> Tensor:
    """Outputs for made-up records; whatever is not what the task asks for is refused."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _seed(model)(0)
        found = task.outputs(partial(outputs_of, model, weights), records)
    given = "no tensor"
    good = False
    if isinstance(found, Tensor):
        given = f"{found.dtype} outputs of shape {tuple(found.shape[1:])}"
        table = found.is_floating_point() and found.ndim > 0 and len(found) == len(records)
        good = table and task.accepts(found)
    check(good, "model", f"gives {given} for {task}", f"let it return {task.wanted}")
    scores: Tensor = found
    return scores
