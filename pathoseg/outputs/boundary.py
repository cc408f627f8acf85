"""The runs of equal class along a mask's rows, and the polygons of its regions' boundaries.

A boundary goes around its region clockwise on screen, around a hole the other way. Its horizontal
edges alone describe it: each begins on the vertical line on which another one ends. Where two
pixels of a class touch at a corner only, the boundary keeps to its own pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

from pathoseg.annotations.annotation import BACKGROUND, IGNORE

# Above any column: row × WIDEST + column sorts by row, then column.
WIDEST = 2**31

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Stretches of one class, in order of row and column; background and unread are left out.

    Attributes:
        row: Of each run.
        start: Its first column.
        end: The column behind its last.
        value: Its class index.
    """

    row: Indices
    start: Indices
    end: Indices
    value: Indices

    @classmethod
    def of(cls, band: NDArray[np.uint8], first_row: int) -> Runs:
        """The runs of a band of shape (rows, width) whose rows count from `first_row`."""
        changes = np.ones(band.shape, bool)
        np.not_equal(band[:, 1:], band[:, :-1], out=changes[:, 1:])
        first = np.flatnonzero(changes)
        length = np.diff(first, append=band.size)
        value = band.ravel()[first]
        kept = (value != BACKGROUND) & (value != IGNORE)
        row, start = np.divmod(first[kept], band.shape[1])
        return cls(row + first_row, start, start + length[kept], value[kept].astype(np.int64))

    def __len__(self) -> int:
        return len(self.row)

    def where(self, chosen: NDArray[np.bool_]) -> Runs:
        return Runs(self.row[chosen], self.start[chosen], self.end[chosen], self.value[chosen])

    def moved_to(self, row: int) -> Runs:
        return Runs(np.full(len(self), row), self.start, self.end, self.value)

    def followed_by(self, later: Runs) -> Runs:
        return Runs(
            np.concatenate([self.row, later.row]),
            np.concatenate([self.start, later.start]),
            np.concatenate([self.end, later.end]),
            np.concatenate([self.value, later.value]),
        )

    def touching(self) -> tuple[Indices, Indices]:
        """The pairs (lower, upper) of runs of one class that share a pixel edge across two rows."""
        start = self.row * WIDEST + self.start
        end = self.row * WIDEST + self.end
        # Of the row above: from the first run that ends behind my start to before the first that
        # starts behind my end.
        lowest = np.searchsorted(end, start - WIDEST, side="right")
        count = np.searchsorted(start, end - WIDEST, side="left") - lowest
        lower = np.repeat(np.arange(len(self)), count)
        position = np.arange(len(lower)) - np.repeat(np.cumsum(count) - count, count)
        upper = np.repeat(lowest, count) + position
        same = self.value[lower] == self.value[upper]
        return lower[same], upper[same]


# From (x_from, y) on the vertical line number `leaves` to (x_to, y) on line number `enters`.
EDGE = np.dtype(
    [(name, np.int64) for name in ("leaves", "enters", "x_from", "x_to", "y", "region")]
)
Edges = NDArray[np.void]

_CLASSES = 256
_END, _START = 0, 1


