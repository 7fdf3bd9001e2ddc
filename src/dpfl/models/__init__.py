"""Models by name, and the checks that any ``nn.Module`` of the user's must pass."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.func import functional_call

from dpfl.core.errors import ConfigurationError, DpflError, unknown_name
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Tokens
from dpfl.models import networks

TEXT_MODELS: dict[str, networks.BuildText] = {
    "lstm": networks.lstm,
    "lstm_shakespeare": networks.lstm_shakespeare,
}
MODELS: dict[str, networks.Build] = {
    "alexnet": networks.alexnet,
    "cnn": networks.cnn,
    "cnn_cifar": networks.cnn_cifar,
    "cnn_small": networks.cnn_small,
    "lenet5": networks.lenet5,
    "logistic": networks.logistic,
    "mlp": networks.mlp,
    "resnet18": networks.resnet18,
}


def about(name: str) -> str:
    """Return the first line of a model's own description."""
    return (inspect.getdoc((MODELS | TEXT_MODELS)[name]) or "").splitlines()[0]


def make_model(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    seed: PublicSeed,
    hidden: int = 64,
    inputs: Inputs = NUMBERS,
) -> nn.Module:
    """Build a model with a reproducible start that does not touch the global generator.

    >>> sum(p.numel() for p in make_model("logistic", (64,), 10, PublicSeed(0)).parameters())
    650
    """
    if name not in MODELS | TEXT_MODELS:
        raise unknown_name("model", "model", name, [*MODELS, *TEXT_MODELS])
    reads_tokens = isinstance(inputs, Tokens)
    if reads_tokens != (name in TEXT_MODELS):
        have, want = ("tokens", "numbers") if reads_tokens else ("numbers", "tokens")
        raise ConfigurationError(
            f"model '{name}'",
            f"reads {want}, and the data are {have}",
            f"choose one of {', '.join(sorted(TEXT_MODELS if reads_tokens else MODELS))}",
        )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed.value % 2**63)
            if isinstance(inputs, Tokens):
                return TEXT_MODELS[name](inputs.vocabulary, classes, hidden)
            return MODELS[name](shape, classes, hidden)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"model '{name}'",
            f"cannot take records of shape {shape} ({error})",
            "choose another model",
        ) from error


def check_model(
    model: nn.Module, shape: tuple[int, ...], classes: int, inputs: Inputs = NUMBERS
) -> None:
    """Refuse what cannot be trained here, by name, with what to use instead."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(
            module, "track_running_stats", False
        ):
            raise ConfigurationError(
                f"model layer '{name}'",
                f"{type(module).__name__} mixes the records of a batch and keeps their statistics, which nobody bills",
                "use GroupNorm or LayerNorm instead",
            )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ConfigurationError("model", "has no parameters", "give a model that can be trained")
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.float32:
            raise ConfigurationError(
                f"model parameter '{name}'", f"is {parameter.dtype}", "use float32: model.float()"
            )
        if not parameter.requires_grad:
            raise ConfigurationError(
                f"model parameter '{name}'",
                "is frozen",
                "set requires_grad, or take it out of the model",
            )
    everywhere = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(everywhere)) != len(everywhere):
        raise ConfigurationError(
            "model", "shares (ties) parameters between layers", "give each layer its own"
        )
    count = 3 if classes != 3 else 4  # records and classes must not be taken for each other
    outputs = _tried(model, shape, inputs, count)
    if (
        not isinstance(outputs, torch.Tensor)
        or not outputs.is_floating_point()
        or outputs.ndim != 2
        or outputs.shape[0] != count
        or outputs.shape[1] < classes
    ):
        given = "no tensor"
        if isinstance(outputs, torch.Tensor):
            given = f"{str(outputs.dtype).removeprefix('torch.')} outputs of shape {tuple(outputs.shape[1:])}"
        raise ConfigurationError(
            "model",
            f"gives {given} for {classes} classes",
            f"let it return one row of {classes} scores per record",
        )


def _tried(model: nn.Module, shape: tuple[int, ...], inputs: Inputs, count: int) -> object:
    """Run a few made-up records through the model, and see that none of them changes the scores of
    another.

    In training mode and in evaluation: each record is replaced by another one, with the same draws
    of dropout. Buffers are copies, and the model is left as it was.
    """
    modes = {module: module.training for module in model.modules()}
    generator = PublicSeed(0).generator()
    records, others = (inputs(inputs.made_up(count, shape, generator)) for _ in range(2))
    outputs: object = None
    try:
        for training in (True, False):
            model.train(training)
            outputs = _scores(model, records)
            one_a_record = (
                isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and len(outputs) == count
            )
            for changed in range(count if one_a_record else 0):
                mixed = records.clone()
                mixed[changed] = others[changed]
                _compare(
                    outputs, _scores(model, mixed), [i for i in range(len(records)) if i != changed]
                )
        for i in range(count):  # in evaluation: nothing is drawn, so a record alone can be compared
            alone = _scores(model, records[i : i + 1])
            if isinstance(outputs, torch.Tensor) and one_a_record:
                _compare(outputs[i : i + 1], alone, [0])
    except DpflError:
        raise
    except Exception as error:
        raise ConfigurationError(
            "model",
            f"does not accept {'tokens' if isinstance(inputs, Tokens) else 'records'} of shape {shape} ({error!s:.200})",
            "fit the model to the data",
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return outputs


def _scores(model: nn.Module, records: torch.Tensor) -> object:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return functional_call(model, {**dict(model.named_parameters()), **buffers}, (records,))


def _compare(before: object, after: object, unchanged: list[int]) -> None:
    """Refuse scores that depend on what else is in the batch. What is no table of scores is refused
    elsewhere.
    """
    if not (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.ndim == after.ndim == 2
    ):
        return
    if not bool(torch.isfinite(before).all() and torch.isfinite(after).all()):
        raise ConfigurationError(
            "model", "gives scores that are not finite for made-up records", "check its layers"
        )
    if len(after) != len(before):
        return
    if not torch.allclose(
        before[unchanged].double(), after[unchanged].double(), rtol=1e-3, atol=1e-4
    ):
        raise ConfigurationError(
            "model",
            "gives a record other scores when another one is in the batch, so no record can be clipped on its own",
            "let every record be computed apart (recurrent layers: batch_first=True)",
        )
