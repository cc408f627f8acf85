"""Writes a slide of any size in flat memory: painted cores pasted like a tissue microarray."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from aperio_svs import TILE, Level, Pixels, cut, encode, shrink, write_svs
from numpy.typing import NDArray
from scene import MPP, make_scene
from shapely import LineString
from texture import Stain, covered, paint
from tifffile import TiffWriter

CELL = 2048
"""Side of a cell of the mosaic in level-0 pixels; a cell holds one core or glass."""

SHARE = 0.35
"""Cells that hold a core; as a core fills half of its cell, a fifth of the slide is tissue."""

CLASSES = {"gland": 1, "tumour": 2}
STAIN = Stain(1.0, 1.0, 0.0, (243, 243, 241), (1.0, 1.0, 1.0))


def write_mosaic(path: Path, side: int, cores: int = 6) -> None:
    """Writes `path`, `side` pixels square, and the exact class indices as `<stem>_mask.tif`.

    Args:
        path: The slide, overwritten like its mask.
        side: Width and height in level-0 pixels.
        cores: Different cores. Their tiles are encoded once, so size alone costs little.
    """
    rng = np.random.default_rng(side)
    images, masks = zip(*(_core(rng) for _ in range(cores)), strict=True)
    glass = np.broadcast_to(np.array(STAIN.glass, np.uint8), (CELL, CELL, 3))
    images, masks = (glass, *images), (np.zeros((CELL, CELL), np.uint8), *masks)
    cells = (-(-side // CELL),) * 2
    layout = np.where(rng.random(cells) < SHARE, rng.integers(1, cores + 1, cells), 0)

    levels = []
    for factor in (1, 4, 16, 64):
        small = [shrink(image, factor) for image in images]
        if CELL // factor >= TILE:
            tiles = _pasted([list(cut(image)) for image in small], layout, side // factor)
        else:
            tiles = _assembled(small, layout, side // factor)
        levels.append(Level(side // factor, side // factor, tiles))
    thumbnail = _assembly([shrink(image, 64) for image in images], layout)
    write_svs(path, levels, thumbnail, path.stem, MPP, big=True)

    encoded = [list(_deflated(mask)) for mask in masks]
    with TiffWriter(path.with_name(f"{path.stem}_mask.tif"), bigtiff=True) as tiff:
        tiff.write(
            _pasted(encoded, layout, side),
            shape=(side, side),
            dtype=np.uint8,
            tile=(TILE, TILE),
            photometric="minisblack",
            compression="adobe_deflate",
            metadata=None,
            software=False,
        )


def _core(rng: np.random.Generator) -> tuple[Pixels, Pixels]:
    """A painted section that fits a cell, and its class indices."""
    scene = dataclasses.replace(make_scene(CELL, CELL, rng), pen=LineString())
    mask = np.zeros((CELL, CELL), np.uint8)
    for region in scene.regions:
        index = CLASSES[region.class_name]
        np.maximum(mask, covered([region.geometry], CELL, CELL, index), out=mask)
    return paint(scene, STAIN, rng), mask


def _deflated(mask: Pixels) -> Iterator[bytes]:
    for top in range(0, CELL, TILE):
        for left in range(0, CELL, TILE):
            yield zlib.compress(mask[top : top + TILE, left : left + TILE].tobytes())


def _pasted(encoded: list[list[bytes]], layout: NDArray[np.int64], side: int) -> Iterator[bytes]:
    """Tiles of a level on which a cell is several tiles: picked among those `encoded` by cell."""
    each = round(len(encoded[0]) ** 0.5)
    tiles = -(-side // TILE)
    for row in range(tiles):
        for column in range(tiles):
            cell = layout[row // each, column // each]
            yield encoded[cell][row % each * each + column % each]


def _assembled(small: list[Pixels], layout: NDArray[np.int64], side: int) -> Iterator[bytes]:
    """Tiles of a level on which several cells make one tile."""
    each = TILE // small[0].shape[0]
    tiles = -(-side // TILE)
    padded = np.pad(layout, (0, tiles * each - len(layout)))
    for row in range(0, tiles * each, each):
        for column in range(0, tiles * each, each):
            yield encode(_assembly(small, padded[row : row + each, column : column + each]))


def _assembly(small: list[Pixels], layout: NDArray[np.int64]) -> Pixels:
    return np.vstack([np.hstack([small[cell] for cell in line]) for line in layout])
