"""Whether a model, a loss and what is computed around them keep records apart by construction.

They do if they are made of nothing but the classes named here, as those were written: each computes
a record from that record alone, under a condition on its settings and on the shape of its input.
Weights play no part. Whatever else there is (a class of the user's own, a subclass, a hook, a
function in place of a method, a mode of torch's) may do anything, and is computed record by record
(:mod:`dpfl.models.per_record`).

The question is cheap, and asked anew wherever the answer is used: nothing is remembered of a model.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from dpfl.core.random import PublicSeed
from dpfl.data.inputs import Inputs, Numbers, Pixels, Tokens
from dpfl.models import features, image_features, networks, preconditioning
from dpfl.models.outputs import outputs_of
from dpfl.models.per_record import mode_active
from dpfl.tasks import TASKS, PerPerson, Task

Shape = tuple[int, ...]
Condition = Callable[[Any, Shape], bool]
"""Whether a layer keeps records apart for an input of this shape, records first."""

WATCHED = (
    "a model, loss or statistic of the user's own is computed record by record under a watch of "
    "every torch operation; no watch sees threads, clocks, observers, storages, C extensions and "
    "their memory, a changed torch, or code that looks into torch's or dpfl's insides; what it "
    "could keep of evaluation that is not accounted does not reach training; that an operation "
    "fails, which ends the work, is charged to nobody, nor are constants made from records (class "
    "weights, scales, first weights)"
)
"""What is assumed of code that is not made of the classes named here, where records are clipped."""

FORGETS = "a model or loss of the user's own keeps nothing of one client's records for another's"
"""What is assumed of such code where whole clients are clipped."""

_KINDS = (Numbers, Pixels, Tokens)
_FUNCTIONS = (F.relu, F.gelu, torch.relu)  # activations of transformer layers
_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size}
_NO_SETTINGS = ("_modules", "_flat_weight_refs")
_by_shape_of: WeakKeyDictionary[nn.Module, tuple[list[object], str | None]] = WeakKeyDictionary()
_HOOKS = [name for name in vars(torch_module) if name.startswith("_global") and "hooks" in name]


def _any(layer: nn.Module, shape: Shape) -> bool:
    return True


def _axes(*counts: int) -> Condition:
    """An input of so many axes: with one less, torch takes records for channels."""
    return lambda layer, shape: len(shape) in counts


def _at_least(count: int) -> Condition:
    return lambda layer, shape: len(shape) >= count


def _convolution(axes: int) -> Condition:
    """A convolution whose padding, as torch has laid it out, leaves records and channels alone."""

    def condition(layer: Any, shape: Shape) -> bool:
        padding = layer._reversed_padding_repeated_twice
        laid_out = len(padding) == 2 * (axes - 2) and min(padding) >= 0
        return len(shape) == axes and laid_out

    return condition


def _not_first(*names: str) -> Condition:
    """Axes that are named in settings, none of which is that of the records."""

    def condition(layer: Any, shape: Shape) -> bool:
        axes = [getattr(layer, name) for name in names]
        return all(type(axis) is int and axis % len(shape) != 0 for axis in axes)

    return condition


def _kept_statistics(layer: Any, shape: Shape) -> bool:
    """A layer that normalises by constants."""
    return not layer.training and layer.running_mean is not None and layer.running_var is not None


def _own_statistics(layer: Any, shape: Shape) -> bool:
    """A layer that normalises each record by itself, and writes to no buffer, or by constants."""
    apart = layer.running_mean is None and layer.running_var is None
    constant = layer.track_running_stats is True and _kept_statistics(layer, shape)
    return len(shape) == int(type(layer).__name__[-2]) + 2 and (apart or constant)


_CONDITIONS: dict[str, Condition] = {
    "Sequential ModuleList ModuleDict Identity Dropout AlphaDropout ReLU ReLU6 RReLU LeakyReLU ELU "
    "SELU CELU GELU SiLU Mish Softplus Softsign Softshrink Hardshrink Tanhshrink Tanh Hardtanh "
    "Sigmoid LogSigmoid Hardsigmoid Hardswish Threshold TransformerEncoder": _any,
    "Linear GroupNorm PReLU": _at_least(2),
    "LocalResponseNorm Upsample UpsamplingNearest2d UpsamplingBilinear2d": _at_least(3),
    "PixelShuffle PixelUnshuffle": _at_least(4),
    "Conv1d ConvTranspose1d": _convolution(3),
    "Conv2d ConvTranspose2d": _convolution(4),
    "Conv3d ConvTranspose3d": _convolution(5),
    "MaxPool1d AvgPool1d LPPool1d AdaptiveAvgPool1d AdaptiveMaxPool1d "
    "Dropout1d ReflectionPad1d ReplicationPad1d": _axes(3),
    "MaxPool2d AvgPool2d LPPool2d AdaptiveAvgPool2d AdaptiveMaxPool2d "
    "Dropout2d ReflectionPad2d ReplicationPad2d Softmax2d": _axes(4),
    "MaxPool3d AvgPool3d LPPool3d AdaptiveAvgPool3d AdaptiveMaxPool3d "
    "Dropout3d ReflectionPad3d ReplicationPad3d": _axes(5),
    "ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d": (
        lambda layer, shape: len(layer.padding) // 2 < len(shape)
    ),
    "BatchNorm1d BatchNorm2d BatchNorm3d": _kept_statistics,
    "InstanceNorm1d InstanceNorm2d InstanceNorm3d": _own_statistics,
    "LayerNorm RMSNorm": lambda layer, shape: len(shape) > len(layer.normalized_shape),
    "Embedding": (
        lambda layer, shape: layer.max_norm is None and layer.scale_grad_by_freq is False
    ),
    "LSTM GRU RNN MultiheadAttention": (
        lambda layer, shape: layer.batch_first is True and len(shape) == 3
    ),
    "TransformerEncoderLayer": _axes(3),  # its attention says which axis comes first
    "Softmax LogSoftmax Softmin GLU Unflatten": _not_first("dim"),
    "Flatten": _not_first("start_dim"),
}
_OURS: tuple[Any, ...] = (
    *(networks.Residual, networks.Reader),
    *(preconditioning.Centre, preconditioning.Whiten, preconditioning.Standardise),
    *(preconditioning.Constant, preconditioning.OnFeatures),
    *(image_features.RandomConvolutions, *features.FEATURES.values()),
)
LAYERS: dict[type, Condition] = {
    **{getattr(nn, name): how for names, how in _CONDITIONS.items() for name in names.split()},
    **dict.fromkeys((*_OURS, nn.modules.linear.NonDynamicallyQuantizableLinear), _any),
}
"""The classes that keep records apart, and when."""


def mixing(model: nn.Module, task: Task, inputs: Inputs, shape: Shape) -> str | None:
    """Say why records of this ``shape`` are not known to be kept apart; None if they are.

    ``inputs`` says how records are read, ``task`` what is learned from them.

    >>> from dpfl.tasks import CLASSIFICATION
    >>> mixing(nn.Linear(4, 2), CLASSIFICATION, Numbers(), (4,))
    >>> mixing(nn.Sequential(nn.Softmax(0)), CLASSIFICATION, Numbers(), (4,))
    "layer '0' (Softmax) may take records for something else"
    """
    marks: list[object] = [shape, inputs, task]
    strange = structure(model, task, inputs, marks)
    if strange is not None:
        return strange
    # Settings decide, and all of them are compared: only what follows from them is remembered.
    if _by_shape_of.get(model, ([], None))[0] != marks:
        _by_shape_of[model] = marks, _by_shape(model, task, inputs, shape)
    return _by_shape_of[model][1]


def structure(
    model: nn.Module, task: Task, inputs: Inputs, marks: list[object] | None = None
) -> str | None:
    """Say what is not one of the classes named here, as it was written; None if all is.

    All settings are put into ``marks``.
    """
    if type(inputs) not in _KINDS or not _is_plain(tuple(vars(inputs).values())):
        return f"records are read by {type(inputs).__name__}"
    kind = task.task if type(task) is PerPerson else task
    if not (as_written(task, (PerPerson, *TASKS.values())) and as_written(kind, TASKS.values())):
        return f"the task {kind.name} is the user's own"
    if any(getattr(torch_module, name) for name in _HOOKS):
        return "there are hooks on all modules"
    if mode_active():
        return "a mode of torch's is active"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "there are hooks on saved tensors"
    return _walk(model, "", [] if marks is None else marks)


def as_written(part: object, classes: Collection[type]) -> bool:
    """Whether a part is of one of these classes, none of whose methods it replaces."""
    known = {field.name for field in fields(part)}  # type: ignore[arg-type]
    settings = [x for x in vars(part).values() if not isinstance(x, Task)]
    return type(part) in classes and vars(part).keys() <= known and all(map(_is_plain, settings))


def _walk(module: nn.Module, name: str, marks: list[object]) -> str | None:
    """Say which module is not of a class named here, or not as it was written."""
    if type(module) not in LAYERS:
        return f"layer '{name}' is a {type(module).__name__}"
    marks.append((name, type(module)))
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers", "_flat_weights"):
            tensors = value.values() if type(value) is dict else value
            good = type(value) in (dict, list) and all(map(_is_tensor, tensors))
            marks.append([None if x is None else (x.shape, x.dtype) for x in tensors])
        else:
            good = _is_plain(value) or attribute == "_modules"
            good = good or (attribute == "_flat_weight_refs" and _are_references(value))
            if attribute not in _NO_SETTINGS:
                marks += attribute, repr(value) if type(value) in (list, set, dict) else value
        if not good:
            return f"layer '{name}' has a {attribute} that torch did not give it"
    children = vars(module)["_modules"]
    if type(children) not in (dict, OrderedDict):
        return f"layer '{name}' has modules in a {type(children).__name__}"
    parts = {f"{name}.{child}".removeprefix("."): part for child, part in children.items()}
    reasons = (_walk(x, path, marks) for path, x in parts.items() if x is not None)
    return next(filter(None, reasons), None)


def _are_references(value: Any) -> bool:
    """Whether these are weak references, which run no code, or nothing."""
    return type(value) is list and all(type(x) in (weakref.ref, type(None)) for x in value)


def _is_plain(value: Any) -> bool:
    """Whether a value can run no code: a number, a word, or some of them; a dictionary is empty."""
    kind = type(value)
    if kind in _PLAIN or (kind in (dict, OrderedDict) and not value):
        return True
    if kind in (tuple, list, set, frozenset):
        return all(map(_is_plain, value))
    if kind in _KINDS:
        return _is_plain(tuple(vars(value).values()))
    return any(value is function for function in _FUNCTIONS)


def _is_tensor(value: Any) -> bool:
    """Whether a parameter or buffer is one of torch's own, without hooks."""
    if value is None:
        return True
    if type(value) not in (nn.Parameter, Tensor) or vars(value):
        return False
    return not (value._backward_hooks or value._post_accumulate_grad_hooks)


