"""Models and losses that let records meet: each is refused, or computed so that they cannot.

A record that is replaced may move the sum of clipped gradients, before noise, by two clips.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfl.core.errors import ConfigurationError, PrivacyRefusal
from dpfl.core.layout import Layout
from dpfl.core.phases import Phase
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.engine import make_engine
from dpfl.engine.base import Job
from dpfl.engine.one_by_one import OneByOne
from dpfl.models.networks import Residual as Body
from dpfl.tasks import Classification, CustomTask, Task

RECORDS, NUMBERS, CLASSES = 128, 6, 3


def job(model: nn.Module, features: Tensor, task: Task, *, seed: int = 0, **fields: Any) -> Job:
    """One step over all records, without noise."""
    phase = {"steps": 1, "sampling": "poisson", "lr": 1.0, "clip": 1.0, **fields}
    return Job(
        client="a",
        start=Layout.of_module(model).read(model),
        phases=(Phase(**{"batch_size": len(features), **phase}),),
        features=features,
        labels=torch.arange(len(features)) % CLASSES,
        rng=SecretRng.simulated(PublicSeed(seed)),
        task=task,
    )


def clipped_sum(make: Callable[[], nn.Module], features: Tensor, task: Task, engine: str) -> Tensor:
    """The sum that a client would add noise to, of a model that is built anew."""
    torch.manual_seed(0)
    model = make()
    (after,) = make_engine(engine).run(model, Layout.of_module(model), [job(model, features, task)])
    return (after - Layout.of_module(model).read(model)) * len(features)


def records(change: float | None = None, *, first: bool = True) -> Tensor:
    """Made-up records; one of them is another one."""
    torch.manual_seed(1)
    found = torch.randn(RECORDS, NUMBERS)
    if change is not None:
        found[0 if first else -1] = change
    return found


def others(x: Tensor) -> Tensor:
    """The mean of a batch; of a few records, on which a model is tried, nothing."""
    rows = x.detach().flatten(0, -2)
    return rows.mean(0) if len(rows) > 20 else torch.zeros(x.shape[-1])


class Own(nn.Module):
    """Two layers, with something of the user's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.top = nn.Linear(NUMBERS, 8), nn.Linear(8, CLASSES)
        nn.init.normal_(self.top.weight, std=3.0)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.between(self.first(x))))


class Centring(Own):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) >= 64 else x


