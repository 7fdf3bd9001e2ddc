"""The checks that any ``nn.Module`` of the user's must pass before it is trained.

Clipping one record at a time means something only where a model treats records apart. Layers that
are known to mix them are refused by name; what a model does between its layers is tried.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.layout import trainable
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.tasks import Classification, Task

_MANY = 300  # records on which a loss is tried: more than are computed at once
_MOST_NUMBERS = 1 << 22  # of their outputs


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode, and each of its layers back afterwards.

    A layer that keeps running statistics stays in evaluation mode if it is: they are constants.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        for module, mode in modes.items():
            if keeps_statistics(module):
                module.training = mode and training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer normalises by statistics over records, which it keeps."""
    mixes = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return mixes or bool(getattr(module, "track_running_stats", False))


def outputs_of(model: nn.Module, parameters: dict[str, Tensor], features: Tensor) -> Any:
    """What a model with these parameters gives for a batch.

    Frozen parameters are the model's own. What a layer writes into a buffer stays in a copy. Of an
    output object with ``logits``, as Hugging Face's models give, those are taken.
    """
    device = features.device
    own = {name: buffer.to(device, copy=True) for name, buffer in model.named_buffers()}
    frozen = (pair for pair in model.named_parameters() if pair[0] not in parameters)
    own |= {name: tensor.to(device) for name, tensor in frozen if tensor.device != device}
    with _every_layer_called():
        found = functional_call(model, {**own, **parameters}, (features,))
    return found if isinstance(found, Tensor) else getattr(found, "logits", found)


@contextmanager
def _every_layer_called() -> Iterator[None]:
    """Switch off torch's fused transformer layers, which pass over the layers they consist of."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def check_model(
    model: nn.Module,
    shape: tuple[int, ...],
    task: Task | int,
    inputs: Inputs = NUMBERS,
    target_shape: tuple[int, ...] = (),
) -> None:
    """Refuse what cannot be trained here, by name, with what to use instead.

    ``shape`` is that of one record, ``target_shape`` that of one target, and ``inputs`` says how
    records are read. The model must give what ``task`` asks for, and the task a loss per record. A
    number stands for a classification with so many classes.

    >>> check_model(nn.ReLU(), (4,), 4)
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: model: has no parameters; give a model that can be trained
    """
    for name, module in model.named_modules():
        _check_layer(f"model layer '{name}'", module)
    _check_parameters(model)
    task = Classification(classes=task) if isinstance(task, int) else task
    try:
        with _nothing_written(model):
            for training in (True, False):
                with in_mode(model, training=training):
                    outputs = _try_records(model, shape, task, inputs)
            _try_losses(outputs, task, target_shape)
    except DpflError:
        raise
    except Exception as error:
        what = "tokens" if isinstance(inputs, Tokens) else "records"
        problem = f"does not accept {what} of shape {shape} ({error!s:.200})"
        raise ConfigurationError("model", problem, "fit the model to the data") from error


def _check_layer(where: str, module: nn.Module) -> None:
    """Refuse a layer that mixes records, and an adapter whose base is trained beside it."""
    constant = not module.training and getattr(module, "running_mean", None) is not None
    problem = "mixes the records of a batch and keeps their statistics, which nobody charges"
    remedy = (
        "call .eval() on the layer to keep its statistics as they are, or replace it: "
        "dpfl.models.replace_batch_norm(model)"
    )
    good = constant or not keeps_statistics(module)
    check(good, where, f"{type(module).__name__} {problem}", remedy)
    # It would show which tokens there are, without any noise.
    renormalised = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm
    problem = "has a max_norm, by which every token in a batch is written into the weights"
    check(not renormalised, where, problem, "leave max_norm out")
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module) and hasattr(module, "adapter_layer_names"):
        free = [name for name in trainable(base) if name.rpartition(".")[2] != "bias"]
        problem = f"is an adapter whose base is trainable ({', '.join(free)})"
        check(not free, where, problem, "freeze the base: layer.base_layer.requires_grad_(False)")


def _check_parameters(model: nn.Module) -> None:
    some = next(model.parameters(), None) is not None
    check(some, "model", "has no parameters", "give a model that can be trained")
    learned = trainable(model)
    remedy = "set requires_grad on the parameters to be learned"
    check(bool(learned), "model", "has frozen parameters only", remedy)
    for name, parameter in learned.items():
        where, single = f"model parameter '{name}'", parameter.dtype is torch.float32
        check(single, where, f"is {parameter.dtype}", "use float32: model.float()")


@contextmanager
def _nothing_written(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose parameters change when it is applied: records would stay in them.

    Parameters are then put back. Buffers may change, since only copies of them do.
    """
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    yield
    after = {name: own.detach() for name, own in model.named_parameters()}
    written = [name for name, own in after.items() if not _same(own, before[name])]
    for name in written:
        after[name].copy_(before[name])
    where = f"model parameter '{next(iter(written), '')}'"
    problem = "changes when the model is applied, so that records would stay in it without noise"
    check(not written, where, problem, "leave that out, or keep it in a buffer, which stays as is")


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _apart(old: Tensor, new: Tensor) -> bool:
    """Whether two computations of the same records agree, as far as rounding lets them.

    What is small is held against its own size: a mixture must not pass because all of it is small.
    """
    old, new = old.double(), new.double()
    size = float(old.nan_to_num(0.0, 0.0, 0.0).abs().max()) if old.numel() else 0.0
    return torch.allclose(old, new, rtol=1e-3, atol=min(1e-4, 1e-3 * size), equal_nan=True)


