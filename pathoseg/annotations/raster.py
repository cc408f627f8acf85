"""Labels from outlined regions: which class the centre of each pixel belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray
from rasterio.features import rasterize
from rasterio.transform import Affine
from shapely import MultiPolygon, Polygon

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    Annotation,
    ClassTable,
    Colour,
)
from pathoseg.annotations.centres import ignore_outside
from pathoseg.annotations.outline import areal
from pathoseg.geometry import Box, Frame, Size

_UNCLASSIFIED = "annotation"
_IGNORED_SUFFIX = "*"


class PolygonLabels:
    """Regions of one slide; where they overlap the smaller one shows, so nested ones do.

    Regions without a class are passed over, being outlines of where somebody looked; but where
    nothing has a class, all are of the one class "annotation". Classes whose names end in * are
    ignored (255).

    Args:
        path: The file they come from.
        annotations: In level-0 pixels of the slide's frame.
        slide_size: Level-0 pixels of the slide.
    """

    def __init__(self, path: Path, annotations: Sequence[Annotation], slide_size: Size) -> None:
        named = [region for region in annotations if region.class_name is not None]
        self._regions = sorted(named or annotations, key=lambda region: -region.geometry.area)
        self._names = [region.class_name or _UNCLASSIFIED for region in self._regions]
        self._path = path
        self._slide_size = slide_size
        self._tree = shapely.STRtree([region.geometry for region in self._regions])
        self._classes: dict[str, Colour | None] = {}
        for name, region in zip(self._names, self._regions, strict=True):
            if not name.endswith(_IGNORED_SUFFIX):
                self._classes[name] = self._classes.get(name) or region.colour

    @property
    def path(self) -> Path:
        return self._path

    def classes(self) -> Mapping[str, Colour | None]:
        """Names in use with their colours, without ignored ones."""
        return self._classes

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Class indices of `box` (pixels of `frame`) by pixel centres.

        A centre that lies on an outline belongs to the region on its right or below it.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide.

        Raises:
            PathosegError: A class is not in `classes`.
        """
        indices = classes.indices(self._classes, self._path)
        left, top, width, height = frame.to_level0(box)
        # One pixel more on each side, so that where outlines are cut off touches no centre.
        window = shapely.box(
            left - frame.scale_x,
            top - frame.scale_y,
            left + width + frame.scale_x,
            top + height + frame.scale_y,
        )
        shapes = [
            (part, indices.get(self._names[region], IGNORE))
            for region in np.sort(self._tree.query(window))
            if (part := _within(self._regions[region].geometry, window))
        ]
        mask = np.full((box.height, box.width), BACKGROUND, dtype=np.uint8)
        if shapes:
            to_level0 = Affine(frame.scale_x, 0, left, 0, frame.scale_y, top)
            rasterize(shapes, out=mask, transform=to_level0)
        ignore_outside(mask, box, frame, self._slide_size)
        return mask


def _within(geometry: Polygon | MultiPolygon, window: Polygon) -> Polygon | MultiPolygon | None:
    """What of a region lies in the window: a tile costs what it touches of a large outline."""
    left, top, right, bottom = geometry.bounds
    low_x, low_y, high_x, high_y = window.bounds
    if low_x <= left and low_y <= top and right <= high_x and bottom <= high_y:
        return geometry
    return areal(geometry.intersection(window))
