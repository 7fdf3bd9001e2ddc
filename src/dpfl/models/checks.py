"""The checks that any ``nn.Module`` of the user's must pass before it is trained.

Clipping one record at a time means something only where a model treats records apart. Layers that
are known to mix them are refused by name; what a model does between its layers is tried.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DpflError
from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Tokens


def check_model(
    model: nn.Module, shape: tuple[int, ...], classes: int, inputs: Inputs = NUMBERS
) -> None:
    """Refuse what cannot be trained here, by name, with what to use instead.

    ``shape`` is that of one record, and ``inputs`` says how records are read. The model must give
    one row of at least ``classes`` scores per record.

    >>> check_model(nn.ReLU(), (4,), 4)
    Traceback (most recent call last):
    dpfl.core.errors.ConfigurationError: model: has no parameters; give a model that can be trained
    """
    _check_layers(model)
    _check_parameters(model)
    count = 3 if classes != 3 else 4  # records and classes must not be taken for each other
    outputs = _try_records(model, shape, inputs, count)
    given, good = "no tensor", False
    if isinstance(outputs, Tensor):
        dtype, scores = str(outputs.dtype).removeprefix("torch."), tuple(outputs.shape[1:])
        given = f"{dtype} outputs of shape {scores}"
        good = outputs.is_floating_point() and outputs.ndim == 2
        good = good and len(outputs) == count and outputs.shape[1] >= classes
    remedy = f"let it return one row of {classes} scores per record"
    check(good, "model", f"gives {given} for {classes} classes", remedy)


def _check_layers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        mixes = isinstance(module, nn.modules.batchnorm._BatchNorm)
        mixes = mixes or bool(getattr(module, "track_running_stats", False))
        kept = "mixes the records of a batch and keeps their statistics, which nobody charges"
        problem, remedy = f"{type(module).__name__} {kept}", "use GroupNorm or LayerNorm instead"
        check(not mixes, f"model layer '{name}'", problem, remedy)


def _check_parameters(model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    check(bool(parameters), "model", "has no parameters", "give a model that can be trained")
    for name, parameter in parameters.items():
        where, single = f"model parameter '{name}'", parameter.dtype is torch.float32
        check(single, where, f"is {parameter.dtype}", "use float32: model.float()")
        remedy = "set requires_grad, or take it out of the model"
        check(parameter.requires_grad, where, "is frozen", remedy)
    everywhere = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    problem = "shares (ties) parameters between layers"
    check(everywhere == len(parameters), "model", problem, "give each layer its own")


def _try_records(model: nn.Module, shape: tuple[int, ...], inputs: Inputs, count: int) -> object:
    """Run made-up records through the model; refuse it if one of them changes another's scores.

    In training mode and in evaluation, each record is replaced by another one, with the same draws
    of dropout. In evaluation, where nothing is drawn, each record is also tried alone. Buffers are
    copies, and the model is left as it was. Returns the scores.
    """
    modes = {module: module.training for module in model.modules()}
    generator = PublicSeed(0).generator()
    records, others = (inputs(inputs.made_up(count, shape, generator)) for _ in range(2))
    try:
        for training in (True, False):
            model.train(training)
            outputs = _scores(model, records)
            if not (isinstance(outputs, Tensor) and outputs.ndim == 2 and len(outputs) == count):
                continue  # not a table of scores: refused by the caller
            for i in range(count):
                mixed, unchanged = records.clone(), torch.arange(count) != i
                mixed[i] = others[i]
                _compare(outputs, _scores(model, mixed), unchanged)
                if not training:
                    alone = _scores(model, records[i : i + 1])
                    _compare(outputs[i : i + 1], alone, torch.tensor([True]))
    except DpflError:
        raise
    except Exception as error:
        what = "tokens" if isinstance(inputs, Tokens) else "records"
        problem = f"does not accept {what} of shape {shape} ({error!s:.200})"
        raise ConfigurationError("model", problem, "fit the model to the data") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return outputs


def _scores(model: nn.Module, records: Tensor) -> object:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return functional_call(model, {**dict(model.named_parameters()), **buffers}, (records,))


def _compare(before: Tensor, after: object, unchanged: Tensor) -> None:
    """Refuse scores that are not finite, or that depend on what else is in the batch."""
    if not (isinstance(after, Tensor) and after.ndim == 2):
        return
    finite = bool(torch.isfinite(before).all() and torch.isfinite(after).all())
    problem = "gives scores that are not finite for made-up records"
    check(finite, "model", problem, "check its layers")
    if len(after) == len(before):
        old, new = before[unchanged].double(), after[unchanged].double()
        problem = "gives a record other scores when another one is in the batch"
        remedy = "let every record be computed apart (recurrent layers: batch_first=True)"
        apart = torch.allclose(old, new, rtol=1e-3, atol=1e-4)
        check(apart, "model", f"{problem}, so no record can be clipped on its own", remedy)
