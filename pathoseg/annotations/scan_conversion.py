"""Labels by the centres of pixels, as runs of format 1 had them (`labels = "centre"`)."""

from __future__ import annotations

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.coverage import counted


def paint_centres(
    mask: NDArray[np.uint8],
    regions: NDArray[np.object_],
    values: NDArray[np.uint8],
    x: NDArray[np.float64],
    y: NDArray[np.float64],
) -> None:
    """Paint regions one over the other, by the centres of pixels, in a handful of array operations.

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
    row = first_row[of_edge] + counted(crossings)
    (x0, y0), (x1, y1) = low[of_edge].T, high[of_edge].T
    column = np.searchsorted(x, x0 + (y[row] - y0) / (y1 - y0) * (x1 - x0))

    # One sort of one number puts crossings in order of region, row and column.
    key = np.sort((region_of_edge[of_edge] * height + row) * (width + 1) + column)
    start, length = key[0::2], key[1::2] - key[0::2]
    line, column = np.divmod(start, width + 1)
    region, row = np.divmod(line, height)
    pixel = np.repeat(row * width + column, length) + counted(length)
    # Where a pixel occurs twice, numpy keeps the last value: the upper region's.
    mask.reshape(-1)[pixel] = np.repeat(values[region], length)
