"""Sizes, boxes and resolutions: the one place where microns become pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def rounded_up(self, multiple: int) -> Size:
        """The smallest size not below this one whose sides are multiples of `multiple`."""
        return Size(-(-self.width // multiple) * multiple, -(-self.height // multiple) * multiple)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels: left, top, width, height. May reach outside its image."""

    x: int
    y: int
    width: int
    height: int

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def size(self) -> Size:
        return Size(self.width, self.height)

    def intersection(self, other: Box) -> Box | None:
        """The common rectangle, or None where the two do not overlap."""
        x, y = max(self.x, other.x), max(self.y, other.y)
        right, bottom = min(self.right, other.right), min(self.bottom, other.bottom)
        if right <= x or bottom <= y:
            return None
        return Box(x, y, right - x, bottom - y)

    def within(self, whole: Box) -> tuple[slice, slice]:
        """Return the slices of rows and columns of this box in an array that shows `whole`."""
        x, y = self.x - whole.x, self.y - whole.y
        return slice(y, y + self.height), slice(x, x + self.width)


@dataclass(frozen=True, slots=True)
class ObjectMask:
    """The pixels of one object, such as a nucleus.

    Attributes:
        box: The smallest rectangle around it.
        pixels: True for those of its pixels that are the object's, shape (height, width).
    """

    box: Box
    pixels: NDArray[np.bool_]

    @property
    def area(self) -> int:
        return int(np.count_nonzero(self.pixels))


@dataclass(frozen=True, slots=True)
class Mpp:
    """Resolution in microns per pixel, across and down.

    Raises:
        PathosegError: A side is not a positive, finite number.
    """

    x: float
    y: float

    def __post_init__(self) -> None:
        if not (0 < self.x < math.inf and 0 < self.y < math.inf):
            raise PathosegError(
                f"A resolution of {self.x} × {self.y} µm per pixel is impossible.",
                "Give a positive number, for example 0.25 for a 40× scan.",
            )

    @property
    def mean(self) -> float:
        """The geometric mean, so that `mean**2` is a pixel's area in µm²."""
        return math.sqrt(self.x * self.y)

    @property
    def pixel_mm2(self) -> float:
        """A pixel's area in mm²."""
        return self.x * self.y * 1e-6


IMAGE = "image"  # a network's first input: the tile itself


@dataclass(frozen=True, slots=True)
class ModelInput:
    """An input of a network: a square of pixels around the centre of a tile.

    Attributes:
        name: The argument of the network's `forward`.
        mpp: Microns per pixel.
        size: Side in pixels.

    Raises:
        PathosegError: The name is no argument's, or a number is not positive.
    """

    name: str
    mpp: float
    size: int

    def __post_init__(self) -> None:
        if not (self.name.isidentifier() and 0 < self.mpp < math.inf and self.size > 0):
            raise PathosegError(
                f"An input {self.name!r} of {self.size} px at {self.mpp} µm per pixel is "
                "impossible.",
                "Give the name of an argument, and positive numbers.",
            )

    def ratio(self, mpp: float) -> int:
        """Return how many pixels of `mpp`, which divides its own, one pixel is wide."""
        return round(self.mpp / mpp)

    def around(self, tile: Box, mpp: float) -> Box:
        """Return the box of this input around the centre of a tile.

        Args:
            tile: In pixels of `mpp`; its place is a multiple of `ratio`.
            mpp: Microns per pixel of the tile.

        Returns:
            In pixels of this input; each side has `size` of them.
        """
        ratio = self.ratio(mpp)
        x, y = (
            (2 * start + side - ratio * self.size) // (2 * ratio)
            for start, side in ((tile.x, tile.width), (tile.y, tile.height))
        )
        return Box(x, y, self.size, self.size)

    def beyond(self, window: Box, mpp: float, margin: int) -> Box:
        """Return the box of this input that covers `window` and `margin` pixels on each side of it.

        Args:
            window: In pixels of `mpp`; place and size are multiples of `ratio`.
            mpp: Microns per pixel of the window.
            margin: In pixels of this input.

        Returns:
            In pixels of this input.
        """
        x, y, width, height = (
            part // self.ratio(mpp) for part in (window.x, window.y, window.width, window.height)
        )
        return Box(x - margin, y - margin, width + 2 * margin, height + 2 * margin)


@dataclass(frozen=True, slots=True)
class Level:
    """One stored resolution of a slide: its size, and level-0 pixels per pixel (exact, ≥ 1)."""

    size: Size
    downsample: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A slide's extent in pixels of one resolution, and where those pixels lie on level 0.

    Attributes:
        size: Pixels at this resolution, rounded up so that all of the slide is inside.
        scale_x: Level-0 pixels per frame pixel, across.
        scale_y: The same, down.
        mpp: Microns per frame pixel.
    """

    size: Size
    scale_x: float
    scale_y: float
    mpp: Mpp

    @classmethod
    def at(cls, level0: Size, native: Mpp, mpp: float) -> Frame:
        """The frame of a slide of `level0` pixels at `native` resolution, seen at `mpp`."""
        scale_x, scale_y = mpp / native.x, mpp / native.y
        # 1e-9: 1000 × 0.25 / 0.5 must be 500 pixels, not 501, whatever the rounding.
        width = max(1, math.ceil(level0.width / scale_x - 1e-9))
        height = max(1, math.ceil(level0.height / scale_y - 1e-9))
        return cls(Size(width, height), scale_x, scale_y, Mpp(mpp, mpp))

    @property
    def level0_mpp(self) -> Mpp:
        """Microns per level-0 pixel."""
        return Mpp(self.mpp.x / self.scale_x, self.mpp.y / self.scale_y)

    @property
    def pixel_area_mm2(self) -> float:
        return self.mpp.pixel_mm2

    def to_level0(self, box: Box) -> tuple[float, float, float, float]:
        """Left, top, width and height of `box` in level-0 pixels (pixel edges, not centres)."""
        return (
            box.x * self.scale_x,
            box.y * self.scale_y,
            box.width * self.scale_x,
            box.height * self.scale_y,
        )


def area_text(mm2: float) -> str:
    """Format an area in mm², or a number per mm², in four digits or one decimal; nan as a dash."""
    if math.isnan(mm2):
        return "–"
    return f"{mm2:,.1f}" if mm2 >= 1000 else f"{Decimal(f'{mm2:.4g}'):f}"
