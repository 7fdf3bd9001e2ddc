"""Laws that every plug must pass, ours or a stranger's. Needs Hypothesis.

``check_plug`` picks the laws of the slot that a plug is for. ``check_method`` checks a whole
method: that it builds and describes itself, the laws of all its plugs, and that nothing its
adversary sees depends on a client's data but through noisy integers. An AssertionError names the
plug and the counterexample that was found.

>>> from dpfl.plugs.stages import Clip
>>> check_plug(Clip(clip=1.0))

The laws test behaviour only, so they need no knowledge of how a plug works. They complement proofs:
a plug that passes them can still be wrong, one that fails them is.
"""

from importlib.util import find_spec

from dpfl.core.checks import check

_INSTALL = "run: pip install 'dpfl[testing]'"
check(find_spec("hypothesis") is not None, "dpfl.testing", "needs Hypothesis", _INSTALL)

from dpfl.testing.laws import (
    check_engine,
    check_local_work,
    check_personal,
    check_release,
    check_selection,
    check_stage,
)
from dpfl.testing.methods import check_method, check_plug, check_releases, float_noise
from dpfl.testing.noise import check_sampler, impossible
from dpfl.testing.server_laws import (
    check_central_noise,
    check_channel,
    check_denoiser,
    check_row_denoiser,
    check_step,
    check_weights,
)

__all__ = [
    "check_central_noise",
    "check_channel",
    "check_denoiser",
    "check_engine",
    "check_local_work",
    "check_method",
    "check_personal",
    "check_plug",
    "check_release",
    "check_releases",
    "check_row_denoiser",
    "check_sampler",
    "check_selection",
    "check_stage",
    "check_step",
    "check_weights",
    "float_noise",
    "impossible",
]
