"""How a process computes: with one thread, and without giving memory back between steps."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from threadpoolctl import ThreadpoolController

from dpfl.core.errors import ConfigurationError, PrivacyRefusal

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's <malloc.h>


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: reductions do not depend on the machine, and processes do not fight
    over cores.
    """
    _keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _numpy_threads().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _numpy_threads() -> ThreadpoolController:
    """The threads of the BLAS that numpy has brought along."""
    return ThreadpoolController().select(user_api="blas")


def check_arithmetic() -> None:
    """Refuse to clip and add up records in less than single precision: the sensitivity that is
    charged would not hold.
    """
    reduced = (
        (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"), "autocast is on"),
        (
            torch.get_float32_matmul_precision() != "highest",
            "matrix products have a reduced precision",
        ),
        (
            torch.cuda.is_available() and torch.backends.cudnn.allow_tf32,
            "convolutions may use TF32",
        ),
    )
    for true, what in reduced:
        if true:
            raise PrivacyRefusal(
                "engine",
                f"{what}, and what private training charges is proven for single precision only",
                "leave autocast, call torch.set_float32_matmul_precision('highest') and set "
                "torch.backends.cudnn.allow_tf32 = False",
            )


def check_device(name: str) -> None:
    """Refuse a device that torch does not know, or that this machine does not have."""
    kind = str(name).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"device '{name}'", "cannot be used here (it is neither cpu nor cuda)", "use cpu"
        )
    try:
        torch.empty(1, device=torch.device(name)).add_(1).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigurationError(
            f"device '{name}'", f"cannot be used here ({reason})", "use cpu"
        ) from error


@functools.cache
def _keep_memory() -> None:
    """Let glibc reuse large blocks instead of mapping and clearing fresh pages at every step (10-40
    % of a CNN's time).

    Up to 2 GiB of freed memory stay with the process. Other C libraries are left as they are.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(
                _MMAP_MAX, 0
            )  # a higher mapping threshold would do, but glibc refuses one above 32 MiB
            libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
