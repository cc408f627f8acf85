"""Slides through OpenSlide: the scanners' own formats (svs, ndpi, mrxs, scn, bif, DICOM…)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from openslide import OpenSlide, OpenSlideError

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Level, Mpp, Size
from pathoseg.slides.colour import on_white
from pathoseg.slides.levels import exact_levels
from pathoseg.slides.resolution import MICRONS_PER_UNIT, positive, slide_mpp, stated_mpp, tagged_mpp
from pathoseg.slides.slide_file import SlideFile, reason

_MOST_TILE_PIXELS = 64_000_000


def scanner_format(path: Path) -> str | None:
    """Return the vendor format that OpenSlide detects; None for none and for plain TIFF.

    Plain TIFF is left to the TIFF reader: OpenSlide sees neither the pyramid of an OME-TIFF nor
    its resolution, and takes the first of several channels for the picture.
    """
    try:
        found: str | None = OpenSlide.detect_format(path)
    except OpenSlideError:
        return None
    return None if found == "generic-tiff" else found


class OpenSlideSlide(SlideFile[OpenSlide]):
    """A slide in a scanner's format. Bounds, where there are any, are its extent."""

    def _open(self) -> OpenSlide:
        try:
            return OpenSlide(self.path)
        except OpenSlideError as error:
            said = reason(error).removeprefix(f"Reading {self.path}: ")
            raise PathosegError(
                f"{self.path} is in the format {scanner_format(self.path)}, but OpenSlide cannot "
                f"open it: {said}.",
                "Check that the copy is complete, with every file that belongs to it, or export "
                "the slide again, for example as OME-TIFF.",
            ) from error

    def _read_header(self, assume_mpp: float | None) -> None:
        handle = self._opened()
        properties = handle.properties
        full = exact_levels([Size(*size) for size in handle.level_dimensions])
        self._reported: tuple[float, ...] = handle.level_downsamples
        for index in range(len(full)):
            self._check_tile(properties, f"openslide.level[{index}]")
        bounds = _bounds(properties, full[0].size)
        self.vendor = properties["openslide.vendor"]
        self.origin = (bounds.x, bounds.y)
        self.levels = tuple(_cropped(level, bounds) for level in full)
        magnification = positive(properties.get("openslide.objective-power"))
        self.mpp = slide_mpp(self.path, _stated(properties), magnification, assume_mpp)

    def _check_tile(self, properties: Mapping[str, str], level: str) -> None:
        width = int(properties.get(f"{level}.tile-width", 0))
        height = int(properties.get(f"{level}.tile-height", 0))
        # OpenSlide ends the whole process where it cannot allocate a tile.
        if width * height > _MOST_TILE_PIXELS:
            raise PathosegError(
                f"{self.path} claims to be stored in tiles of {width} × {height} px.",
                "Check that the copy is complete.",
            )

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """See `Slide.read_level`.

        Below level 0 the pixels may lie up to half a level-0 pixel off: OpenSlide takes whole
        level-0 coordinates, multiplied by its own idea of the downsample.
        """
        true, reported = self.levels[level].downsample, self._reported[level]
        x, y = (
            round((start / true + offset) * reported)
            for start, offset in zip(self.origin, (box.x, box.y), strict=True)
        )
        handle = self._opened()
        try:
            image = handle.read_region((x, y), level, (box.width, box.height))
        except OpenSlideError as error:
            self.close()  # its errors latch: only a fresh handle reads on
            raise UnreadableError(
                f"{self.path} cannot be read around ({box.x}, {box.y}) of level {level}: "
                f"{reason(error)}.",
                "Copy the file again from where it came.",
            ) from error
        return on_white(image)


def _bounds(properties: Mapping[str, str], level0: Size) -> Box:
    whole = Box(0, 0, level0.width, level0.height)
    names = [f"openslide.bounds-{side}" for side in ("x", "y", "width", "height")]
    if not all(name in properties for name in names):
        return whole
    return Box(*(int(properties[name]) for name in names)).intersection(whole) or whole


def _cropped(level: Level, bounds: Box) -> Level:
    """The part of a level that shows `bounds`."""
    width = math.ceil(bounds.width / level.downsample)
    height = math.ceil(bounds.height / level.downsample)
    return Level(
        Size(
            min(width, level.size.width - int(bounds.x / level.downsample)),
            min(height, level.size.height - int(bounds.y / level.downsample)),
        ),
        level.downsample,
    )


def _stated(properties: Mapping[str, str]) -> Mpp | None:
    # hamamatsu.XResolution is left out: its unit differs between scanners.
    aperio = properties.get("aperio.MPP")
    unit = MICRONS_PER_UNIT.get(properties.get("tiff.ResolutionUnit", ""))
    tags = properties.get("tiff.XResolution"), properties.get("tiff.YResolution")
    return (
        stated_mpp(properties.get("openslide.mpp-x"), properties.get("openslide.mpp-y"))
        or stated_mpp(aperio, aperio)
        or (tagged_mpp(*tags, unit) if unit else None)
    )
