"""Labels from outlined regions: which class the centre of each pixel belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    Annotation,
    ClassTable,
    Colour,
    is_background,
    is_ignored,
)
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.geometry import Box, Frame, Size


def pixel_centres(box: Box, frame: Frame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Level-0 x of the columns, shape (width,), and y of the rows, shape (height,), of `box`."""
    x = (np.arange(box.x, box.right, dtype=np.float64) + 0.5) * frame.scale_x
    y = (np.arange(box.y, box.bottom, dtype=np.float64) + 0.5) * frame.scale_y
    return x, y


def ignore_outside(mask: NDArray[np.uint8], box: Box, frame: Frame, slide_size: Size) -> None:
    """Sets the pixels of `mask` whose centres lie outside the slide to 255."""
    x, y = pixel_centres(box, frame)
    mask[:, (x < 0) | (x >= slide_size.width)] = IGNORE
    mask[(y < 0) | (y >= slide_size.height), :] = IGNORE


_UNCLASSIFIED = "annotation"


class PolygonLabels:
    """Regions of one slide; where they overlap the smaller one shows, so nested ones do.

    Regions without a class are passed over, being outlines of where somebody looked; but where
    nothing has a class, all are of the one class "annotation". Classes whose names end in * are
    ignored (255). Where there are regions of interest, all outside of them is ignored.

    Args:
        path: The file they come from.
        annotations: In level-0 pixels of the slide's frame, their classes renamed already.
        slide_size: Level-0 pixels of the slide.
        options: How they are understood.
    """

    def __init__(
        self,
        path: Path,
        annotations: Sequence[Annotation],
        slide_size: Size,
        options: AnnotationOptions | None = None,
    ) -> None:
        options = options or AnnotationOptions()
        named = [region for region in annotations if region.class_name is not None]
        regions = sorted(named or annotations, key=lambda region: -region.geometry.area)
        self._path = path
        self._slide_size = slide_size
        self._tree = shapely.STRtree([region.geometry for region in regions])
        unclassified = options.renamed(_UNCLASSIFIED) or _UNCLASSIFIED
        self._names = [region.class_name or unclassified for region in regions]
        self._of_interest = np.array([options.is_roi(name) for name in self._names], np.bool_)
        self._unlabelled = IGNORE if options.unlabelled == "ignore" else BACKGROUND
        self._learnt = set[str]()
        self._classes: dict[str, Colour | None] = {}
        for name, region in zip(self._names, regions, strict=True):
            if options.is_roi(name) or is_ignored(name):
                continue
            self._learnt.add(name)
            if not is_background(name):
                self._classes[name] = self._classes.get(name) or region.colour

    @property
    def path(self) -> Path:
        return self._path

    def classes(self) -> Mapping[str, Colour | None]:
        """Names in use with their colours, without ignored ones, regions and background."""
        return self._classes

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> NDArray[np.uint8]:
        """Class indices of `box` (pixels of `frame`) by pixel centres.

        A centre that lies on an outline belongs to the region on its right or below it.

        Returns:
            Array of shape (height, width): 0 background, 255 ignored or outside the slide or the
            regions of interest.

        Raises:
            PathosegError: A class is not in `classes`.
        """
        indices = classes.indices(self._learnt, self._path)
        mask = np.full((box.height, box.width), self._unlabelled, dtype=np.uint8)
        left, top, width, height = frame.to_level0(box)
        touched = np.sort(self._tree.query(shapely.box(left, top, left + width, top + height)))
        of_interest = self._of_interest[touched]
        x, y = pixel_centres(box, frame)
        drawn = touched[~of_interest]
        values = [indices.get(self._names[region], IGNORE) for region in drawn]
        _paint(mask, self._tree.geometries[drawn], np.array(values, dtype=np.uint8), x, y)
        if self._of_interest.any():
            inside = np.zeros_like(mask)
            looked_at = self._tree.geometries[touched[of_interest]]
            _paint(inside, looked_at, np.ones(len(looked_at), np.uint8), x, y)
            mask[inside == 0] = IGNORE
        ignore_outside(mask, box, frame, self._slide_size)
        return mask


def _paint(
    mask: NDArray[np.uint8],
    regions: NDArray[np.object_],
    values: NDArray[np.uint8],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
) -> None:
    """Paints regions one over the other, all of them in a handful of array operations.

    The even-odd scan conversion of Foley et al., "Computer Graphics" (2nd ed., 3.6): a row of
    pixels is inside between its first and second crossing with an outline, its third and fourth…
    A crossing depends on its edge and its row alone, so tiles agree with each other to the bit,
    and regions that share an edge share no pixel and leave none out.

    Args:
        mask: Painted in place, shape (height, width).
        regions: Polygons and multi-polygons, in painting order.
        values: What to paint each with.
        x: Centres of the columns, shape (width,).
        y: Centres of the rows, shape (height,).
    """
    height, width = mask.shape
    parts, region_of_part = shapely.get_parts(regions, return_index=True)
    rings, part_of_ring = shapely.get_rings(parts, return_index=True)
    corners, ring_of_corner = shapely.get_coordinates(rings, return_index=True)
    level = corners[:, 1]
    edge = np.flatnonzero(
        (ring_of_corner[1:] == ring_of_corner[:-1])
        & (np.maximum(level[1:], level[:-1]) > y[0])
        & (np.minimum(level[1:], level[:-1]) <= y[-1])
    )
    region_of_edge = region_of_part[part_of_ring[ring_of_corner[edge]]]
    # Both regions beside an edge must see it run the same way: upwards.
    upwards = (corners[edge, 1] <= corners[edge + 1, 1])[:, None]
    low = np.where(upwards, corners[edge], corners[edge + 1])
    high = np.where(upwards, corners[edge + 1], corners[edge])
    first_row, end_row = np.searchsorted(y, low[:, 1]), np.searchsorted(y, high[:, 1])

    crossings = end_row - first_row
    of_edge = np.repeat(np.arange(len(edge)), crossings)
    row = first_row[of_edge] + _counted(crossings)
    (x0, y0), (x1, y1) = low[of_edge].T, high[of_edge].T
    column = np.searchsorted(x, x0 + (y[row] - y0) / (y1 - y0) * (x1 - x0))

    # One sort of one number puts crossings in order of region, row and column.
    key = np.sort((region_of_edge[of_edge] * height + row) * (width + 1) + column)
    start, length = key[0::2], key[1::2] - key[0::2]
    line, column = np.divmod(start, width + 1)
    region, row = np.divmod(line, height)
    pixel = np.repeat(row * width + column, length) + _counted(length)
    # Where a pixel occurs twice, numpy keeps the last value: the upper region's.
    mask.reshape(-1)[pixel] = np.repeat(values[region], length)


def _counted(lengths: NDArray[np.intp]) -> NDArray[np.intp]:
    """0, 1, … up to each length in turn: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    counted: NDArray[np.intp] = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return counted
