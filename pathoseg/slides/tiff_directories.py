"""Walks a TIFF's chain of directories before tifffile does, which follows a circle for ever."""

from __future__ import annotations

import struct
from pathlib import Path

_SUB_IFDS = 330
# A slide has some ten levels, a label, an overview; an OME-TIFF may hold many images.
_MOST_DIRECTORIES, _MOST_SUB_IFDS, _MOST_ENTRIES = 1000, 100, 4096


def check_directories(path: Path) -> bool:
    """Makes sure that the directories of a TIFF come to an end, be it the file's.

    Returns:
        Whether all of them are in the file; else it is cut short.

    Raises:
        ValueError: They run in a circle, or are more than any slide has.
    """
    with path.open("rb") as file:
        head = file.read(16)
        order, big = ("<" if head.startswith(b"II") else ">"), b"+" in head[2:4]
        layouts = ("Q", "HHQQ", "Q") if big else ("H", "HHII", "I")
        number, entry, place = (struct.Struct(order + layout) for layout in layouts)
        pointer = head[8:16] if big else head[4:8]
        seen: set[int] = set()
        while len(pointer) == place.size:
            (offset,) = place.unpack(pointer)
            if offset == 0:
                return True
            if offset in seen or len(seen) == _MOST_DIRECTORIES:
                raise ValueError("its list of images has no end")
            seen.add(offset)
            file.seek(offset)
            counted = file.read(number.size)
            entries = number.unpack(counted)[0] if len(counted) == number.size else 0
            table = file.read(min(entries, _MOST_ENTRIES) * entry.size)
            whole = len(table) // entry.size * entry.size
            for code, _, values, _ in entry.iter_unpack(table[:whole]):
                if code == _SUB_IFDS and values > _MOST_SUB_IFDS:
                    raise ValueError(f"an image in it claims {values} smaller ones")
            pointer = file.read(place.size)
    return False
