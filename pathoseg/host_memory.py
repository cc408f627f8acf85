"""Keeps host memory that a step or a tile has freed for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable

from pathoseg.platform_support import c_function

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_NEVER = -1
LARGE = 2**30  # bytes of a tensor that a layer frees and the next one takes
_LARGEST = 2**25  # bytes; older releases allow no more


def keep_freed_memory(largest: int = _LARGEST) -> None:
    """Have glibc keep what this process frees, but for tensors above `largest`.

    It would give the activations of a step back to the kernel, and the next step would pay for
    each of their pages again: GPipe with 8 microbatches of ResNet-110-v2 took 2.7 s instead of
    1.9 (benchmarks/schedules-measured), and a forward of a U-Net 1.5 times as long. Nothing happens
    where MALLOC_TRIM_THRESHOLD_ is set, or the C library has no mallopt.

    Args:
        largest: In bytes.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return
    mallopt(_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_MMAP_THRESHOLD, largest):
        mallopt(_MMAP_THRESHOLD, _LARGEST)


def share_one_heap() -> None:
    """Have all threads take memory from the process's one heap; a thread's own holds no large
    tensors, and a forward pass in it pays for each page at every layer.

    To be called before anything computes: threads that have a heap by then keep it, and later ones
    are given it, too, in turn. Nothing happens where `keep_freed_memory` does nothing.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def _mallopt() -> Callable[[int, int], int] | None:
    if "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return None
    return c_function("mallopt")


def give_back_freed_memory() -> None:
    """Give the kernel what is free now, as after work that comes once and takes much."""
    trim = c_function("malloc_trim")
    if trim is not None:
        trim(0)
