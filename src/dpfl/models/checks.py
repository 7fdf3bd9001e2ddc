"""The checks that any ``nn.Module`` of the user's must pass before it is trained.

Clipping one record at a time means something only where a model treats records apart. Layers that
are known to mix them are refused by name; what a model does between its layers is tried.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import nn

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.layout import trainable
from dpfl.core.threads import one_thread
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.models.outputs import outputs_of as outputs_of
from dpfl.models.records_apart import nothing_written, try_losses, try_records
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


@one_thread()  # trials are small, and processes must not fight over cores
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
    check(
        type(inputs) in get_args(Inputs),
        "federation",
        f"records are read by a {type(inputs).__name__}, which may mix them",
        "use Numbers, Pixels or Tokens",
    )
    for name, module in model.named_modules():
        _check_layer(f"model layer '{name}'", module)
    _check_parameters(model)
    task = Classification(classes=task) if isinstance(task, int) else task
    try:
        with nothing_written(model):
            for training in (True, False):
                with in_mode(model, training=training):
                    outputs = try_records(model, shape, task, inputs)
    except DpflError:
        raise
    except Exception as error:
        what = "tokens" if isinstance(inputs, Tokens) else "records"
        raise ConfigurationError(
            "model",
            f"does not accept {what} of shape {shape} ({error!s:.200})",
            "fit the model to the data",
        ) from error
    try:
        with nothing_written(model):
            try_losses(outputs, task, target_shape)
    except DpflError:
        raise
    except Exception as error:
        raise ConfigurationError(
            "task",
            f"its loss fails on outputs of shape {tuple(outputs.shape)} ({error!s:.200})",
            "fit the loss to model and targets",
        ) from error


def _check_layer(where: str, module: nn.Module) -> None:
    """Refuse a layer that mixes records, and an adapter whose base is trained beside it."""
    constant = not module.training and getattr(module, "running_mean", None) is not None
    problem = "mixes the records of a batch and keeps their statistics, which nobody charges"
    check(
        constant or not keeps_statistics(module),
        where,
        f"{type(module).__name__} {problem}",
        "call .eval() on the layer to keep its statistics as they are, or replace it: "
        "dpfl.models.replace_batch_norm(model)",
    )
    # It would show which tokens there are, without any noise.
    renormalised = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm
    check(
        not renormalised,
        where,
        "has a max_norm, by which every token in a batch is written into the weights",
        "leave max_norm out",
    )
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module) and hasattr(module, "adapter_layer_names"):
        free = [name for name in trainable(base) if name.rpartition(".")[2] != "bias"]
        check(
            not free,
            where,
            f"is an adapter whose base is trainable ({', '.join(free)})",
            "freeze the base: layer.base_layer.requires_grad_(False)",
        )


def _check_parameters(model: nn.Module) -> None:
    check(
        next(model.parameters(), None) is not None,
        "model",
        "has no parameters",
        "give a model that can be trained",
    )
    learned = trainable(model)
    check(
        bool(learned),
        "model",
        "has frozen parameters only",
        "set requires_grad on the parameters to be learned",
    )
    for name, parameter in learned.items():
        check(
            parameter.dtype is torch.float32,
            f"model parameter '{name}'",
            f"is {parameter.dtype}",
            "use float32: model.float()",
        )