class Boundary:
    """Finds the edges of a band, and remembers the vertical lines that go on below it."""

    def __init__(self) -> None:
        self._open = np.zeros((2, 0), np.int64)  # of both sides of the last row's runs
        self._count = 0

    def edges(self, runs: Runs, rows: int, top: int, region: Indices) -> Edges:
        """The horizontal edges above each of a band's rows.

        Args:
            runs: Those of the row above the band, as row 0, then the band's as rows 1 to `rows`;
                at least one.
            rows: Of the band.
            top: The y of the band's upper edge.
            region: The number of each run's region.
        """
        side = np.repeat([_END, _START], len(runs))
        x = np.concatenate([runs.end, runs.start])
        row, value = np.tile(runs.row, 2), np.tile(runs.value, 2)

        # A vertical line: the same side of the same class at the same x in consecutive rows.
        key = ((value * WIDEST + x) * 2 + side) * (rows + 2) + row
        order = np.argsort(key)
        begins = np.diff(key[order], prepend=-2) != 1
        first = order[begins]
        last = order[np.append(begins[1:], True)]
        from_above = row[first] == 0
        line = self._count + np.arange(len(first))
        line[from_above] = self._open[np.divmod(first[from_above], len(runs))]
        self._count += len(first)
        line_of_side = np.empty_like(order)
        line_of_side[order] = line[np.cumsum(begins) - 1]
        self._open = line_of_side.reshape(2, -1)[:, runs.row == rows]

        # Its corners, above and below. Along each y, edges lie between a class's corners two by
        # two; where two corners are one point, what ends there comes before what starts.
        above, below = ~from_above, row[last] < rows
        corner = np.concatenate([first[above], last[below]])
        line = np.concatenate([line[above], line[below]])
        y = np.concatenate([row[first[above]] - 1, row[last[below]]])
        is_above = np.arange(len(corner)) < np.count_nonzero(above)
        key = ((y * _CLASSES + value[corner]) * WIDEST + x[corner]) * 2 + side[corner]
        pairs = np.argsort(key).reshape(-1, 2)
        leaves = is_above == (side[corner] == _START)
        begin = np.where(leaves[pairs[:, 0]], pairs[:, 0], pairs[:, 1])
        end = pairs.sum(axis=1) - begin

        edges = np.empty(len(pairs), EDGE)
        edges["leaves"], edges["enters"] = line[begin], line[end]
        edges["x_from"], edges["x_to"] = x[corner[begin]], x[corner[end]]
        edges["y"] = top + y[begin]
        edges["region"] = region[corner[begin] % len(runs)]
        return edges


def polygons(edges: Edges) -> NDArray[np.object_]:
    """The polygon of each region, in order of the regions' numbers.

    Rings are valid, without collinear points, shells counterclockwise in (x, y).

    Args:
        edges: All of each region's; at least one region.
    """
    edges = _separated(edges)
    edges = edges[np.argsort(edges["leaves"])]
    following = np.searchsorted(edges["leaves"], edges["enters"])
    _, ring = connected_components(_graph(following), directed=False)
    _, first = np.unique(ring, return_index=True)
    # The integral of −y dx: positive around regions, negative around holes.
    area = -np.bincount(ring, edges["y"] * (edges["x_to"] - edges["x_from"]))
    rings = np.lexsort((area < 0, edges["region"][first]))  # shells before their holes
    lengths = np.bincount(ring)[rings]
    outlines = shapely.linearrings(
        _corners(edges[_in_turn(following, first[rings])]),
        indices=np.repeat(np.arange(len(rings)), 2 * lengths),
    )
    owner = np.unique(edges["region"][first[rings]], return_inverse=True)[1]
    return np.asarray(shapely.polygons(np.asarray(outlines), indices=owner))


def _separated(edges: Edges) -> Edges:
    """Edges whose rings do not touch themselves.

    Where a region meets itself at a corner, keeping to the own pixel would lead one ring twice
    through that point. Crossing over instead makes two rings of it: the region is connected
    elsewhere, so what lies between its two pixels on one side is not connected to the other.
    """
    edges = edges.copy()
    for line, x in (("leaves", "x_from"), ("enters", "x_to")):
        order = np.lexsort((edges[x], edges["y"], edges["region"]))
        place = np.stack([edges[name][order] for name in ("region", "y", x)])
        met = (place[:, 1:] == place[:, :-1]).all(axis=0)
        one, other = order[:-1][met], order[1:][met]
        edges[line][one], edges[line][other] = edges[line][other], edges[line][one]
    return edges


def _in_turn(following: Indices, firsts: Indices) -> Indices:
    """The edges ring by ring, given the one that follows each and the first of each ring."""
    # One path through all rings: the last edge of each is led on to the first of the next.
    before = np.empty_like(following)
    before[following] = np.arange(len(following))
    path = following.copy()
    path[before[firsts]] = np.append(firsts[1:], firsts[-1])
    order: Indices = breadth_first_order(_graph(path), firsts[0], return_predecessors=False)
    return order


def _graph(following: Indices) -> csr_array:
    count = len(following)
    return csr_array((np.ones(count), following, np.arange(count + 1)), shape=(count, count))


def _corners(edges: Edges) -> NDArray[np.float64]:
    corners = np.empty((len(edges), 2, 2))
    corners[:, 0, 0], corners[:, 1, 0] = edges["x_from"], edges["x_to"]
    corners[:, :, 1] = edges["y"][:, None]
    return corners.reshape(-1, 2)
