"""What is known to keep records apart: every named model, and nothing that was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.models.test_every_model import MEANT_FOR
from torch import Tensor, nn
from torch.nn.utils import prune

from dpfl.core.random import PublicSeed
from dpfl.data.inputs import NUMBERS, Inputs, Pixels, Tokens
from dpfl.models import (
    MODELS,
    TEXT_MODELS,
    linear_head,
    make_features,
    make_model,
    networks,
    preconditioning,
)
from dpfl.models.features import FEATURES
from dpfl.models.separation import LAYERS, mixing
from dpfl.tasks import CLASSIFICATION, TASKS, Classification, CustomTask, PerPerson, Task

RECORDS: list[tuple[tuple[int, ...], Inputs]] = [
    ((1, 28, 28), NUMBERS),
    ((1, 8, 8), NUMBERS),
    ((3, 32, 32), Pixels((0.5,) * 3, (0.2,) * 3)),
    ((12,), NUMBERS),
    ((7,), Tokens(2000)),
]


@pytest.mark.parametrize("name", sorted(MODELS | TEXT_MODELS))
def test_every_named_model_keeps_records_apart(name: str) -> None:
    shape, classes, inputs = MEANT_FOR[name]
    model = make_model(name, shape, classes, PublicSeed(0), 64, inputs)
    for training in (True, False):
        assert mixing(model.train(training), CLASSIFICATION, inputs, shape) is None


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_named_feature_map_and_its_linear_head_keep_records_apart(name: str) -> None:
    fitting = [(x, inputs) for x, inputs in RECORDS if FEATURES[name].fits(x, inputs)]
    assert fitting
    for shape, inputs in fitting:
        features = make_features(name, shape, inputs)
        assert mixing(features, CLASSIFICATION, inputs, shape) is None
        assert mixing(linear_head(features, 3), CLASSIFICATION, inputs, shape) is None


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_named_task_keeps_records_apart_also_of_persons(name: str) -> None:
    task = TASKS[name]()
    model = nn.Sequential(nn.Linear(4, task.width))
    assert mixing(model, task, NUMBERS, (4,)) is None
    assert mixing(model, PerPerson(task=task), NUMBERS, (5, 4)) is None


class OwnSequential(nn.Sequential):
    pass


class OwnTask(Classification):
    pass


def changed(task: Task) -> Task:
    object.__setattr__(task, "losses", lambda outputs, targets: outputs.sum(1))
    return task


CHAIN = (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def chain(change: Callable[[nn.Sequential], object] = len) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    change(model)
    return model


UNKNOWN: dict[str, tuple[nn.Module, Task]] = {
    "a subclass": (OwnSequential(nn.Linear(4, 2)), CLASSIFICATION),
    "an empty subclass": (nn.Sequential(nn.Linear(4, 2), OwnSequential()), CLASSIFICATION),
    "a hook": (chain(lambda x: x[1].register_forward_hook(print)), CLASSIFICATION),
    "a hook before": (chain(lambda x: x[1].register_forward_pre_hook(print)), CLASSIFICATION),
    "a backward hook": (chain(lambda x: x.register_full_backward_hook(print)), CLASSIFICATION),
    "a parameter's hook": (chain(lambda x: x[0].weight.register_hook(print)), CLASSIFICATION),
    "a hook after": (
        chain(lambda x: x[0].weight.register_post_accumulate_grad_hook(print)),
        CLASSIFICATION,
    ),
    "its own forward": (chain(lambda x: setattr(x[1], "forward", torch.tanh)), CLASSIFICATION),
    "compiled": (chain(lambda x: setattr(x[1], "_compiled_call_impl", print)), CLASSIFICATION),
    "a parametrisation": (
        chain(lambda x: nn.utils.parametrize.register_parametrization(x[0], "weight", nn.Tanh())),
        CLASSIFICATION,
    ),
    "pruned": (chain(lambda x: prune.identity(x[0], "weight")), CLASSIFICATION),
    "a tensor beside": (chain(lambda x: setattr(x[1], "kept", torch.ones(1))), CLASSIFICATION),
    "a task of its own": (chain(), OwnTask(classes=2)),
    "a loss of its own": (chain(), CustomTask(loss=lambda outputs, targets: outputs[:, 0])),
    "a task that was changed": (chain(), changed(Classification(classes=2))),
    "BatchNorm in training": (nn.Sequential(nn.BatchNorm1d(4)), CLASSIFICATION),
    "a softmax over records": (nn.Sequential(nn.Softmax(0)), CLASSIFICATION),
    "the last axis but one": (nn.Sequential(nn.Softmax(-2)), CLASSIFICATION),
    "a softmax over what there is": (nn.Sequential(nn.Softmax(None)), CLASSIFICATION),
    "flattened records": (nn.Sequential(nn.Flatten(0)), CLASSIFICATION),
    "normalised records": (nn.Sequential(nn.LayerNorm((2, 4))), CLASSIFICATION),
    "records as channels": (
        nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv2d(2, 2, 1)),
        CLASSIFICATION,
    ),
    "records as positions": (nn.TransformerEncoderLayer(4, 1), CLASSIFICATION),
    "records as time": (nn.LSTM(4, 2, batch_first=True), CLASSIFICATION),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_as_it_was_written_is_not_known(name: str) -> None:
    model, task = UNKNOWN[name]
    assert mixing(model, task, NUMBERS, (4,)) is not None


def residual(shortcut: nn.Module) -> nn.Module:
    """Named blocks with other layers in them, behind which axes are added up."""
    block = networks.Residual(32, 32, 1)
    block.body, block.shortcut = nn.Conv2d(4, 4, 1), shortcut
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def shaped(layer: nn.Module, name: str, constant: Tensor) -> nn.Module:
    setattr(layer, name, constant)
    return layer


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
    layer.dropout1 = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten())  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (residual(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())), (4, 1, 4)),
        (residual(nn.Sequential(nn.Flatten())), (1, 1, 4)),
        (shaped(preconditioning.Centre(4), "mean", torch.zeros(3, 1, 4)), (4,)),
        (shaped(preconditioning.Standardise(4), "scale", torch.ones(1, 1, 4)), (4,)),
        (shaped(preconditioning.Whiten(4), "matrix", torch.ones(4)), (4,)),
        (shaped(preconditioning.Whiten(4), "matrix", torch.ones(3, 4, 4)), (4,)),
        (encoder(), (1, 4)),
    ],
)
def test_the_number_of_records_must_not_move_to_another_axis(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    """Layers would then take records for channels, positions or features."""
    assert mixing(model.eval(), CLASSIFICATION, NUMBERS, shape) is not None


def test_the_answer_is_that_of_the_moment() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    asked = (model, CLASSIFICATION, NUMBERS, (4,))
    assert mixing(*asked) is None
    model[1].train()
    assert mixing(*asked) is not None
    model[1].eval()
    assert mixing(*asked) is None
    model[0].register_forward_hook(print)
    assert mixing(*asked) is not None


@pytest.fixture(params=["module", "function", "dispatch", "saved"])
def watching(request: pytest.FixtureRequest) -> Iterator[None]:
    """Something that would see every model's tensors."""

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            return func(*args, **(kw or {}))

    class Operations(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            return func(*args, **(kw or {}))

    if request.param == "module":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        yield
        handle.remove()
        return
    modes: dict[str, Any] = {
        "function": Functions(),
        "dispatch": Operations(),
        "saved": torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    }
    with modes[request.param]:
        yield


@pytest.mark.usefixtures("watching")
def test_nothing_is_known_where_torch_is_told_to_call_something() -> None:
    assert mixing(chain(), CLASSIFICATION, NUMBERS, (4,)) is not None


SHAPES: list[tuple[int, ...]] = [(6,), (4, 6), (4, 6, 6), (4, 6, 6, 6)]
LAYER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), (4, 4, 3)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"), (4, 4, 3)),
    **dict.fromkeys(("MaxPool1d", "MaxPool2d", "MaxPool3d"), (2,)),
    **dict.fromkeys(("AvgPool1d", "AvgPool2d", "AvgPool3d"), (2,)),
    **dict.fromkeys(("LPPool1d", "LPPool2d", "LPPool3d"), (2, 2)),
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), (4,)),
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), (4,)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Softmin", "GLU"), (1,)),
    **{f"{kind}{i}d": (1,) for i in (1, 2, 3) for kind in ("ReplicationPad", "CircularPad")},
    **{f"ReflectionPad{i}d": (1,) for i in (1, 2, 3)},
    **{f"ZeroPad{i}d": (1,) for i in (1, 2, 3)},
    **{f"ConstantPad{i}d": (1, 0.5) for i in (1, 2, 3)},
    **{f"Adaptive{kind}Pool{i}d": (2,) for i in (1, 2, 3) for kind in ("Avg", "Max")},
    "Linear": (6, 3),
    "GroupNorm": (2, 4),
    "LayerNorm": (6,),
    "RMSNorm": (6,),
    "Unflatten": (1, (2, -1)),
    "LocalResponseNorm": (2,),
    "Upsample": (None, 2),
    "UpsamplingNearest2d": (None, 2),
    "UpsamplingBilinear2d": (None, 2),
    "PixelShuffle": (2,),
    "PixelUnshuffle": (2,),
    "Threshold": (0.1, 0.5),
    "TransformerEncoderLayer": (6, 2, 8, 0.0, "relu", 1e-5, True),
}
TRIED = [kind for kind in LAYERS if hasattr(nn, kind.__name__)]


@pytest.mark.parametrize("kind", TRIED, ids=lambda kind: kind.__name__)
def test_a_layer_that_is_known_gives_a_record_the_same_whatever_the_others_are(
    kind: type[nn.Module],
) -> None:
    """Bit for bit, in batches of as many records as an axis is long, wherever it is accepted."""
    arguments = LAYER_ARGUMENTS.get(kind.__name__, ())
    names = "Sequential ModuleList ModuleDict Embedding LSTM GRU RNN MultiheadAttention TransformerEncoder"
    if kind.__name__ in names.split():
        return  # containers, and what gives or takes something else than numbers
    torch.manual_seed(0)
    layer, accepted = kind(*arguments).eval(), 0
    for shape in SHAPES:
        if mixing(layer, CLASSIFICATION, NUMBERS, shape) is not None:
            continue
        accepted += 1
        for count in (4, 6):
            records = torch.randn(count, *shape)
            others = torch.cat([records[:1], 9 * torch.randn(count - 1, *shape)])
            first: list[Tensor] = [layer(x)[0] for x in (records, others)]
            assert torch.equal(*first)
    assert accepted
