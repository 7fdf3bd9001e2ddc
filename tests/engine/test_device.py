"""Work on a device: nothing that lies on the host may meet what lies on the device, and results are
the CPU's.

Few machines have a device. Here the CPU plays both: whatever is moved to the device is copied and
marked, whatever is made without naming a device is the host's, and an operation on both fails, as
it would on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import dpfl
from dpfl.core.errors import ConfigurationError
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed, SecretRng
from dpfl.core.types import Phase
from dpfl.data.inputs import NUMBERS, Inputs, Pixels, Tokens
from dpfl.engine import ENGINES, make_engine
from dpfl.engine.base import Job
from dpfl.models import make_model, per_record, separation

HOST, DEVICE = "host", "device"
PLAY = torch.device("cpu", 0)  # equal to no tensor's own device, and yet the CPU
NAMES = sorted(set(ENGINES) - {"ray"})  # which is the stacked engine, on other machines


# ---- a device to play with -----------------------------------------------------------------------


class TwoSides(AssertionError):
    """An operation was given tensors of both sides."""


_MOVES = {Tensor.to, Tensor.cpu, Tensor.copy_}
_MAKES = {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn, torch.randint,
    torch.randperm, torch.eye, torch.linspace, torch.as_tensor, torch.from_numpy,
}  # fmt: skip
_HOST_ONLY = {Tensor.numpy, Tensor.__array__}


def _side(tensor: Tensor) -> str | None:
    return getattr(tensor, "_side", None)


def _put(result: Any, side: str | None) -> Any:
    if side is not None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                leaf._side = side
    return result


class PlayDevice(TorchFunctionMode):
    """Follows which side each tensor is on; what it has never seen (inside vmap, for instance) may
    go with either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", str(func))
        if func is Tensor.to and any(map(_is_play, tree_leaves((args[1:], kwargs)))):
            self.moved += 1
            return _put(func(*args, **kwargs).clone(), DEVICE)
        if func == Tensor.device.__get__ and _side(args[0]) == DEVICE:
            return PLAY
        if func is Tensor.cpu or (
            func is Tensor.to and any(map(_is_place, tree_leaves((args[1:], kwargs))))
        ):
            return _put(func(*args, **kwargs).clone(), HOST)
        if func in _MAKES:
            return _put(func(*args, **kwargs), DEVICE if _is_play(kwargs.get("device")) else HOST)
        if func in _HOST_ONLY and any(_side(t) == DEVICE for t in given):
            raise TwoSides(f"{name} of a tensor on the device")
        # A lone number may be on either side, as torch allows.
        sides = {_side(t) for t in given if t.ndim} - {None}
        if len(sides) > 1 and func not in _MOVES:
            raise TwoSides(
                f"{name} of tensors on both sides: {[(tuple(t.shape), _side(t)) for t in given]}"
            )
        result = func(*args, **kwargs)
        if func is Tensor.copy_:
            return result
        return _put(
            result, DEVICE if DEVICE in {_side(t) for t in given} else next(iter(sides), None)
        )


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, torch.device | str)


def _is_play(place: Any) -> bool:
    return _is_place(place) and str(place) == str(PLAY)


# ---- models and jobs -----------------------------------------------------------------------------


class Buffered(nn.Module):
    """A model with a buffer, which must follow it to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x * self.scale)


BYTES = Pixels(mean=(0.5,), deviation=(0.25,))
Build = Callable[[], nn.Module]
MODELS: dict[str, tuple[Build, tuple[int, ...], Inputs]] = {
    "chain": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,), NUMBERS),
    "chain without bias": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        (6,),
        NUMBERS,
    ),
    "network": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.LayerNorm(36),
            nn.Linear(36, 3),
        ),
        (1, 8, 8),
        BYTES,
    ),
    "lstm": (lambda: make_model("lstm", (7,), 3, PublicSeed(0), 4, Tokens(9)), (7,), Tokens(9)),
    "gru": (lambda: _Gru(), (7,), Tokens(9)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)),
        (6,),
        NUMBERS,
    ),
    "buffered": (Buffered, (6,), NUMBERS),
}


class _Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.recurrent = nn.GRU(4, 5, 2, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.recurrent(self.embedding(x))[0].mean(1))


PHASES = {
    "dp-sgd": Phase(
        steps=2, batch_size=4, sampling="poisson", lr=0.3, clip=0.5, noise_multiplier=0.7
    ),
    "dp-sgd in a ball": Phase(
        steps=2,
        batch_size=4,
        sampling="poisson",
        lr=0.3,
        clip=0.5,
        noise_multiplier=0.7,
        weight_decay=0.1,
        ball=0.2,
    ),
    "without noise": Phase(steps=2, batch_size=4, sampling="poisson", lr=0.3, clip=0.5),
    "sgd": Phase(steps=2, batch_size=4, sampling="shuffle", lr=0.3, weight_decay=0.1),
}


def jobs(name: str, model: nn.Module, *phases: Phase, poisoned: bool = False) -> list[Job]:
    _, shape, inputs = MODELS[name]
    start = Layout.of_module(model).read(model)
    made = []
    for i in range(2):
        generator = PublicSeed(i).generator()
        features = inputs.made_up(20 + i, shape, generator)
        if poisoned and features.is_floating_point():
            features[3] = float("nan")
        labels = torch.randint(0, 3, (20 + i,), generator=generator)
        rng = SecretRng.simulated(PublicSeed(i))
        made.append(
            Job(
                client=f"c{i}",
                start=start,
                phases=phases,
                features=features,
                labels=labels,
                rng=rng,
                inputs=inputs,
            )
        )
    return made


@pytest.fixture(autouse=True)
def known_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The play device is a mode, which engines take for a stranger's."""
    for module in (per_record, separation):
        monkeypatch.setattr(module, "mode_active", lambda: False)