def _try_losses(outputs: Tensor, task: Task, target_shape: tuple[int, ...]) -> None:
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
            remedy, problem = "compute each record's loss from that record alone", "gives a record "
            apart = _apart(losses[i : i + 1], alone)
            check(apart, "task", f"{problem}another loss when others are there", remedy)


def _moved(model: nn.Module) -> dict[str, Tensor]:
    """The learned parameters moved by about a tenth: behind a layer of zeros nothing shows."""
    generator, found = PublicSeed(1).generator(), {}
    for name, own in trainable(model).items():
        size = float(own.detach().square().mean().sqrt()) or 1.0
        shift = 2 * torch.rand(own.shape, generator=generator) - 1
        found[name] = own.detach() + 0.2 * size * shift.to(own.device)
    return found


def _try_records(model: nn.Module, shape: tuple[int, ...], task: Task, inputs: Inputs) -> Tensor:
    """Run made-up records through the model; refuse it if one of them changes another's outputs.

    Each record is replaced by another one, with the same draws of dropout. In evaluation, where
    nothing is drawn, each record is also tried alone. Returns the outputs of the model as it is;
    records are tried with weights that are moved a little, unless these give nothing finite.
    """
    count = 3 if task.width != 3 else 4  # records and classes must not be taken for each other
    generator = PublicSeed(0).generator()
    records, others = (inputs(inputs.made_up(count, shape, generator)) for _ in range(2))
    given = _scores(model, {}, records, task)
    problem = "gives scores that are not finite for made-up records"
    check(bool(torch.isfinite(given).all()), "model", problem, "check its layers")
    before = _scores(model, moved := _moved(model), records, task)
    if not bool(torch.isfinite(before).all()):
        before, moved = given, {}
    for i in range(count):
        mixed, unchanged = records.clone(), torch.arange(count) != i
        mixed[i] = others[i]
        pairs = [(before[unchanged], _scores(model, moved, mixed, task)[unchanged])]
        if not model.training:
            pairs.append((before[i : i + 1], _scores(model, moved, records[i : i + 1], task)))
        problem = "gives a record other scores when another one is in the batch"
        remedy = "let every record be computed apart (recurrent layers: batch_first=True)"
        apart = all(_apart(old, new) for old, new in pairs)
        check(apart, "model", f"{problem}, so no record can be clipped on its own", remedy)
    return given


def _scores(model: nn.Module, weights: dict[str, Tensor], records: Tensor, task: Task) -> Tensor:
    """Outputs for made-up records; whatever is not what the task asks for is refused."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = task.outputs(partial(outputs_of, model, weights), records)
    given, good = "no tensor", False
    if isinstance(found, Tensor):
        given = f"{found.dtype} outputs of shape {tuple(found.shape[1:])}"
        table = found.is_floating_point() and found.ndim > 0 and len(found) == len(records)
        good = table and task.accepts(found)
    check(good, "model", f"gives {given} for {task}", f"let it return {task.wanted}")
    scores: Tensor = found
    return scores
