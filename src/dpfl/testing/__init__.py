"""Laws that every plug must pass, ours or a stranger's. Needs Hypothesis.

>>> from dpfl.plugs.stages import Clip
>>> check_plug(Clip(clip=1.0))
"""

from dpfl.testing.laws import (
    check_channel,
    check_engine,
    check_local_work,
    check_personal,
    check_release,
    check_selection,
    check_stage,
)
from dpfl.testing.methods import check_method, check_plug
from dpfl.testing.server_laws import (
    check_central_noise,
    check_denoiser,
    check_row_denoiser,
    check_step,
    check_weights,
)
from dpfl.testing.support import check_releases, check_sampler, float_noise, impossible

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
