"""Writes a slide of any size in flat memory, from few encoded cells that it repeats."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from aperio_svs import TILE, Level, Pixels, encode, shrink, write_svs
from cells import CELL, MPP, Cell, glass, painted_cells, real_cells
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from tifffile import TiffWriter

TISSUE = 0.2
"""The share of a slide that is tissue, nearly: whole cells are laid."""

_FACTORS = (1, 4, 16, 64)
_PIECE = 2  # reach in cells of the noise that gathers cells in pieces of tissue

Layout = NDArray[np.int64]
"""Number of the cell at each place of the grid, 0 for glass."""


def write_mosaic(path: Path, side: int, source: Path | None = None, painted: int = 6) -> None:
    """Writes `path`, `side` pixels square, and the exact class indices as `<stem>_mask.tif`.

    Both are pyramids. Tiles are encoded once for each different cell, so size alone costs little.

    Args:
        path: The slide, overwritten like its mask.
        side: Width and height in level-0 pixels.
        source: Folder of annotated tiles to paste; None paints cells.
        painted: How many different cells are painted.
    """
    rng = np.random.default_rng(side)
    tissue = painted_cells(painted, rng) if source is None else real_cells(source)
    share = TISSUE / float(np.mean([cell.tissue for cell in tissue]))
    layout = _layout(-(-side // CELL), share, len(tissue), rng)
    cells = [glass(), *tissue]

    levels, thumbnail = [], []
    for factor in _FACTORS:
        small = [shrink(cell.image, factor) for cell in cells]
        levels.append(_level(small, layout, side // factor, encode))
        thumbnail = small
    write_svs(path, levels, _assembly(thumbnail, layout), path.stem, MPP, big=True)
    _write_mask(path.with_name(f"{path.stem}_mask.tif"), cells, layout, side)


def _layout(count: int, share: float, kinds: int, rng: np.random.Generator) -> Layout:
    """`count`² cells, `share` of which, in a few pieces, are one of 1 … `kinds`."""
    height = gaussian_filter(rng.standard_normal((count, count)), _PIECE, mode="constant")
    held = min(max(1, round(share * height.size)), height.size)
    order = height.ravel().argsort()[::-1]
    layout = np.zeros(height.size, np.int64)
    layout[order[:held]] = rng.permutation(np.arange(held) % kinds) + 1
    return layout.reshape(height.shape)


def _write_mask(path: Path, cells: list[Cell], layout: Layout, side: int) -> None:
    with TiffWriter(path, bigtiff=True) as tiff:
        for factor in _FACTORS:
            small = [np.ascontiguousarray(cell.mask[::factor, ::factor]) for cell in cells]
            level = _level(small, layout, side // factor, _deflated)
            tiff.write(
                iter(level.tiles),
                shape=(level.height, level.width),
                dtype=np.uint8,
                tile=(TILE, TILE),
                photometric="minisblack",
                compression="adobe_deflate",
                subfiletype=int(factor > 1),
                metadata=None,
                software=False,
            )


def _deflated(tile: Pixels) -> bytes:
    return zlib.compress(tile.tobytes())


def _level(
    small: list[Pixels], layout: Layout, side: int, encoded: Callable[[Pixels], bytes]
) -> Level:
    """A level of the pyramid, given its cells."""
    tiles = _pasted if len(small[0]) >= TILE else _assembled
    return Level(side, side, tiles(small, layout, side, encoded))


def _pasted(
    small: list[Pixels], layout: Layout, side: int, encoded: Callable[[Pixels], bytes]
) -> Iterator[bytes]:
    """Tiles of a level on which a cell is several tiles, each of them encoded once."""
    each = len(small[0]) // TILE
    known: dict[tuple[int, int, int], bytes] = {}
    tiles = -(-side // TILE)
    for row in range(tiles):
        for column in range(tiles):
            cell = int(layout[row // each, column // each])
            # Glass is everywhere the same.
            top, left = (row % each * TILE, column % each * TILE) if cell else (0, 0)
            if (cell, top, left) not in known:
                tile = small[cell][top : top + TILE, left : left + TILE]
                known[cell, top, left] = encoded(tile)
            yield known[cell, top, left]


def _assembled(
    small: list[Pixels], layout: Layout, side: int, encoded: Callable[[Pixels], bytes]
) -> Iterator[bytes]:
    """Tiles of a level on which several cells make one tile."""
    each = TILE // len(small[0])
    tiles = -(-side // TILE)
    padded = np.pad(layout, (0, tiles * each - len(layout)))
    for row in range(0, tiles * each, each):
        for column in range(0, tiles * each, each):
            yield encoded(_assembly(small, padded[row : row + each, column : column + each]))


def _assembly(small: list[Pixels], layout: Layout) -> Pixels:
    return np.vstack([np.hstack([small[cell] for cell in line]) for line in layout])
