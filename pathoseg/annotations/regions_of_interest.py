"""The regions of interest of a slide, one by one: their names, and the pixels in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.coverage import pixel_centres
from pathoseg.annotations.outline import areal
from pathoseg.annotations.scan_conversion import paint_centres
from pathoseg.geometry import Box, Frame, Size


@dataclass(frozen=True, slots=True, eq=False)
class RegionOfInterest:
    """A region of interest, as far as it lies on its slide.

    Attributes:
        name: Its name, or its number; no other region of the slide has it.
        geometry: In level-0 pixels.
    """

    name: str
    geometry: Polygon | MultiPolygon

    def pixels(self, box: Box, frame: Frame) -> tuple[Box, NDArray[np.bool_]] | None:
        """Find the pixels of `box`, in pixels of `frame`, whose centres lie in the region.

        Returns:
            The part of the box that the region's bounds meet, and which of its pixels are inside,
            shape (height, width); None where no part does.
        """
        left, top, right, bottom = self.geometry.bounds
        x, y = math.floor(left / frame.scale_x), math.floor(top / frame.scale_y)
        width = math.ceil(right / frame.scale_x) - x
        height = math.ceil(bottom / frame.scale_y) - y
        part = Box(x, y, width, height).intersection(box)
        if part is None:
            return None
        inside = np.zeros((part.height, part.width), np.uint8)
        outline = np.array([self.geometry], dtype=object)
        paint_centres(inside, outline, np.ones(1, np.uint8), *pixel_centres(part, frame))
        return part, inside > 0


def regions_on_slide(outlines: Sequence[Annotation], slide: Size) -> list[RegionOfInterest]:
    """Name outlines of regions of interest, and cut them at the slide's edge.

    One without a name of its own, or with that of another, has its number, from 1 in the order of
    the outlines.

    Args:
        outlines: In level-0 pixels.
        slide: Pixels of its level 0.

    Returns:
        Those of which any part lies on the slide.
    """
    numbers = [str(number) for number in range(1, len(outlines) + 1)]
    times = Counter([*numbers, *(outline.name for outline in outlines)])
    whole, found = shapely.box(0, 0, slide.width, slide.height), []
    for number, outline in zip(numbers, outlines, strict=True):
        name = outline.name if outline.name and times[outline.name] == 1 else number
        geometry = areal(shapely.intersection(outline.geometry, whole))
        if geometry is not None:
            found.append(RegionOfInterest(name, geometry))
    return found
