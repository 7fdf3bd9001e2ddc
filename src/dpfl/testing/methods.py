"""Laws for a whole method: all of its plugs, and that nothing but noisy integers is released."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dpfl.core.types import Observer
from dpfl.plugs.base import NoiseMaker, Plug
from dpfl.plugs.central_noise import CentralNoise
from dpfl.plugs.channels import Channel
from dpfl.plugs.denoise import Denoiser, RowDenoiser
from dpfl.plugs.local_work import LocalWork
from dpfl.plugs.personal import Personal
from dpfl.plugs.selection import Selection
from dpfl.plugs.stages import Stage
from dpfl.plugs.step import Step
from dpfl.plugs.weights import Weights
from dpfl.rounds.release import buffer_shapes
from dpfl.strategy.method import Method
from dpfl.testing import laws, server_laws
from dpfl.testing.fixtures import TERMS
from dpfl.testing.support import check_releases

_LAWS: tuple[tuple[type[Plug], Callable[[Any], None]], ...] = (
    (Selection, laws.check_selection),
    (LocalWork, laws.check_local_work),
    (Personal, laws.check_personal),
    (Stage, laws.check_stage),
    (RowDenoiser, server_laws.check_row_denoiser),
    (Weights, server_laws.check_weights),
    (CentralNoise, server_laws.check_central_noise),
    (Denoiser, server_laws.check_denoiser),
    (Step, server_laws.check_step),
)


def check_plug(plug: Plug) -> None:
    """Check the laws of the slot that a plug is for."""
    if isinstance(plug, Channel) and not isinstance(plug, NoiseMaker):
        laws.check_channel(plug)
    for kind, law in _LAWS:
        if isinstance(plug, kind):
            law(plug)


def check_method(method: Method, *, model: nn.Module | None = None, **settings: Any) -> None:
    """Check a method as a stranger's would be: it builds, describes itself, every plug keeps the
    laws of its slot, and nothing that its adversary sees depends on a client's data but through
    noisy integers.

    ``settings`` are those without a default, and any others that should be tried. A method with
    releases before round one needs a ``model`` of 16 inputs and 8 outputs that has their buffers.
    """
    strategy = method.build(settings)
    for release in strategy.releases:
        assert model is not None, f"'{method.name}' has releases: give a model with their buffers"
        shape = buffer_shapes(model, (release,))[release.into]
        laws.check_release(release, shape[0], shape)
    assert strategy.name == method.name, f"'{method.name}' builds a strategy '{strategy.name}'"
    assert method.about.endswith("."), f"the docstring of '{method.name}' has no first sentence"
    for _, plug in strategy.resolve(TERMS).slots():
        check_plug(plug)
    if strategy.observer is not Observer.NOBODY:
        check_releases(strategy, model=model)
