"""What a process must not do while it computes, and whose an error is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dpfl.core.checks import check
from dpfl.core.errors import ConfigurationError, DpflError, PrivacyRefusal
from dpfl.engine.base import Job


def check_arithmetic(jobs: Sequence[Job]) -> None:
    """Where noise protects, refuse to clip and add up in less than single precision.

    The sensitivity that is charged is proven for single precision only.
    """
    if not any(phase.noise_multiplier > 0 for job in jobs for phase in job.phases):
        return
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    tf32 = torch.cuda.is_available() and torch.backends.cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    reduced = {
        "autocast is on": autocast,
        "matrix products have a reduced precision": precision != "highest",
        "convolutions may use TF32": tf32,
    }
    what = ", ".join(name for name, found in reduced.items() if found)
    check(
        not what,
        "engine",
        f"{what}, and private training is proven for single precision only",
        "leave autocast, call torch.set_float32_matmul_precision('highest') and set "
        "torch.backends.cudnn.allow_tf32 = False",
        PrivacyRefusal,
    )


@contextmanager
def failures_of(where: str) -> Iterator[None]:
    """Let an error of the model or its data say whose they are."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise DpflError(
            where, f"the model failed on its data ({error})", "check model and data"
        ) from error


def check_device(name: str) -> None:
    """Refuse a device that torch does not know, or that this machine does not have."""
    try:
        if str(name).partition(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("it is neither cpu nor cuda")
        torch.empty(1, device=torch.device(name)).add_(1).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device '{name}'",
            f"cannot be used here ({str(error).splitlines()[0].rstrip('.')})",
            "use cpu",
        ) from error
