"""Laws of a whole method: all of its plugs, and that nothing but noisy integers is released.

Tests of likelihood pass noise that has holes: values that noise alone can never produce prove that
something was added to it. :func:`check_releases` rules that out for a whole method. It plays a
round with one client's data, and again with the data of that client zeroed and the noise moved so
that every noisy integer q + X is the same. Then whatever is released must be the same, bit for bit:
uploads where the method protects against the server, the model where it protects against the world.
Noise added in floating point fails this (:func:`float_noise` is the positive control).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple, get_type_hints
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dpfl import rounds
from dpfl.core import grid_noise
from dpfl.core.grid import Grid, NoiseSource
from dpfl.core.layout import Layout
from dpfl.core.random import PublicSeed
from dpfl.core.types import Budget, Observer
from dpfl.data.federation import Federation
from dpfl.engine import make_engine
from dpfl.plugs.base import NoiseMaker, Plug
from dpfl.plugs.channels import Channel
from dpfl.privacy.ledger import Ledger
from dpfl.rounds.members import honest_members
from dpfl.strategy import Strategy
from dpfl.strategy.method import Method
from dpfl.testing import laws, server_laws
from dpfl.testing.fixtures import TERMS

VICTIM = "c0"
_CLASSES, _FEATURES = 8, 16  # 128 coordinates
_LAWS: tuple[Callable[[Any], None], ...] = (
    laws.check_selection,
    laws.check_local_work,
    laws.check_personal,
    laws.check_stage,
    server_laws.check_channel,
    server_laws.check_row_denoiser,
    server_laws.check_weights,
    server_laws.check_central_noise,
    server_laws.check_denoiser,
    server_laws.check_step,
)


def check_plug(plug: Plug) -> None:
    """Check the laws of the slot that a plug is for: those whose argument is of its kind."""
    for law in _LAWS:
        kind = next(iter(get_type_hints(law).values()))
        noisy = kind is Channel and isinstance(plug, NoiseMaker)  # delivers no plain sum
        if isinstance(plug, kind) and not noisy:
            law(plug)


def check_method(method: Method, *, model: nn.Module | None = None, **settings: Any) -> None:
    """Check a method as a stranger's would be: it builds, describes itself, every plug keeps the
    laws of its slot, and nothing that its adversary sees depends on a client's data but through
    noisy integers.

    ``settings`` are those without a default, and any others that should be tried. A method with
    releases before round one needs a ``model`` of 16 inputs and 8 outputs that has their buffers.
    """
    strategy = method.build(settings)
    strategy = strategy if model is None else strategy.for_model(model)
    for release in strategy.releases:
        assert model is not None, f"'{method.name}' has releases: give a model with their buffers"
        shape = rounds.buffer_shapes(model, (release,))[release.into]
        laws.check_release(release, shape[0], shape)
    assert strategy.name == method.name, f"'{method.name}' builds a strategy '{strategy.name}'"
    assert method.about.endswith("."), f"the docstring of '{method.name}' has no first sentence"
    for _, plug in strategy.resolve(TERMS).slots():
        check_plug(plug)
    if strategy.observer is not Observer.NOBODY:
        check_releases(strategy, model=model)


def check_releases(
    strategy: Strategy, engine: str = "one_by_one", model: nn.Module | None = None
) -> None:
    """Nothing that the method's adversary sees depends on a client's data but through noisy
    integers.

    ``model`` takes 16 inputs and gives 8 outputs; strategies with releases before round one need
    one that has their buffers.
    """
    recorded: list[Tensor] = []
    with _noisy_integers(recorded.append):
        present = _transcript(strategy, engine, model, zeroed=False)
    assert recorded, f"{strategy.name} draws no noise on a grid"
    script = iter(recorded)
    with _noisy_integers(lambda _: None, script):
        absent = _transcript(strategy, engine, model, zeroed=True)
    more = next(script, None) is not None
    assert not more, f"{strategy.name} draws noise less often when a client's data is zeroed"
    for what, one, other in zip(("uploads", "the model"), present, absent, strict=True):
        problem = f"{what} tell more of a client than noisy integers do"
        assert one == other, (
            f"{strategy.name}: {problem}; counterexample: zero the data of {VICTIM}"
        )


class _Rigged(NamedTuple):
    """Hands out given noise in place of a generator's."""

    noise: Tensor

    def grid_noise_(self, out: Tensor) -> Tensor:
        return out.copy_(self.noise.reshape(out.shape))


