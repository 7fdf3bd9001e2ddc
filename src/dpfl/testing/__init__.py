"""Laws that every plug must pass, ours or a stranger's. Needs Hypothesis.

>>> from dpfl.plugs.stages import Clip
>>> check_stage(Clip(clip=1.0))
"""

from dpfl.testing.laws import (
    check_channel,
    check_denoiser,
    check_engine,
    check_local_work,
    check_row_denoiser,
    check_selection,
    check_stage,
    check_weights,
)
from dpfl.testing.support import check_releases, check_sampler, float_noise, impossible

__all__ = [
    "check_channel",
    "check_denoiser",
    "check_engine",
    "check_local_work",
    "check_releases",
    "check_row_denoiser",
    "check_sampler",
    "check_selection",
    "check_stage",
    "check_weights",
    "float_noise",
    "impossible",
]
