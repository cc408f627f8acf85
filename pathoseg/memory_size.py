"""The size of a memory, as people write it and as bytes."""

from __future__ import annotations

import re
from math import ceil

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_memory(given: object) -> int:
    """Bytes of `16GiB`, `16GB` (decimal) or `16G` (as Slurm does, like GiB); a unit is needed.

    Raises:
        ValueError: It is no such text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(I?B)?\s*", str(given).upper())
    if match is None or float(match[1]) == 0:
        raise ValueError("no size of a memory; write for example 16GiB")
    unit = _UNITS[match[2]]
    if match[3] == "B":
        unit = 1000 ** ([*_UNITS].index(match[2]) + 1)
    return int(float(match[1]) * unit)


def memory_text(size: float) -> str:
    """Bytes in words, never fewer: what is recommended so is enough."""
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size <= 1023:
            return f"{ceil(size)} {unit}"
    return f"{ceil(size / 1024 * 100) / 100:.12g} GiB"
