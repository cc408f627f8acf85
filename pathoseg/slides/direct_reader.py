"""Slides whose compressed tiles are read from the file and decoded one by one, without a detour."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Level, Size
from pathoseg.platform_support import open_for_reading, read_at
from pathoseg.slides.levels import averages
from pathoseg.slides.openslide_reader import OpenSlideSlide
from pathoseg.slides.slide_file import SlideFile
from pathoseg.slides.tiff_reader import TiffSlide
from pathoseg.slides.tile_codec import Compression
from pathoseg.slides.tile_table import TileTable, tile_tables

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
    """Return the levels between the stored ones, and beyond the last, that JPEG decodes directly.

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


# The scanners' formats that are a plain grid of tiles. Others overlap them (Ventana, Trestle), put
# them at offsets (Leica) or leave some out (Philips).
_PLAIN_GRIDS = {"aperio", "ome", "tiff"}
_KEPT_BYTES = 16 << 20  # the tiles that the edges of a box of 2,048² cut, of the usual sizes

Pixels = NDArray[np.uint8]


def directly(slide: OpenSlideSlide | TiffSlide) -> OpenSlideSlide | TiffSlide | DirectSlide:
    """The same slide read directly, or as it is where no level of it can be."""
    if slide.vendor not in _PLAIN_GRIDS:
        return slide
    tables = tile_tables(slide.path, [level.size for level in slide.levels])
    return DirectSlide(slide, tables) if any(tables) else slide


class _TileFile:
    """An open file, its tiles decoded, and some of them kept.

    Rooms for tiles are used again and again: new memory costs a fifth of what decoding does.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._kept: dict[tuple[int, int], Pixels] = {}  # the oldest first
        self._kept_bytes = 0
        self._passing: dict[tuple[int, ...], Pixels] = {}

    def tile(self, level: int, table: TileTable, index: int, keep: bool) -> Pixels | None:
        """A decoded tile, to be read until the next call; None where it cannot be decoded surely.

        Args:
            level: Whose tile it is.
            table: That level's.
            index: Which tile.
            keep: Whether it will be needed again soon.
        """
        tile = self._kept.pop((level, index), None)
        if tile is not None:
            self._kept_bytes -= tile.nbytes
        else:
            tile = self._room(table.codec.shape, keep)
            if not self._decode(table, index, tile):
                return None
        if keep:
            self._kept[level, index] = tile
            self._kept_bytes += tile.nbytes
        return tile

    def _room(self, shape: tuple[int, int, int], keep: bool) -> Pixels:
        if not keep:
            if shape not in self._passing:
                self._passing[shape] = np.empty(shape, np.uint8)
            return self._passing[shape]
        oldest = None
        while self._kept and self._kept_bytes + math.prod(shape) > _KEPT_BYTES:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._kept_bytes -= oldest.nbytes
        if oldest is not None and oldest.shape == shape:
            return oldest
        return np.empty(shape, np.uint8)

    def _decode(self, table: TileTable, index: int, room: Pixels) -> bool:
        count, offset = int(table.counts[index]), int(table.offsets[index])
        stored = room.nbytes * table.codec.shrink**2
        # no codec doubles what it encodes
        if not (0 < count <= 2 * stored + 65_536 and offset > 0):
            return False
        try:
            data = read_at(self._descriptor, count, offset)
        except OSError:
            return False
        return len(data) == count and table.codec.decode(data, room)

    def close(self) -> None:
        os.close(self._descriptor)


class DirectSlide(SlideFile[_TileFile]):
    """A tiled TIFF (Aperio, OME, generic) read tile by tile.

    Pixels of stored levels are those of the reader it takes the place of. That one gives the
    header, and reads the levels and single tiles of which it is not certain how OpenSlide would
    show them: left out, broken, or stored in an unusual way. Between stored levels that are JPEG
    lie reduced ones.

    Args:
        fallback: The slide, opened by the other reader.
        tables: The tiles of each level, None for levels to be left to the other reader.
    """

    def __init__(
        self, fallback: OpenSlideSlide | TiffSlide, tables: list[TileTable | None]
    ) -> None:
        self._fallback, self._tables = fallback, tables
        self._reductions = reductions(fallback.levels, tables)
        self._left = 0
        super().__init__(fallback.path)
        fallback.close()  # until it is needed

    def __repr__(self) -> str:
        direct = ", ".join(str(level) for level, table in enumerate(self._tables) if table)
        return (
            f"DirectSlide({str(self.path)!r}: levels {direct} read directly, "
            f"{self._left} tiles left to {type(self._fallback).__name__})"
        )

    def _open(self) -> _TileFile:
        try:
            return _TileFile(open_for_reading(self.path))
        except OSError as error:
            raise PathosegError(
                f"{self.path} cannot be opened: {error.strerror}.",
                "Check that it is still where it was.",
            ) from error

    def _read_header(self, assume_mpp: float | None) -> None:
        fallback = self._fallback
        self.vendor, self.levels = fallback.vendor, fallback.levels
        self.reduced = tuple(reduction.level for reduction in self._reductions)
        self.mpp, self.origin = fallback.mpp, fallback.origin
        self.held_pixels, self.warnings = fallback.held_pixels, fallback.warnings

    def read_level(self, level: int, box: Box) -> Pixels:
        """See `Slide.read_level`."""
        table = (*self._tables, *(reduction.table for reduction in self._reductions))[level]
        if table is None:
            return self._fallback.read_level(level, box)
        file, side = self._opened(), table.codec.size
        size = (*self.levels, *self.reduced)[level].size
        pixels = np.empty((box.height, box.width, 3), np.uint8)
        columns = _pieces(box.x, box.right, side.width, size.width)
        for row in _pieces(box.y, box.bottom, side.height, size.height):
            for column in columns:
                index = row.number * table.columns + column.number
                # the boxes beside this one need the tiles that its edges cut
                tile = file.tile(level, table, index, keep=row.is_cut or column.is_cut)
                room = pixels[row.target, column.target]
                if tile is not None:
                    room[:] = tile[row.source, column.source]
                else:
                    self._left += 1
                    x, y = box.x + column.target.start, box.y + row.target.start
                    part = Box(x, y, room.shape[1], room.shape[0])
                    room[:] = self._read_otherwise(level, part)
        return pixels

    def _read_otherwise(self, level: int, box: Box) -> Pixels:
        if level < len(self.levels):
            return self._fallback.read_level(level, box)
        reduction = self._reductions[level - len(self.levels)]
        n = reduction.shrink
        stored = Box(n * box.x, n * box.y, n * box.width, n * box.height)
        return averages(self._fallback.read_level(reduction.stored, stored), n, n)

    def close(self) -> None:
        """Free the handles; a later read opens others."""
        super().close()
        self._fallback.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fallback": copy.copy(self._fallback), "_left": 0}


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of one row or column of tiles that a box covers.

    Attributes:
        number: Of the row or column.
        source: Where it lies in the tiles.
        target: Where it lies in the box.
        is_cut: Whether the tiles show more of the slide.
    """

    number: int
    source: slice
    target: slice
    is_cut: bool


def _pieces(start: int, end: int, side: int, length: int) -> list[_Piece]:
    """The pieces of a box from `start` to `end` of a level of some length, in tiles of `side`."""
    found = []
    for number in range(start // side, -(-end // side)):
        first, last = number * side, min((number + 1) * side, length)
        low, high = max(first, start), min(last, end)
        source, target = slice(low - first, high - first), slice(low - start, high - start)
        found.append(_Piece(number, source, target, (low, high) != (first, last)))
    return found
