"""Stored levels with their exact downsamples, and averages over whole pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pathoseg.geometry import Level, Size


def averages(pixels: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """Average cells of `width` × `height` pixels.

    Args:
        pixels: Shape (h, w) or (h, w, 3); h and w are multiples of the cell's sides.
        width: Of a cell.
        height: Of a cell.

    Returns:
        Shape (h / height, w / width) or (h / height, w / width, 3), of the same dtype; whole
        numbers are rounded to the nearest.
    """
    if (width, height) == (1, 1):
        return pixels
    if (width, height) == (2, 2):  # what Pillow gives, in a quarter of the time
        size = pixels.shape[1] // 2, pixels.shape[0] // 2
        return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return np.array(Image.fromarray(pixels).reduce((width, height)))


def exact_levels(sizes: Sequence[Size]) -> tuple[Level, ...]:
    """The levels of these sizes, level 0 first."""
    return tuple(Level(size, _downsample(sizes[0], size)) for size in sizes)


def whole_downsample(level0: Size, level: Size) -> int | None:
    """The whole number of level-0 pixels per pixel of a level, None where there is none.

    A level of 749 pixels made from 2999 by halving twice has pixels 4 wide, though 2999 / 749 is
    4.004. Dividing by any factors with rounding, however often, stays within one pixel of the
    exact size, so a whole number that explains both sides to within a pixel is the truth. Of
    several, which only tiny levels allow, powers of two go first.
    """
    ratio = _mean_ratio(level0, level)
    for whole in (2 ** max(0, round(math.log2(ratio))), max(1, round(ratio))):
        width, height = level0.width / whole, level0.height / whole
        if max(abs(width - level.width), abs(height - level.height)) < 1:
            return whole
    return None


def _downsample(level0: Size, level: Size) -> float:
    return float(whole_downsample(level0, level) or max(1.0, _mean_ratio(level0, level)))


def _mean_ratio(level0: Size, level: Size) -> float:
    return (level0.width / level.width + level0.height / level.height) / 2