def _noisy_integers(
    record: Callable[[Tensor], None], forced: Iterator[Tensor] | None = None
) -> AbstractContextManager[Any]:
    """Watch the noisy integers of every mechanism, or move the noise so that they are the given
    ones.
    """
    original = Grid.noisy_integers

    def noisy(grid: Grid, vector: Tensor, rng: NoiseSource, largest: float) -> Tensor:
        own = grid.integers(vector).clamp(-largest, largest)
        if forced is None:
            noise = rng.grid_noise_(torch.empty(vector.numel())).view(vector.shape).double()
        else:
            wanted = next(forced, torch.empty(0))
            same = wanted.shape == vector.shape
            assert same, "the length or number of releases changes with a client's data"
            noise = wanted - own
        record(own + noise)
        return original(grid, vector, _Rigged(noise), largest)

    return patch.object(Grid, "noisy_integers", noisy)


def float_noise() -> AbstractContextManager[Any]:
    """Replace noise on a grid by noise computed in single precision and then added: what the laws
    must catch.
    """

    def noised(grid: Grid, vector: Tensor, rng: NoiseSource) -> Tensor:
        noise = rng.grid_noise_(torch.empty(vector.numel())).view(vector.shape) / grid_noise.SCALE
        std = torch.tensor(grid.step * grid_noise.SCALE, dtype=torch.float32)
        return vector.to(torch.float32) + std * noise

    return patch.object(Grid, "noised", noised)


def _transcript(
    strategy: Strategy, engine: str, given: nn.Module | None, *, zeroed: bool
) -> tuple[list[bytes], bytes]:
    """Play all releases and one round, seeded; return the uploads (where the server is an
    adversary) and the next model with its public buffers.
    """
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Linear(_FEATURES, 4, bias=False), nn.Linear(4, _CLASSES, bias=False))
    model = usual if given is None else copy.deepcopy(given)
    generator = PublicSeed(1).generator()
    labels = torch.arange(12) % _CLASSES
    arrays = {}
    budgets = {}
    for i in range(4):
        x = torch.randn(12, _FEATURES, generator=generator)
        kept = 0.0 if zeroed and f"c{i}" == VICTIM else 1.0
        arrays[f"c{i}"] = (x * kept, labels, x[:2], labels[:2])
        budgets[f"c{i}"] = Budget(epsilon=2.0**i, delta=1e-5)
    federation = Federation.from_arrays(arrays, classes=_CLASSES, budgets=budgets)
    members = honest_members(federation)
    layout = Layout.of_module(model)
    claims = {client: member.claims for client, member in members.items()}
    agreement = rounds.enrol(
        strategy, claims, 1, layout, rounds.buffer_shapes(model, strategy.releases)
    )
    sent: list[bytes] = []
    with closing(Ledger.create(":memory:", "law")) as ledger:
        run = rounds.Run(name="law", ledger=ledger, seed=PublicSeed(2), public=PublicSeed(3))
        ledger.register(run.name, seeded=True, title=strategy.name)
        workshop = rounds.Workshop(
            agreement=agreement,
            run=run.name,
            engine=make_engine(engine),
            model=model,
            secret=lambda round_, client: run.secret("client", round_, client),
        )
        state = rounds.first_state(agreement, layout.read(model))
        admit = rounds.charging(agreement, run)
        while state.round < 1:
            plan = rounds.open_round(agreement, state, run, lambda client: True)
            cohort = {client: members[client] for client in plan.cohort.ids}
            uplinks = rounds.client_round(workshop, plan.downloads, cohort, admit=admit)
            sent += [uplink.payload or b"" for uplink in uplinks if uplink.client == VICTIM]
            state, _ = rounds.close_round(agreement, state, plan, uplinks, run)
    seen = sent if strategy.observer is Observer.SERVER and strategy.channel.sees_rows else []
    public = [state.model, *(state.buffers[name] for name in sorted(state.buffers))]
    return seen, b"".join(tensor.numpy().tobytes() for tensor in public)
