"""Planes of a mask full of nuclei, and pixels to measure their stains on; needs numpy alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

HEIGHT_LEVELS = 8  # a pixel of height, as `object_planes` of pathoseg has them
CELL = 40  # pixels a side, of four nuclei

_CELLS = 512
_BAND = 384
_TEXTURE = 1024
_PAIRED = 2 / 3  # of the cells: two of their four nuclei touch

Planes = NDArray[np.uint8]


@dataclass(frozen=True)
class Cells:
    """Different drawings of four nuclei each, of which a mask is put together.

    Attributes:
        planes: Class, height and probability as `ObjectFinder.add` takes them, shape
            (drawings, 3, CELL, CELL).
        touching: Number of nuclei of each drawing that share an edge with another.
    """

    planes: Planes
    touching: NDArray[np.int64]


def draw_cells(rng: np.random.Generator) -> Cells:
    """Draw nuclei of 10 to 16 px across, a third of which touch another."""
    drawn = [_drawn(rng, pair=number < _PAIRED * _CELLS) for number in range(_CELLS)]
    return Cells(
        np.stack([planes for planes, _ in drawn]), np.array([touching for _, touching in drawn])
    )


def _drawn(rng: np.random.Generator, pair: bool) -> tuple[Planes, int]:
    centres = np.array([*product((10.0, 30.0), repeat=2)]) + rng.uniform(-1, 1, (4, 2))
    shapes = [(rng.uniform(5, 8), rng.uniform(0.8, 1), rng.uniform(0, np.pi)) for _ in range(4)]
    heights = [_dome(centre, shape) for centre, shape in zip(centres, shapes, strict=True)]
    if pair:
        one = int(rng.integers(4))
        other = int(rng.choice([one ^ 1, one ^ 2]))  # beside it, or above or below it
        step = centres[one] - centres[other]
        step *= 0.25 / np.hypot(*step)
        while not _touch(heights[one] > 0, heights[other] > 0):
            centres[other] += step
            heights[other] = _dome(centres[other], shapes[other])
    highest = np.maximum.reduce(heights)
    owner = np.where(highest > 0, np.argmax(heights, axis=0) + 1, 0)
    ripples = np.maximum(HEIGHT_LEVELS * highest + rng.normal(0, 1, highest.shape), 1)
    height = np.where(owner > 0, ripples.round(), 0)
    kinds = np.append(0, rng.integers(1, 3, 4))
    probability = np.where(owner > 0, rng.integers(150, 256, owner.shape), 0)
    touching = sum(
        any(_touch(owner == one, owner == other) for other in range(1, 5) if other != one)
        for one in range(1, 5)
    )
    return np.stack([kinds[owner], height, probability]).astype(np.uint8), touching


def _dome(centre: NDArray[np.float64], shape: tuple[float, float, float]) -> NDArray[np.float64]:
    """Return about the distance to the edge of an ellipse, in pixels; not above 0 outside.

    Args:
        centre: Row and column.
        shape: The longer half axis, the shorter one over it, and the angle of the longer one.
    """
    (y, x), (long, share, angle) = centre, shape
    rows, columns = np.mgrid[:CELL, :CELL] + 0.5
    along = (columns - x) * np.cos(angle) + (rows - y) * np.sin(angle)
    across = (rows - y) * np.cos(angle) - (columns - x) * np.sin(angle)
    distance: NDArray[np.float64] = (
        long * share * (1 - np.hypot(along / long, across / long / share))
    )
    return distance


def _touch(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> bool:
    across, down = one[:, 1:] & other[:, :-1], one[1:] & other[:-1]
    back, up = one[:, :-1] & other[:, 1:], one[:-1] & other[1:]
    return bool(across.any() or down.any() or back.any() or up.any())


def layout(count: int, width: int, cells: Cells, rng: np.random.Generator) -> NDArray[np.int64]:
    """Choose the drawing of each cell of a mask of about `count` nuclei, shape (rows, columns)."""
    columns = width // CELL
    return rng.integers(0, len(cells.planes), (round(count / 4 / columns), columns))


def bands(cells: Cells, chosen: NDArray[np.int64]) -> Iterator[Planes]:
    """Yield a mask's planes from top to bottom, cut through the nuclei where they happen to lie.

    Args:
        cells: The drawings.
        chosen: Of each cell, see `layout`.

    Yields:
        Shape (3, up to 384, columns of cells × CELL).
    """
    height, width = len(chosen) * CELL, chosen.shape[1] * CELL
    for top in range(0, height, _BAND):
        bottom = min(top + _BAND, height)
        rows = cells.planes[chosen[top // CELL : -(-bottom // CELL)]]  # (rows, columns, 3, y, x)
        whole = rows.transpose(2, 0, 3, 1, 4).reshape(3, -1, width)
        skip = top % CELL
        yield np.ascontiguousarray(whole[:, skip : skip + bottom - top])


class Texture:
    """A stained slide of any size: coloured noise that repeats.

    Args:
        rng: Draws it.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._pixels = rng.integers(60, 240, (_TEXTURE, _TEXTURE, 3)).astype(np.uint8)

    def read(self, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """Return the pixels of a box of the mask, shape (height, width, 3)."""
        rows, columns = np.arange(y, y + height), np.arange(x, x + width)
        return self._pixels[rows[:, None] % _TEXTURE, columns % _TEXTURE]
