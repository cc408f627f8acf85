"""The edges of outlines, cut into the steps that they make along rows of pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.coverage import UNIT, Ints, Steps, counted, to_units
from pathoseg.geometry import Box, Frame

Geometries = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of some lines that are not level, turned to point down, in 1/256 pixel of a frame.

    Attributes:
        x0, y0: Where each begins, shape (edges,).
        x1, y1: Where each ends.
        line: The number of its line.
        side: 1 where its area is on its right and is added, or on its left and is taken away;
            else -1.
        region: Of each line, the number of its region.
    """

    x0: Ints
    y0: Ints
    x1: Ints
    y1: Ints
    line: Ints
    side: Ints
    region: Ints

    @classmethod
    def of(cls, lines: Geometries, sign: Ints, region: Ints, frame: Frame) -> Edges:
        """Find all edges of lines.

        Args:
            lines: Pieces of outlines, with their area on the right, where y points up; shape
                (lines,).
            sign: Of each, 1 where its area is added, -1 where it is taken away.
            region: Of each, the number of its region.
            frame: Whose pixels are counted.
        """
        corners, line = shapely.get_coordinates(lines, return_index=True)
        x = to_units(corners[:, 0] / frame.scale_x)
        y = to_units(corners[:, 1] / frame.scale_y)
        first = np.flatnonzero((line[1:] == line[:-1]) & (y[1:] != y[:-1]))
        # An edge that points down on the slide has its area on the right. The same edge of a
        # neighbour is turned, so that both compute the same.
        up = y[first + 1] < y[first]
        above, below = first + up, first + ~up
        of = line[first]
        side = np.where(up, -1, 1) * sign[of]
        return cls(x[above], y[above], x[below], y[below], of, side, region)

    def most_steps(self, box: Box) -> int:
        """Return a bound of the steps in a box: one in each row and column that an edge enters."""
        top, bottom = box.y * UNIT, box.bottom * UNIT
        left, right = (box.x - 1) * UNIT, (box.right + 1) * UNIT
        down = self.y1.clip(top, bottom) - self.y0.clip(top, bottom)
        across = abs(self.x1.clip(left, right) - self.x0.clip(left, right))
        return int(((down + across) // UNIT + 4)[down > 0].sum())

    def steps(self, box: Box, value: Ints) -> Steps:
        """Return what the edges change along the rows of a box.

        Edges are cut where they enter another row, and then another column, of pixels. Where that
        is follows from the edge alone, so boxes agree to the bit, and so do the areas on both
        sides of an edge.

        Args:
            box: In pixels of the frame.
            value: The class index of each line.
        """
        near = self.y1 > box.y * UNIT
        near &= self.y0 < box.bottom * UNIT
        near &= np.minimum(self.x0, self.x1) < (box.right + 1) * UNIT
        kept = np.flatnonzero(near)
        left, top = box.x * UNIT, box.y * UNIT
        x0, y0 = self.x0[kept] - left, self.y0[kept] - top
        x1, y1 = self.x1[kept] - left, self.y1[kept] - top
        line, side = self.line[kept], self.side[kept]

        # Into rows, and one more below the box: a piece ends where the next one begins.
        row, edge, last = _split(y0, y1, 0, box.height)
        enter = np.maximum(y0[edge], row * UNIT)
        a = x0[edge] + _share((x1 - x0)[edge], enter - y0[edge], (y1 - y0)[edge])
        b, leave = (np.append(of_next[1:], 0) for of_next in (a, enter))
        b[last], leave[last] = x1[edge[last]], y1[edge[last]]
        inside = row < box.height
        row, edge, a, b = row[inside], edge[inside], a[inside], b[inside]
        tall = (leave - enter)[inside]

        # Into columns, and one on each side of the box for what lies there.
        left, right = np.minimum(a, b), np.maximum(a, b)
        column, piece, last = _split(left, right, -1, box.width)
        begin = np.where(column < 0, left[piece], np.maximum(left[piece], column * UNIT))
        done = _share(tall[piece], begin - left[piece], (right - left)[piece])
        end, all_done = (np.append(of_next[1:], 0) for of_next in (begin, done))
        end[last], all_done[last] = right[piece[last]], tall[piece[last]]
        # Twice the mean distance of a piece from its column's left edge.
        indent = np.where(column < 0, 2 * UNIT, begin + end - 2 * UNIT * column)
        edge = edge[piece]
        gain = (all_done - done) * side[edge]
        beyond = gain * indent
        return Steps(
            line[edge],
            row[piece],
            column,
            gain * (2 * UNIT) - beyond,
            beyond,
            value,
            self.region,
        )


def _split(low: Ints, high: Ints, first: int, last: int) -> tuple[Ints, Ints, Ints]:
    """Cut lengths from `low` to `high`, in 1/256 pixel, where a pixel begins.

    Args:
        low: Where each begins.
        high: Where it ends, not below `low`.
        first: A pixel; those before it are taken for it.
        last: A pixel; those after it are taken for it.

    Returns:
        Of each piece its pixel and the number of its length; the number of each length's last
        piece.
    """
    begin = (low // UNIT).clip(first, last)
    count = ((high - (high > low)) // UNIT).clip(first, last) - begin + 1
    of = np.repeat(np.arange(len(count)), count)
    return begin[of] + counted(count), of, np.cumsum(count) - 1


def _share(whole: Ints, part: Ints, of: Ints) -> Ints:
    """`whole` × `part` / `of`, to the nearest whole number; 0 where `of` is 0."""
    exact = whole * (part / np.maximum(of, 1))
    nearest: Ints = np.floor(exact + 0.5).astype(np.int64)
    return nearest
