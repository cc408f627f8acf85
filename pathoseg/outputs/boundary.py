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

from pathoseg.annotations.coverage import counted
from pathoseg.outputs.arcs import Flags, Indices, Rings, simplified

# Above any column: row × WIDEST + column sorts by row, then column.
WIDEST = 2**31

ClassRows = NDArray[np.uint8]
"""Class indices of rows of a mask, 0 where nothing is traced."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Stretches of one class, in order of row and column; label 0 is left out.

    Attributes:
        row: The row of each run.
        start: Its first column.
        end: The column behind its last.
        value: Its class index.
    """

    row: Indices
    start: Indices
    end: Indices
    value: Indices

    @classmethod
    def of(cls, labels: ClassRows) -> Runs:
        """Find the runs of one class in labels, shape (rows, width); background is none."""
        changes = np.ones(labels.shape, bool)
        np.not_equal(labels[:, 1:], labels[:, :-1], out=changes[:, 1:])
        first = np.flatnonzero(changes)
        length = np.diff(first, append=labels.size)
        value = labels.ravel()[first]
        kept = value != 0
        row, start = np.divmod(first[kept], labels.shape[1])
        return cls(row, start, start + length[kept], value[kept].astype(np.int64))

    def __len__(self) -> int:
        return len(self.row)

    def touching(self) -> tuple[Indices, Indices]:
        """Return index pairs (lower, upper) of runs of one class that share an edge across rows."""
        start = self.row * WIDEST + self.start
        end = self.row * WIDEST + self.end
        # Of the row above: from the first run that ends behind my start to before the first that
        # starts behind my end.
        lowest = np.searchsorted(end, start - WIDEST, side="right")
        count = np.searchsorted(start, end - WIDEST, side="left") - lowest
        lower = np.repeat(np.arange(len(self)), count)
        upper = np.repeat(lowest, count) + counted(count)
        same = self.value[lower] == self.value[upper]
        return lower[same], upper[same]


# From (x_from, y) on the vertical line number `leaves` to (x_to, y) on line number `enters`, and
# whether there are joints (see arcs.py).
EDGE = np.dtype(
    [(name, np.int64) for name in ("leaves", "enters")]
    + [(name, np.int32) for name in ("x_from", "x_to", "y", "region")]
    + [(name, np.bool_) for name in ("joint_from", "joint_to")],
    align=True,
)
Edges = NDArray[np.void]

_CLASSES = 256
_END, _START = 0, 1


class Boundary:
    """Finds the edges of a band, and remembers the vertical lines that go on below it.

    Args:
        joints: Whether edges are cut at joints (see arcs.py).
    """

    def __init__(self, joints: bool) -> None:
        self._joints = joints
        self._open = np.zeros((2, 0), np.int64)  # of both sides of the last row's runs
        self._count = 0

    def edges(self, labels: ClassRows, runs: Runs, region: Indices, top: int) -> Edges:
        """Find the horizontal edges above each of a band's rows.

        Args:
            labels: The row above the band, then the band's rows, of shape (1 + rows, width).
            runs: Theirs, at least one.
            region: The number of each run's region.
            top: The y of the band's upper edge.
        """
        rows, width = len(labels) - 1, labels.shape[1]
        bordered = np.pad(labels, ((0, 0), (1, 1)))
        joint = _joints(bordered) if self._joints else np.zeros((rows, width + 1), bool)
        side = np.repeat([_END, _START], len(runs))
        x = np.concatenate([runs.end, runs.start])
        row, run = np.tile(runs.row, 2), np.tile(np.arange(len(runs)), 2)

        # A vertical line: the same side of the same class at the same x in consecutive rows, cut
        # at joints, where an edge of no length leads on.
        key = ((runs.value[run] * WIDEST + x) * 2 + side) * (rows + 2) + row
        order = np.argsort(key)
        cut = (row > 0) & joint[row - 1, x]
        begins = (np.diff(key[order], prepend=-2) != 1) | cut[order]
        first = order[begins]
        last = order[np.append(begins[1:], True)]
        from_above = row[first] == 0
        line = self._new_lines(len(first))
        line[from_above] = self._open[side[first[from_above]], run[first[from_above]]]
        line_of_side = np.empty_like(order)
        line_of_side[order] = line[np.cumsum(begins) - 1]
        self._open = line_of_side.reshape(2, -1)[:, runs.row == rows]

        # Corners: both ends of lines, and two at each joint along a horizontal edge, joined by a
        # line of no length. Along each y, edges lie between a class's corners two by two; where
        # two corners are one point, what ends there comes before what starts.
        above, below = ~from_above, row[last] < rows
        top_side, bottom_side = first[above], last[below]
        y_along, x_along, rightwards = _joints_along(bordered, joint)
        starts = runs.row * WIDEST + runs.start
        place = (y_along + rightwards) * WIDEST + x_along
        run_along = np.searchsorted(starts, place, side="right") - 1
        side_along = np.repeat([_END, _START], len(run_along))
        side = np.concatenate([side[top_side], side[bottom_side], side_along])
        line_along = np.tile(self._new_lines(len(run_along)), 2)
        line = np.concatenate([line[above], line[below], line_along])
        x = np.concatenate([x[top_side], x[bottom_side], np.tile(x_along, 2)])
        y = np.concatenate([row[top_side] - 1, row[bottom_side], np.tile(y_along, 2)])
        run = np.concatenate([run[top_side], run[bottom_side], np.tile(run_along, 2)])
        # Whether the boundary leaves its line there: it goes up where runs start, and rightwards
        # above them.
        upwards = np.repeat([True, False], [len(top_side), len(bottom_side)])
        leaves = (side == _START) == np.append(upwards, np.tile(rightwards, 2))
        pairs = np.argsort(((y * _CLASSES + runs.value[run]) * WIDEST + x) * 2 + side)
        pairs = pairs.reshape(-1, 2)
        begin = np.where(leaves[pairs[:, 0]], pairs[:, 0], pairs[:, 1])
        end = pairs.sum(axis=1) - begin

        edges = np.empty(len(pairs), EDGE)
        edges["leaves"], edges["enters"] = line[begin], line[end]
        edges["x_from"], edges["x_to"] = x[begin], x[end]
        edges["y"] = top + y[begin]
        edges["region"] = region[run[begin]]
        edges["joint_from"], edges["joint_to"] = joint[y[begin], x[begin]], joint[y[end], x[end]]
        return edges

    def _new_lines(self, count: int) -> Indices:
        self._count += count
        return np.arange(self._count - count, self._count)


