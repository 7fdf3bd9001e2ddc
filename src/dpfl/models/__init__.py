"""Models by name, and the checks that any ``nn.Module`` of the user's must pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dpfl.core.errors import ConfigurationError, unknown_name
from dpfl.core.random import PublicSeed

_MIXES_RECORDS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


@dataclass(frozen=True)
class ModelSource:
    """How to build a model for records of a shape and a number of classes."""

    build: Callable[[tuple[int, ...], int, int], nn.Module]
    about: str


def _logistic(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _mlp(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


MODELS: dict[str, ModelSource] = {
    "logistic": ModelSource(_logistic, "multinomial logistic regression"),
    "mlp": ModelSource(_mlp, "one hidden layer of `hidden` rectified units"),
}


def make_model(name: str, shape: tuple[int, ...], classes: int, seed: PublicSeed, hidden: int = 64) -> nn.Module:
    """Build a model with a reproducible start that does not touch the global generator.

    >>> sum(p.numel() for p in make_model("logistic", (64,), 10, PublicSeed(0)).parameters())
    650
    """
    if name not in MODELS:
        raise unknown_name("model", "model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed.value % 2**63)
        return MODELS[name].build(shape, classes, hidden)


def check_model(model: nn.Module, shape: tuple[int, ...], classes: int, *, per_record: bool) -> None:
    """Refuse what cannot be trained here, by name, with what to use instead."""
    for name, module in model.named_modules():
        if per_record and isinstance(module, _MIXES_RECORDS):
            raise ConfigurationError(
                f"model layer '{name}'",
                f"{type(module).__name__} mixes the records of a batch, so no record can be clipped on its own",
                "use GroupNorm or LayerNorm instead",
            )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigurationError("model", "has no parameters", "give a model that can be trained")
    frozen = next((name for name, p in parameters.items() if not p.requires_grad), None)
    if frozen is not None:
        raise ConfigurationError(
            f"model parameter '{frozen}'", "is frozen", "set requires_grad, or take it out of the model"
        )
    if len({id(p) for _, p in model.named_parameters(remove_duplicate=False)}) != len(
        list(model.named_parameters(remove_duplicate=False))
    ):
        raise ConfigurationError("model", "shares (ties) parameters between layers", "give each layer its own")
    try:
        with torch.no_grad():
            was_training = model.training
            outputs = model.eval()(torch.zeros(2, *shape))
            model.train(was_training)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(
            "model", f"does not accept records of shape {shape} ({error})", "fit the model to the data"
        ) from error
    if outputs.ndim != 2 or outputs.shape[0] != 2 or outputs.shape[1] < classes:
        raise ConfigurationError(
            "model",
            f"gives outputs of shape {tuple(outputs.shape[1:])} for {classes} classes",
            f"let its last layer have {classes} outputs",
        )