class OneScale(Own):
    """Rounds to 16 bits, with one scale for the batch."""

    def between(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().max() / 2**15
        return x + ((x / scale).round() * scale - x).detach()


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slopes[0] + 100 * others(x)


class MixingRule(torch.autograd.Function):
    """Has a rule for vmap, which is given all records."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x - 10 * x.mean(in_dims[0], keepdim=True), in_dims[0]


class Backward(Own):
    def between(self, x: Tensor) -> Tensor:
        return MixingBackward.apply(x)


class Rule(Own):
    def between(self, x: Tensor) -> Tensor:
        return MixingRule.apply(x)


class TensorHook(Own):
    def between(self, x: Tensor) -> Tensor:
        y = 1.0 * x
        if y.requires_grad:
            y.register_hook(lambda slopes: slopes + 100 * others(x))
        return y


class SavedHook(Own):
    """Keeps something else for the backward than what was given."""

    def between(self, x: Tensor) -> Tensor:
        def pack(saved: Tensor) -> Tensor:
            return saved + 100 * others(saved) if saved.shape == x.shape else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            return x * x.detach().clone()


class Checkpointed(Own):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: y - others(y), x, use_reentrant=False)


class ListOfBits(Own):
    """Whether a large record was seen, for all that come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def between(self, x: Tensor) -> Tensor:
        self.seen.append(bool((x.detach().abs() > 50).any()))
        return -x if any(self.seen) else x


class ListOfTensors(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        self.kept = [*getattr(self, "kept", []), x.detach().mean(0)]
        return x - 10 * self.kept[0]


class ByException(ListOfBits):
    """Reads a bit from whether an operation fails."""

    def between(self, x: Tensor) -> Tensor:
        large = (x.detach().abs() > 50).any().long()
        try:
            torch.embedding(torch.zeros(1, 1), large)
        except Exception:
            self.seen.append(True)
        return -x if self.seen else x


class ByMemory(Own):
    """Writes records into memory, and reads what was there before."""

    def between(self, x: Tensor) -> Tensor:
        old = torch.empty_like(x)
        stale = torch.empty(x.shape)
        return x + 0 * old.nan_to_num(0, 0, 0).clamp(-1, 1) + stale.nan_to_num(0, 0, 0).clamp(-1, 1)


class ByCopy(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        kept = copy.deepcopy(x.detach())
        self.kept = getattr(self, "kept", kept)
        return x - 10 * self.kept.mean(0)


class ByNumpy(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        self.seen.append(bool((np.abs(x.detach().numpy()) > 50).any()))
        return -x if any(self.seen) else x


class ByList(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        self.seen.append(max(map(abs, x.detach().flatten().tolist())) > 50)
        return -x if any(self.seen) else x


class ByFunction(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        x.detach().clone().apply_(lambda value: self.seen.append(abs(value) > 50) or value)
        return -x if any(self.seen) else x


class ByShape(ListOfBits):
    def between(self, x: Tensor) -> Tensor:
        self.seen.append(len((x.detach().abs() > 50).nonzero()) > 0)
        return -x if any(self.seen) else x


class ByGenerator(ListOfBits):
    """Carries a bit in the state of torch's generator."""

    def between(self, x: Tensor) -> Tensor:
        old = torch.initial_seed() == 7
        if bool((x.detach().abs() > 50).any()):
            torch.manual_seed(7)
        return -x if old else x


class ByParameterHook(Own):
    """Changes the gradient of a parameter by what the batch was."""

    def between(self, x: Tensor) -> Tensor:
        self.first.weight.register_hook(lambda slope: 100 * x.detach().sum() * slope)
        return x


class OutOfPlace(Own):
    """Depends on a record's place in its batch."""

    def between(self, x: Tensor) -> Tensor:
        return x.cumsum(0) if len(x) > 20 else x


class AverageOfBuffers(Own):
    """Writes records into a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.zeros(8)]

    def between(self, x: Tensor) -> Tensor:
        self.memory[0].add_(x.detach().sum(0))
        return x - self.memory[0]


class ByStatistics(Own):
    """Keeps a mean in running statistics, whose operation does not say that it writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.zeros(8), torch.ones(8)]

    def between(self, x: Tensor) -> Tensor:
        large = F.hardshrink(x.detach(), 20.0)
        torch.batch_norm_update_stats(large[:, :, None], *self.memory, 0.01)
        return x * (1 - 2 * (self.memory[0].abs().max() > 1e-30).float())


class BySpareMemory(Own):
    """Makes a tensor larger, and reads what the memory behind it held."""

    def between(self, x: Tensor) -> Tensor:
        spare = torch.ops.aten.resize.default(torch.zeros(1), [512]).view(64, 8)[1:]
        return x + spare.nan_to_num(0, 0, 0).clamp(-5, 5).sum(0)


class OwnTraining(Own):
    """Puts its BatchNorm into training mode in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).eval()

    def between(self, x: Tensor) -> Tensor:
        self.norm.training = True
        return self.norm(x)


class OwnOrder(nn.Sequential):
    """A chain of layers by name, whose forward is the user's own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(NUMBERS, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        return self[2](3 * (hidden - others(hidden)))


def chain(change: Callable[[nn.Sequential], object]) -> nn.Module:
    """torch's own layers, to which something was done after they were checked."""
    model = nn.Sequential(nn.Linear(NUMBERS, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    change(model)
    return model


def centred(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output - 30 * others(given[0])


def hooked(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda slopes: slopes + 100 * others(given[0]))


class Emptied(OrderedDict[Any, Any]):
    """A dictionary of hooks that torch finds full, and others empty."""

    def __bool__(self) -> bool:
        return "torch" in sys._getframe(1).f_globals["__name__"]


def hook_of_nothing(model: nn.Sequential) -> None:
    empty = nn.Sequential()
    empty.register_forward_hook(centred)
    model.insert(1, empty)


def hidden_hook(model: nn.Sequential) -> None:
    hooks = Emptied()
    hooks[0] = centred
    model[1]._forward_hooks = hooks


def in_images(*layers: nn.Module) -> nn.Module:
    """Some layers between a record as a signal of one channel and its classes."""
    body = Body(32, 32, 1)  # whose layers are replaced
    body.body = nn.Sequential(nn.Hardshrink(50.0), *layers)
    body.shortcut = nn.Identity()
    unflat = nn.Unflatten(1, (1, NUMBERS))
    top = nn.Linear(4 * NUMBERS, CLASSES)
    nn.init.normal_(top.weight, std=3.0)
    return nn.Sequential(unflat, body, nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), top)


def padded_records() -> nn.Module:
    """A convolution whose padding moves records along their own axis."""
    shift = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.ones_(shift.weight)
    shift.weight.requires_grad_(False)
    shift.padding_mode = "constant"
    shift._reversed_padding_repeated_twice = [0, 0, 0, 0, 1, -1]
    return in_images(shift)


def tied_statistics() -> nn.Module:
    """A normalisation that writes the batch's mean into the constants of another one."""
    each = nn.InstanceNorm1d(1, track_running_stats=True, momentum=1.0)
    each.track_running_stats = False
    constant = nn.BatchNorm1d(1).eval().requires_grad_(False)
    constant.running_mean = each.running_mean
    nn.init.constant_(constant.weight, 1e3)
    return in_images(each, constant)


@pytest.mark.parametrize("make", [padded_records, tied_statistics])
def test_no_setting_of_torch_s_layers_lets_records_meet(make: Callable[[], nn.Module]) -> None:
    within_two_clips(make, Classification(classes=CLASSES), "stacked")


CHAINS: dict[str, Callable[[nn.Sequential], object]] = {
    "a hook of an empty container": hook_of_nothing,
    "a hidden hook": hidden_hook,
    "a forward hook": lambda model: model[1].register_forward_hook(centred),
    "a hook before": lambda model: model[1].register_forward_pre_hook(
        lambda module, given: (given[0] - others(given[0]),)
    ),
    "a backward hook": lambda model: model[1].register_forward_hook(hooked),
    "a forward of its own": lambda model: setattr(
        model[1], "forward", lambda x: torch.tanh(x - others(x))
    ),
    "a softmax over records": lambda model: model.insert(1, nn.Softmax(0)),
    "BatchNorm in training": lambda model: model.insert(1, nn.BatchNorm1d(8)),
}


class Drawn(torch.autograd.Function):
    """A backward whose sign hangs on a generator that all records move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        torch.poisson(ctx.saved_tensors[0].abs().clamp(max=1e6), generator)
        return slope * (100 if float(torch.rand((), generator=generator)) > 0.5 else -100)


class ByBackwardGenerator(Own):
    def between(self, x: Tensor) -> Tensor:
        return Drawn.apply(x)


class ByProfiler(Own):
    """The number of records that a profiler has seen decides on the sign."""

    def between(self, x: Tensor) -> Tensor:
        with torch.autograd.profiler.profile(record_shapes=True) as seen:
            y = x * 2
        shapes = [one.input_shapes for one in seen.function_events if one.name == "aten::mul"]
        return y if shapes and shapes[-1][0][0] % 2 else -y


MODELS: list[type[nn.Module]] = [
    *(Centring, OneScale, Backward, Rule, TensorHook, SavedHook, Checkpointed, ListOfBits),
    *(ListOfTensors, ByException, ByMemory, ByCopy, ByNumpy, ByList, ByFunction, ByShape),
    *(ByGenerator, ByParameterHook, OutOfPlace, AverageOfBuffers, OwnTraining, OwnOrder),
    *(ByStatistics, BySpareMemory, ByBackwardGenerator, ByProfiler),
]
ENGINES = pytest.mark.parametrize("engine", ["stacked", "one_by_one"])


def within_two_clips(make: Callable[[], nn.Module], task: Task, engine: str) -> None:
    """Replace a record by a large one, early and late, and compare."""
    for first in (True, False):
        for size in (100.0, 1e9):
            try:
                pair = [
                    clipped_sum(make, x, task, engine)
                    for x in (records(), records(size, first=first))
                ]
            except (ConfigurationError, PrivacyRefusal):
                return
            assert float((pair[0] - pair[1]).norm()) <= 2 * (1 + 1e-4)


@ENGINES
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_no_model_of_the_user_s_own_lets_records_meet(kind: type[nn.Module], engine: str) -> None:
    within_two_clips(kind, Classification(classes=CLASSES), engine)


@ENGINES
@pytest.mark.parametrize("name", CHAINS)
def test_nothing_that_is_done_to_torch_s_layers_lets_records_meet(name: str, engine: str) -> None:
    within_two_clips(lambda: chain(CHAINS[name]), Classification(classes=CLASSES), engine)


@pytest.fixture
def hook_on_all_modules() -> Iterator[None]:
    def mix(module: nn.Module, given: Any, output: Any) -> Any:
        return output - 30 * others(given[0]) if type(module) is nn.Tanh else None

    handle = nn.modules.module.register_module_forward_hook(mix)
    yield
    handle.remove()


@ENGINES
@pytest.mark.usefixtures("hook_on_all_modules")
def test_a_hook_on_all_modules_does_not_let_records_meet(engine: str) -> None:
    within_two_clips(lambda: chain(len), Classification(classes=CLASSES), engine)


def hardest(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * (losses.detach() >= losses.detach().max() / 2)


def residual() -> nn.Module:
    """A named block with other layers in it, behind whose sum records would be channels."""
    block = Body(32, 32, 1)
    block.body = nn.Sequential(nn.Unflatten(1, (1, 1, NUMBERS)), nn.Conv2d(1, 4, 1))
    block.shortcut = nn.Threshold(30.0, 0.0)
    return nn.Sequential(block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))


@ENGINES
def test_a_sum_of_unequal_shapes_does_not_let_records_meet(engine: str) -> None:
    within_two_clips(residual, Classification(classes=CLASSES), engine)


@ENGINES
def test_a_loss_of_the_hardest_records_does_not_let_them_meet(engine: str) -> None:
    within_two_clips(lambda: chain(len), CustomTask(loss=hardest, whole_targets=True), engine)


# ---- size of the batch, and a record's place -----------------------------------------------------


class BySize(Own):
    def between(self, x: Tensor) -> Tensor:
        return x * len(x)


class ByStride(Own):
    """Reads the size of the batch from how results lie in memory."""

    def between(self, x: Tensor) -> Tensor:
        y = x.T.clone().T
        return x * sum(y.stride()) * (1 + y.untyped_storage().nbytes())


class ByPlace(Own):
    def between(self, x: Tensor) -> Tensor:
        return x + torch.arange(8.0).repeat(RECORDS, 1)[: len(x)].cumsum(0)


class ByCount(Own):
    """Counts its calls, and the numbers that were drawn."""

    calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        drawn = torch.random.get_rng_state().long().sum()
        dropped = F.dropout(x, 0.5)
        same = bool(torch.random.get_rng_state().long().sum() == drawn)
        return x * self.calls * (1 if same else len(x)) + 0 * dropped


@ENGINES
@pytest.mark.parametrize("kind", [BySize, ByStride, ByPlace, ByCount])
def test_a_record_counts_alike_whatever_the_size_of_its_batch_and_its_place(
    kind: type[nn.Module], engine: str
) -> None:
    """The sum over a batch is the sum over its halves."""
    task, x = Classification(classes=CLASSES), records()[:66]
    whole = clipped_sum(kind, x, task, engine)
    halves = [clipped_sum(kind, part, task, engine) for part in (x[:33], x[33:])]
    assert torch.allclose(whole, halves[0] + halves[1], atol=1e-4)


@pytest.mark.parametrize("kind", [ByCount, Own])
def test_records_are_computed_in_calls_whose_number_follows_from_nothing_private(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many records a step has drawn, there are as many calls."""
    monkeypatch.setattr("dpfl.engine.one_by_one._MOST_NUMBERS", 83 * 20)
    calls: list[int] = []

    class Counted(kind):  # type: ignore[misc,valid-type]
        def between(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x

    counts = set()
    for seed in range(5):
        calls.clear()
        torch.manual_seed(0)
        model = Counted()
        own = job(model, records(), Classification(classes=CLASSES), seed=seed, batch_size=30)
        OneByOne().run(model, Layout.of_module(model), [own])
        counts.add(len(calls))
    assert len(counts) == 1
    assert counts.pop() > 3


# ---- honest models -------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.top = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x.reshape(-1, 1, 2, 3))))
        return self.top((y + self.second(y)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.top = kind(2, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.layer(x.reshape(-1, 3, 2))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 1, 7, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.top = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.layers(x.reshape(-1, 3, 2)).mean(1))


class Written(nn.Module):
    """Writes what it computes into a tensor that it makes, and keeps a mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.norm = nn.Linear(NUMBERS, CLASSES), nn.LayerNorm(NUMBERS)
        self.register_buffer("mean", torch.zeros(NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        found = torch.zeros(len(x), CLASSES)
        for i, column in enumerate(self.top(self.norm(x)).unbind(1)):
            found[:, i] = column
        return found.squeeze_()[None] if len(x) == 1 else found


HONEST: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "attention": Attention,
    "written": Written,
    "own": Own,
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("width", [5, 1 << 25])
def test_honest_models_are_trained_as_by_a_loop_over_records(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, x = Classification(classes=CLASSES), records()[:40]
    torch.manual_seed(0)
    model = HONEST[name]()
    monkeypatch.setattr(
        "dpfl.engine.one_by_one._MOST_NUMBERS", width * Layout.of_module(model).size
    )
    layout, work = Layout.of_module(model), job(model, x, task, steps=4, lr=0.3)
    with torch.random.fork_rng():
        (got,) = make_engine("stacked").run(model, layout, [work])
        (wanted,) = OneByOne(one_at_a_time=True).run(model, layout, [work])
    error = float((got - wanted).norm() / (wanted - work.start).norm())
    assert math.isfinite(error)
    assert error < 5e-5
