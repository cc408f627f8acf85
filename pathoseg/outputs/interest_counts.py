"""Counts pixels and objects of a mask by region of interest while its bands arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.annotations.regions_of_interest import RegionOfInterest
from pathoseg.geometry import Box, Frame
from pathoseg.outputs.report import InterestSummary, class_summaries, count_pixels, read_part

_STRIP = 128  # rows whose pixels are held at once


class InterestCounts:
    """Pixels and objects of each region of interest; regions may overlap.

    A pixel is in the regions that hold its centre, an object in those that hold its centroid. Held
    are the counts, and of a region the pixels of a few rows.

    Args:
        regions: The slide's.
        frame: The mask's.
        classes: Of the mask.
        with_objects: True if objects are separated, and `add_objects` is called.
    """

    def __init__(
        self,
        regions: Sequence[RegionOfInterest],
        frame: Frame,
        classes: ClassTable,
        with_objects: bool,
    ) -> None:
        self._regions, self._frame, self._classes = regions, frame, classes
        self._pixels = [Counter[int]() for _ in regions]
        self._objects = [Counter[int]() for _ in regions] if with_objects else None
        self._inside = [0] * len(regions)  # pixels, of the background too
        self._row = 0
        shapely.prepare([region.geometry for region in regions])

    def add_band(self, band: NDArray[np.uint8]) -> None:
        """Count the next rows of the mask: class indices, shape (rows, width)."""
        width = self._frame.size.width
        for top in range(0, len(band), _STRIP):
            strip = band[top : top + _STRIP]
            rows = Box(0, self._row + top, width, len(strip))
            for number, (region, pixels) in enumerate(
                zip(self._regions, self._pixels, strict=True)
            ):
                found = region.pixels(rows, self._frame)
                if found is not None:
                    part, inside = found
                    self._inside[number] += int(np.count_nonzero(inside))
                    pixels.update(count_pixels(strip[part.within(rows)][inside], self._classes))
        self._row += len(band)

    def add_objects(self, centroids: NDArray[np.float64], class_index: NDArray[np.int64]) -> None:
        """Count objects.

        Args:
            centroids: In level-0 pixels, shape (objects, 2).
            class_index: Shape (objects,).
        """
        assert self._objects is not None
        for region, objects in zip(self._regions, self._objects, strict=True):
            inside = shapely.intersects_xy(region.geometry, centroids)
            objects.update(class_index[inside].tolist())

    def without_pixels(self) -> list[str]:
        """Return the names of regions that hold no pixel's centre, once all bands are counted."""
        pairs = zip(self._regions, self._inside, strict=True)
        return [region.name for region, inside in pairs if not inside]

    def summaries(self) -> tuple[InterestSummary, ...]:
        """Return the figures of each region, in their order."""
        frame, found = self._frame, []
        for number, (region, pixels) in enumerate(zip(self._regions, self._pixels, strict=True)):
            area = region.geometry.area / (frame.scale_x * frame.scale_y) * frame.pixel_area_mm2
            objects = None if self._objects is None else self._objects[number]
            read = read_part(area, pixels[IGNORE], frame)
            classes = class_summaries(self._classes, pixels, None, frame, area, objects, read)
            found.append(InterestSummary(region.name, area, classes, pixels[IGNORE]))
        return tuple(found)
