"""How a process computes: with one thread, and without giving memory back between steps."""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from threadpoolctl import ThreadpoolController

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's <malloc.h>


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread.

    Reductions then do not depend on the machine, and processes do not compete for cores.
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
    """The threads of the BLAS that numpy comes with."""
    return ThreadpoolController().select(user_api="blas")


@functools.cache
def _keep_memory() -> None:
    """Let glibc reuse large blocks of memory instead of mapping and clearing fresh pages.

    Fresh pages at every step cost 10 to 40 % of a CNN's time. Up to 2 GiB of freed memory stay with
    the process. Other C libraries are left as they are.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            # A higher mapping threshold would do, but glibc refuses one above 32 MiB.
            libc.mallopt(_MMAP_MAX, 0)
            libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