def _joints(labels: ClassRows) -> Flags:
    """Find the pixel corners at which three or four boundary edges meet.

    Args:
        labels: Of shape (1 + rows, width), bordered by columns of 0.

    Returns:
        Shape (rows, width − 1): True if the upper right corner of that pixel, counted below the
        first row, is one.
    """
    vertical, horizontal = labels[:, 1:] != labels[:, :-1], labels[1:] != labels[:-1]
    up, down, left, right = vertical[:-1], vertical[1:], horizontal[:, :-1], horizontal[:, 1:]
    joints: Flags = (up & down & (left | right)) | (left & right & (up | down))
    return joints


def _joints_along(labels: ClassRows, joint: Flags) -> tuple[Indices, Indices, Flags]:
    """Joints where a horizontal edge of a region goes straight on.

    Args:
        labels: As in `_joints`.
        joint: Their `_joints`.

    Returns:
        Their rows and columns in `joint`, and whether the region lies below.
    """
    y, x = np.nonzero(joint)
    above, below = (
        (labels[row, x] == labels[row, x + 1]) & (labels[row, x] != 0) for row in (y, y + 1)
    )
    along = above | below
    return y[along], x[along], below[along]


def polygons(edges: Edges, tolerance: float) -> NDArray[np.object_]:
    """Join edges to the polygon of each region, in order of the regions' numbers.

    Rings are valid, shells counterclockwise in (x, y). Where edges were not cut at joints, they
    have no collinear points.

    Args:
        edges: All of each region's; at least one region.
        tolerance: In pixels, of the simplification of arcs; 0 if edges were not cut at joints.
    """
    rings, region = _rings(edges)
    if tolerance > 0:
        rings = simplified(rings, tolerance)
    outlines = shapely.linearrings(
        np.stack([rings.x, rings.y], axis=1).astype(np.float64),
        indices=np.repeat(np.arange(len(region)), rings.lengths),
    )
    owner = np.unique(region, return_inverse=True)[1]
    return np.asarray(shapely.polygons(np.asarray(outlines), indices=owner))


def _rings(edges: Edges) -> tuple[Rings, Indices]:
    """The rings of all regions, shells before their holes, and the region of each."""
    edges = _separated(edges)
    edges = edges[np.argsort(edges["leaves"])]
    following = np.searchsorted(edges["leaves"], edges["enters"])
    _, ring = connected_components(_graph(following), directed=False)
    _, first = np.unique(ring, return_index=True)
    # The integral of −y dx: positive around regions, negative around holes.
    area = -np.bincount(ring, edges["y"] * (edges["x_to"] - edges["x_from"]).astype(np.float64))
    order = np.lexsort((area < 0, edges["region"][first]))
    region = edges["region"][first[order]].astype(np.int64)
    edges = edges[_in_turn(following, first[order])]

    # Both ends of each edge, one of them where the line between it and the next has no length.
    x = np.stack([edges["x_from"], edges["x_to"]], axis=1).astype(np.int64).ravel()
    y = np.repeat(edges["y"].astype(np.int64), 2)
    joint = np.stack([edges["joint_from"], edges["joint_to"]], axis=1).ravel()
    corners = 2 * np.bincount(ring)[order]
    starts = np.cumsum(corners) - corners
    before = np.arange(-1, len(x) - 1)
    before[starts] += corners
    moved = (x != x[before]) | (y != y[before])
    return Rings(x, y, joint, starts).where(moved), region


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