@pytest.fixture(autouse=True)
def reproducible_models() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def run(
    engine: str, device: str, name: str, *phases: Phase, poisoned: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return make_engine(engine, device).run(
        model, Layout.of_module(model), jobs(name, model, *phases, poisoned=poisoned)
    )


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("work", PHASES)
@pytest.mark.parametrize(
    ("name", "poisoned"),
    [(name, False) for name in MODELS]
    + [(name, True) for name in MODELS if MODELS[name][2] is NUMBERS],
)
def test_nothing_of_the_host_meets_the_device(
    engine: str, work: str, name: str, poisoned: bool, request: pytest.FixtureRequest
) -> None:
    expected = run(engine, "cpu", name, PHASES[work], poisoned=poisoned)
    torch.manual_seed(0)
    model = MODELS[name][0]()
    given = jobs(name, model, PHASES[work], poisoned=poisoned)
    for tensor in [
        *model.parameters(),
        *model.buffers(),
        *(t for j in given for t in (j.start, j.features, j.labels)),
    ]:
        tensor._side = HOST
    with PlayDevice() as device:
        got = make_engine(engine, str(PLAY)).run(model, Layout.of_module(model), given)
    assert device.moved >= len(given)  # records were taken to the device
    assert [_side(vector) for vector in got] == [HOST] * len(given)  # and models brought back
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) or (
            poisoned and torch.equal(a.isnan(), b.isnan())
        )


def test_the_device_to_play_with_notices_what_a_real_one_would() -> None:
    """Else the test above could not fail."""
    x = torch.ones(3)
    x._side = HOST
    with PlayDevice():
        there = x.to(PLAY)
        assert (
            (there + there)._side
            == there.new_zeros(2)._side
            == torch.zeros(2, device=PLAY)._side
            == DEVICE
        )
        assert (there * 2 + torch.tensor(1.0)).sum()._side == DEVICE
        assert there.cpu()._side == x._side == torch.zeros(2)._side == HOST
        for wrong in (
            lambda: there + x,
            lambda: there * torch.ones(3),
            lambda: torch.where(there > 0, there, torch.zeros(3)),
            lambda: there[torch.arange(2)],
            lambda: there.add_(x),
            lambda: torch.cat([there, x]),
            lambda: there.numpy(),
            lambda: nn.functional.linear(there, torch.ones(2, 3)),
        ):
            with pytest.raises(TwoSides):
                wrong()


@pytest.mark.parametrize("name", ["chain", "network", "lstm", "buffered"])
def test_a_whole_run_evaluates_on_the_device_too(name: str) -> None:
    build, shape, inputs = MODELS[name]
    generator = PublicSeed(3).generator()
    raw = inputs.made_up(60, shape, generator).numpy().reshape(2, 30, *shape)
    labels = np.arange(60).reshape(2, 30) % 3
    tokens = inputs.vocabulary if isinstance(inputs, Tokens) else None
    federation = dpfl.Federation.from_arrays(
        {c: (raw[i], labels[i]) for i, c in enumerate("ab")}, tokens=tokens
    )
    strategy = dpfl.fedavg(lr=0.1, batch_size=8, local_steps=2)
    model = build()
    expected = dpfl.train(model, federation, strategy, rounds=2)
    own = federation.shards["a"]  # all records lie in its storages
    held = [own.train.features, own.train.labels, own.test.features, own.test.labels]
    for tensor in [*model.parameters(), *model.buffers(), *held]:
        tensor._side = HOST
    with PlayDevice() as device:
        result = dpfl.train(model, federation, strategy, rounds=2, device=str(PLAY))
    assert device.moved > 0
    for ours, theirs in zip(result.history, expected.history, strict=True):
        assert ours.to_dict() == {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for key, value in theirs.to_dict().items()
        }
    for a, b in zip(result.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.allclose(
            a, b, rtol=1e-5, atol=1e-6
        )  # the host's matrix products are another library's


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("name", ["chain", "network", "dropout"])
def test_the_cpu_is_the_default_and_may_be_named(engine: str, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    layout = Layout.of_module(model)
    unnamed = make_engine(engine).run(model, layout, jobs(name, model, PHASES["dp-sgd"]))
    assert all(
        torch.equal(a, b)
        for a, b in zip(unnamed, run(engine, "cpu", name, PHASES["dp-sgd"]), strict=True)
    )
    assert all(vector.device.type == "cpu" for vector in unnamed)


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_not_here_is_refused_when_the_engine_is_made(
    engine: str, device: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_engine(engine, device)
    text = str(caught.value)
    assert text.startswith(f"device '{device}': cannot be used here (")
    assert text.endswith("use cpu")
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_train_refuses_a_device_that_is_not_here(device: str) -> None:
    x, y = np.zeros((10, 6)), [0, 1] * 5
    federation = dpfl.Federation.from_arrays({"a": (x, y)})
    with pytest.raises(ConfigurationError, match=f"device '{device}': cannot be used here"):
        dpfl.train(
            nn.Linear(6, 2),
            federation,
            dpfl.fedavg(lr=0.1, batch_size=2, local_steps=1),
            rounds=1,
            device=device,
        )


# ---- a real device -------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("work", PHASES)
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "dropout"]
)  # whose masks are the device's own
def test_cuda_gives_what_the_cpu_gives(engine: str, work: str, name: str) -> None:
    on_cpu, on_cuda = (run(engine, device, name, PHASES[work]) for device in ("cpu", "cuda"))
    start = Layout.of_module(model := MODELS[name][0]()).read(model)
    for a, b in zip(on_cpu, on_cuda, strict=True):
        assert b.device.type == "cpu"
        assert float((a - b).norm() / (a - start).norm()) < 1e-3
