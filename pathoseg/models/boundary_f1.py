"""Boundary F1 of a mask that arrives band by band, in memory that its height does not change.

The measure of Csurka et al., "What is a good evaluation measure for semantic segmentation?" (BMVC
2013, section 3): of a class's predicted boundary, the share that lies within a tolerance of its
true boundary (precision), the same the other way round (recall), and their harmonic mean.

    rows kept     │ reach + 1   rows counted already, whose boundary others may be near to
                  │ ready       rows that are counted now
                  │ reach + 1   rows that are still without what lies below them
"""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.models.losses import IGNORE

Mask = NDArray[np.uint8]
Flags = NDArray[np.bool_]

_LEAST_ROWS = 64  # counted at once, so that a band of few rows does not cost its surroundings anew

_WIDEST_DISC = 16  # in pixels: a disc of 4 is drawn in a fortieth of the time of all distances


class BoundaryCounts:
    """Counts boundary pixels of each foreground class that have a counterpart within a tolerance.

    A boundary pixel of a class has one of another class among its four neighbours. The image's
    edge is no boundary. Pixels whose target is 255 are of no class and make none; what lies
    within the tolerance of them is not counted, as its counterpart may lie among them.

    Args:
        classes: Number of classes with background.
        tolerance: Largest distance between the centres of counterparts, in pixels.

    Attributes:
        counts: (classes - 1, 4) int64: predicted boundary pixels, those of them near the true
            boundary, true boundary pixels, those of them near the predicted boundary. Complete
            after `close`.
    """

    def __init__(self, classes: int, tolerance: float) -> None:
        self.counts = np.zeros((classes - 1, 4), np.int64)
        # Squares of distances between pixels are whole numbers, so half of one keeps roundings of
        # the tolerance and of the distances apart from what they decide.
        squared = math.floor(tolerance**2 + 1e-6)
        self._limit, self._reach = math.sqrt(squared + 0.5), math.isqrt(squared)
        self._prediction = self._target = np.empty((0, 0), np.uint8)
        self._due = 0  # the first row kept that is not counted

    def add(self, prediction: Mask, target: Mask) -> None:
        """Take the next rows.

        Args:
            prediction: Class indices (rows, width); of no meaning where the target is 255.
            target: Of the same shape.
        """
        if self._target.size:
            prediction = np.concatenate([self._prediction, prediction])
            target = np.concatenate([self._target, target])
        self._prediction, self._target = prediction, target
        ready = len(target) - self._reach - 1
        if ready - self._due >= max(self._reach, _LEAST_ROWS):
            self._count(ready)

    def close(self) -> None:
        """Count the last rows."""
        self._count(len(self._target))

    def _count(self, end: int) -> None:
        """Count the rows up to `end` and let go of those that no later one needs."""
        rows = slice(self._due, end)
        valid = self._target != IGNORE
        certain = valid[rows]
        if not valid.all():
            certain = ~self._near(~valid)[rows]
        edges = [_edges(labels, valid) for labels in (self._prediction, self._target)]
        for index, counts in enumerate(self.counts, start=1):
            predicted, true = (
                edge & (labels == index)
                for edge, labels in zip(edges, (self._prediction, self._target), strict=True)
            )
            for column, (own, other) in enumerate(((predicted, true), (true, predicted))):
                counted = own[rows] & certain
                total = np.count_nonzero(counted)
                counts[2 * column] += total
                if total:
                    counts[2 * column + 1] += np.count_nonzero(self._near(other)[rows] & counted)
        first = max(0, end - self._reach - 1)
        # Copies, so that the rows before them are free.
        self._prediction, self._target = (
            self._prediction[first:].copy(),
            self._target[first:].copy(),
        )
        self._due = end - first

    def _near(self, flags: Flags) -> Flags:
        """Return the pixels within the tolerance of any set pixel."""
        if not flags.any():
            return np.zeros_like(flags)
        if self._reach <= _WIDEST_DISC:
            across = np.arange(-self._reach, self._reach + 1) ** 2
            disc = (across[:, None] + across <= self._limit**2).astype(np.uint8)
            return np.asarray(cv2.dilate(flags.view(np.uint8), disc), np.uint8).view(bool)
        away: NDArray[Any] = cv2.distanceTransform(
            (~flags).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE
        )
        return np.asarray(away <= self._limit)


def _edges(labels: Mask, valid: Flags) -> Flags:
    """Valid pixels with a valid neighbour of another class, above, below, left or right."""
    edges = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        differ = np.diff(labels, axis=axis) != 0
        one, other = (_along(valid, axis, part) for part in (slice(1, None), slice(None, -1)))
        differ &= one & other
        for part in (slice(1, None), slice(None, -1)):
            view = _along(edges, axis, part)
            view |= differ
    return edges


def _along(flags: Flags, axis: int, part: slice) -> Flags:
    return flags[part] if axis == 0 else flags[:, part]


def boundary_f1(counts: NDArray[Any]) -> NDArray[np.float64]:
    """The harmonic mean of precision and recall of boundaries.

    Args:
        counts: (..., 4), as in `BoundaryCounts`.

    Returns:
        Shape (...); nan where neither truth nor prediction has a boundary, 0 where one has none.
    """
    predicted, hit, true, found = np.moveaxis(counts.astype(np.float64), -1, 0)
    precision = np.divide(hit, predicted, out=np.zeros_like(hit), where=predicted > 0)
    recall = np.divide(found, true, out=np.zeros_like(hit), where=true > 0)
    both = precision + recall
    score = np.where(predicted + true > 0, 0.0, math.nan)
    np.divide(2 * precision * recall, both, out=score, where=both > 0)
    return score
