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
        for training in (True, False):
            with in_mode(model, training=training):
                outputs = _try_records(model, shape, task, inputs)
    except DpflError:
        raise
    except Exception as error:
        what = "tokens" if isinstance(inputs, Tokens) else "records"
        problem = f"does not accept {what} of shape {shape} ({error!s:.200})"
        raise ConfigurationError("model", problem, "fit the model to the data") from error
    try:
        _try_losses(outputs, task, target_shape)
    except DpflError:
        raise
    except Exception as error:
        problem = f"its loss fails on outputs of shape {tuple(outputs.shape)} ({error!s:.200})"
        raise ConfigurationError("task", problem, "fit the loss to model and targets") from error


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


def _try_losses(outputs: Tensor, task: Task, target_shape: tuple[int, ...]) -> None:
    """Refuse a loss that is not one number per record, or that mixes records."""
    count = len(outputs)
    targets = task.made_up(count, target_shape, PublicSeed(0).generator())
    losses = task.losses(outputs, targets)
    for i in range(count):
        alone = task.losses(outputs[i : i + 1], targets[i : i + 1])
        apart = torch.allclose(losses[i : i + 1], alone, rtol=1e-3, atol=1e-4, equal_nan=True)
        remedy = "compute each record's loss from that record alone"
        check(apart, "task", "gives a record another loss when others are there", remedy)


def _try_records(model: nn.Module, shape: tuple[int, ...], task: Task, inputs: Inputs) -> Tensor:
    """Run made-up records through the model; refuse it if one of them changes another's outputs.

    Each record is replaced by another one, with the same draws of dropout. In evaluation, where
    nothing is drawn, each record is also tried alone.
    """
    count = 3 if task.width != 3 else 4  # records and classes must not be taken for each other
    generator = PublicSeed(0).generator()
    records, others = (inputs(inputs.made_up(count, shape, generator)) for _ in range(2))
    before = _scores(model, records, task)
    for i in range(count):
        mixed, unchanged = records.clone(), torch.arange(count) != i
        mixed[i] = others[i]
        pairs = [(before[unchanged], _scores(model, mixed, task)[unchanged])]
        if not model.training:
            pairs.append((before[i : i + 1], _scores(model, records[i : i + 1], task)))
        for old, new in pairs:
            apart = torch.allclose(old.double(), new.double(), rtol=1e-3, atol=1e-4)
            problem = "gives a record other scores when another one is in the batch"
            remedy = (
                "let every record be computed apart (recurrent layers, attention: batch_first=True)"
            )
            check(apart, "model", f"{problem}, so no record can be clipped on its own", remedy)
    return before


def _scores(model: nn.Module, records: Tensor, task: Task) -> Tensor:
    """Outputs for made-up records; whatever is not what the task asks for is refused."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = task.outputs(partial(outputs_of, model, {}), records)
    given, good = "no tensor", False
    if isinstance(found, Tensor):
        given = f"{found.dtype} outputs of shape {tuple(found.shape[1:])}"
        table = found.is_floating_point() and found.ndim > 0 and len(found) == len(records)
        good = table and task.accepts(found)
    check(good, "model", f"gives {given} for {task}", f"let it return {task.wanted}")
    problem = "gives scores that are not finite for made-up records"
    check(bool(torch.isfinite(found).all()), "model", problem, "check its layers")
    scores: Tensor = found
    return scores
