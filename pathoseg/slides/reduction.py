"""Levels between the stored ones, to which JPEG tiles decode in less time than to their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from pathoseg.geometry import Level, Size
from pathoseg.slides.tile_codec import Compression
from pathoseg.slides.tile_table import TileTable

_SHRINKS = (2, 4, 8)  # what divides the sides of a JPEG's blocks of 8 × 8 pixels


@dataclass(frozen=True)
class Reduction:
    """A level that is decoded from the tiles of a stored one.

    libjpeg computes the means of `shrink` × `shrink` pixels from a block's frequencies, without
    the pixels (its jidctred.c). Only colour that is stored in less detail than brightness differs
    from the mean of the decoded pixels: it is not made smooth in between.

    Attributes:
        level: Its size, which leaves out what is less than a pixel, and its downsample.
        stored: Index of the stored level.
        shrink: Pixels of that level per pixel of this, 2, 4 or 8.
        table: The stored level's tiles, decoded smaller.
    """

    level: Level
    stored: int
    shrink: int
    table: TileTable


def reductions(
    levels: Sequence[Level], tables: Sequence[TileTable | None]
) -> tuple[Reduction, ...]:
    """What lies between the stored levels of a slide, and behind the last.

    Args:
        levels: The stored levels.
        tables: The tiles of each, None where they are not decoded directly.
    """
    found = []
    for index, (level, table) in enumerate(zip(levels, tables, strict=True)):
        if table is None or table.codec.compression is not Compression.JPEG:
            continue
        coarser = [other.downsample for other in levels if other.downsample > level.downsample]
        for shrink in _SHRINKS:
            reduced = _reduced(level, shrink)
            divisible = table.codec.size.width % shrink == table.codec.size.height % shrink == 0
            if divisible and reduced.size.pixels and reduced.downsample < min(coarser, default=inf):
                codec = replace(table.codec, size=_divided(table.codec.size, shrink), shrink=shrink)
                found.append(Reduction(reduced, index, shrink, replace(table, codec=codec)))
    return tuple(found)


def _reduced(level: Level, shrink: int) -> Level:
    return Level(_divided(level.size, shrink), level.downsample * shrink)


def _divided(size: Size, shrink: int) -> Size:
    return Size(size.width // shrink, size.height // shrink)
