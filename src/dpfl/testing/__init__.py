"""Laws that every plug must pass, ours or a stranger's. Needs Hypothesis.

>>> from dpfl.client.stages import Clip
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

__all__ = [
    "check_channel",
    "check_denoiser",
    "check_engine",
    "check_local_work",
    "check_row_denoiser",
    "check_selection",
    "check_stage",
    "check_weights",
]