def _by_shape(model: nn.Module, task: Task, inputs: Inputs, shape: Shape) -> str | None:
    """Say which layer takes records for something else, as the shapes of its inputs show.

    They do not depend on values: each layer gives records first if it is given them first.
    """
    record_shape = task.record_shape(shape)
    names = {module: name for name, module in model.named_modules()}
    seen: dict[int, list[tuple[nn.Module, bool, list[Shape]]]] = {1: [], 2: [], 3: []}

    def look(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        if arguments:
            made = result[0] if type(result) is tuple else result
            both = [tuple(x.shape) for x in (arguments[0], made)]
            good = all(x[:1] == (count,) for x in both) and LAYERS[type(module)](module, both[0])
            seen[count].append((module, good, [x[1:] for x in both]))

    device = next((own.device for own in model.parameters()), torch.device("cpu"))
    with ExitStack() as hooks, torch.no_grad(), torch.random.fork_rng(devices=[]):
        for module in names:
            hooks.enter_context(module.register_forward_hook(look))
        for count in seen:
            records = inputs.made_up(count, record_shape, PublicSeed(0).generator()).to(device)
            try:
                task.single.outputs(lambda x: outputs_of(model, {}, x), inputs(records))
            except Exception as error:
                return f"it does not accept records of shape {record_shape} ({error!s:.100})"
    # The number of records is the length of the first axis of all that layers take and give, and
    # no other length follows from it.
    for calls in zip(*seen.values(), strict=True):
        module, _, shapes = calls[0]
        if not all(good and same == shapes for _, good, same in calls):
            kind = type(module).__name__
            return f"layer '{names[module]}' ({kind}) may take records for something else"
    return None
