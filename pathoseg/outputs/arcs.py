"""Simplifies outlines arc by arc, so that neighbours keep the same shared edge.

An arc is the stretch of a boundary between two joints, the lattice points where three or four
boundary edges meet. It separates the same two regions all along, and is a simple path of lattice
steps that meets other arcs at joints alone. Both regions hold the same arc, so what follows from
its vertices alone comes out equal on both sides, in whatever order regions are completed.

    A A A|B B B
    A A A|B B B         J is a joint, where the arcs A|B, A|C and B|C end.
    -----J B B B
    C C C|B B B         Douglas and Peucker's rule: a chord from P to Q stands for the part of an
    C C C|_____         arc between them if none of its vertices is farther than the tolerance;
    C C C C C C         else the part is split at the farthest one.

What keeps simplified arcs apart: with (a, b) = Q − P and v = cross(Q − P, vertex − P), a chord is
taken only if (1) max v − min v < |a| + |b|, P and Q included. A strip so thin has at most one
lattice point on each diagonal x ± y = s (the sign is that of −ab), and the arc, which steps from
diagonal to diagonal, visits all of them: it is a digital straight segment. So no point of another
arc lies on the chord, or between chord and arc. No edge of another arc crosses the chord: its ends
would lie on opposite sides, each |a| + |b| from the arc's point on its diagonal, and those two
points would be farther apart than a step. No other chord does: it would enter the area between
chord and arc and could not leave it. Only two arcs between the same joints could take one and the
same chord; on each diagonal their v differ by |a| + |b|, so (2) a chord that stands for a whole arc
must satisfy 2 max |v| < |a| + |b|, which at most one of the two does.

Chords within half a pixel always satisfy both, and none does beyond √2 pixels: there a larger
tolerance changes nothing, as a neighbour's outline could lie in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Vertices of an arc beyond which it is split in the middle: at the farthest one, a long arc like a
# comb would be split once for each tooth.
_HALVED = 128

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Rings:
    """The vertices of closed rings, one ring after another.

    Attributes:
        x: Column of each vertex, in pixels from the mask's left edge.
        y: Row of each vertex.
        joint: True for a vertex at which arcs end.
        starts: Index of each ring's first vertex, to which its last one leads back.
    """

    x: Indices
    y: Indices
    joint: Flags
    starts: Indices

    @property
    def lengths(self) -> Indices:
        return np.diff(self.starts, append=len(self.x))

    def where(self, kept: Flags) -> Rings:
        """Return the rings with the vertices that `kept` marks alone, at least one of each ring."""
        starts: Indices = (np.cumsum(kept) - kept)[self.starts]
        return Rings(self.x[kept], self.y[kept], self.joint[kept], starts)


def simplified(rings: Rings, tolerance: float) -> Rings:
    """Return the rings without the vertices that chords leave out, but three of each at least.

    Rings that do not cross or touch but for shared edges and joints stay so, and share as before.

    Args:
        rings: Of horizontal and vertical edges, each vertex a turn or a joint.
        tolerance: In pixels.
    """
    vertex, ends = _arcs(rings)
    kept = np.zeros(len(rings.x), bool)
    kept[vertex[ends]] = True
    kept[vertex[_splits(rings.x[vertex], rings.y[vertex], ends, tolerance)]] = True
    return rings.where(kept)


def _arcs(rings: Rings) -> tuple[Indices, Indices]:
    """The rings' vertices arc by arc, each arc in the direction that both of its sides give it.

    It begins at the smaller end in order of (y, x), or if it is closed, goes on to the smaller
    neighbour of its one end. A ring without joint is a closed arc from its smallest vertex.

    Returns:
        Indices of vertices, and for each arc the positions of its ends in them, of shape (arcs, 2).
    """
    place = rings.y * (rings.x.max() + 1) + rings.x
    has_joint = np.logical_or.reduceat(rings.joint, rings.starts)
    smallest = np.where(has_joint, -1, np.minimum.reduceat(place, rings.starts))
    start = np.flatnonzero(rings.joint | (place == np.repeat(smallest, rings.lengths)))

    # An arc leads to the next start in its ring, the last one to the ring's first.
    ring = np.searchsorted(rings.starts, start, side="right") - 1
    around, behind = rings.lengths[ring], (rings.starts + rings.lengths)[ring]
    last = np.append(ring[1:] != ring[:-1], True)
    stop = np.append(start[1:], 0)
    stop[last] = start[np.append(0, np.flatnonzero(last)[:-1] + 1)] + around[last]
    length = stop - start

    # Positions behind a ring's last vertex are those of its first ones.
    low, high = start + (length == around), stop - (length == around)
    low, high = low - around * (low >= behind), high - around * (high >= behind)
    backwards = place[low] > place[high]
    end = np.cumsum(length + 1) - 1
    vertex = np.arange(end[-1] + 1)
    vertex -= np.repeat(end - length, length + 1)
    vertex *= np.repeat(np.where(backwards, -1, 1), length + 1)
    vertex += np.repeat(np.where(backwards, stop, start), length + 1)
    vertex -= np.repeat(around, length + 1) * (vertex >= np.repeat(behind, length + 1))
    return vertex, np.stack([end - length, end], axis=1)


def _splits(x: Indices, y: Indices, ends: Indices, tolerance: float) -> Indices:
    """The positions of the vertices at which arcs are split into chords."""
    splits = [np.zeros(0, np.int64)]
    begin, end = ends.T
    whole = np.ones(len(ends), bool)
    # One level of Douglas and Peucker's recursion at a time, for all arcs together.
    while True:
        bent = end - begin > 1
        begin, end, whole = begin[bent], end[bent], whole[bent]
        if not len(begin):
            return np.concatenate(splits)
        between = end - begin - 1
        first = np.cumsum(between) - between
        chord = np.repeat(np.arange(len(begin)), between)
        position = np.arange(len(chord)) + (begin + 1 - first)[chord]
        a, b = x[end] - x[begin], y[end] - y[begin]
        right, down = x[position] - x[begin][chord], y[position] - y[begin][chord]
        v = a[chord] * down - b[chord] * right
        most = np.maximum(np.maximum.reduceat(v, first), 0)
        least = np.minimum(np.minimum.reduceat(v, first), 0)
        farthest = np.maximum(most, -least)
        spread = np.where(whole, 2 * farthest, most - least)
        refused = (spread >= np.abs(a) + np.abs(b)) | (farthest > tolerance * np.hypot(a, b))

        # A closed arc has no chord: it is split far from its end, and its halves share both ends.
        closed = (a == 0) & (b == 0)
        far = np.where(closed[chord], np.abs(right) + np.abs(down), np.abs(v))
        farthest[closed] = np.maximum.reduceat(far, first)[closed]
        found = np.flatnonzero((far == farthest[chord]) & refused[chord])
        found = found[np.diff(chord[found], prepend=-1) > 0]  # the first of each chord
        begin, end = begin[refused], end[refused]
        split = np.where(end - begin > _HALVED, (begin + end) // 2, position[found])
        splits.append(split)
        begin, end = np.append(begin, split), np.append(split, end)
        whole = np.tile(closed[refused], 2)
