"""Measures of found objects (AJI, PQ, F1), counted while objects arrive from the top downwards.

An object is compared by its pixels, so truth and prediction are `ObjectMask`s of one frame. Only
the pixels of objects that may still meet another are held; of every other object its class, area
and centroid stay, and of every pair that overlaps the number of common pixels:

    rows settled  │ numbers alone: some 40 bytes an object, 24 a pair
    rows open     │ pixels, and a tree of boxes (STR-packed R-tree) that finds the pairs

The `counters` of slides may be added before figures are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components, min_weight_full_bipartite_matching
from scipy.spatial import KDTree
from shapely import STRtree, box

from pathoseg.geometry import ObjectMask
from pathoseg.models.metrics import Figures, ratio

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

COUNTERS = (
    *("intersection", "union", "pairs", "iou", "true", "predicted"),
    *("centroid_pairs", "centroid_predicted"),
)
"""The counters along the last axis of `ObjectCounts.counters`; defined there."""

OBJECT_NUMBERS = [COUNTERS.index("true"), COUNTERS.index("predicted")]

_QUERIED = 2**14  # objects whose neighbours are asked for at once, to bound the list of candidates
_PAIRED = 2**10  # contested true objects that are paired in one call, whose time grows as a square


@dataclass
class _Side:
    """The objects of truth, or of the prediction.

    Attributes:
        open: Number and mask of the objects whose pixels may still be asked for.
        rectangles: Theirs (`_rectangles`), shape (open objects, 4).
        rows: Blocks (objects, 5) of class, area, centroid x and y, and 1 for mostly unknown.
        count: The number of objects.
    """

    open: list[tuple[int, ObjectMask]] = field(default_factory=list)
    rectangles: Figures = field(default_factory=lambda: np.empty((0, 4)))
    rows: list[Figures] = field(default_factory=list)
    count: int = 0

    def table(self) -> Figures:
        return np.concatenate([np.empty((0, 5)), *self.rows])


class ObjectCounts:
    """Compares the objects of one slide with its true objects.

    Objects come in any order, as long as `settle` is told no more than is true. Objects of one side
    may overlap each other: pairs are one-to-one all the same.

    What the truth does not know (255) is treated as PQ treats it (Kirillov et al., section 4.2):
    unknown pixels are taken off a predicted object before it is compared, and one of which more
    than half is unknown counts where it has a true counterpart and is otherwise left out.

    Args:
        classes: Number of classes with background.
        radius: Largest distance of paired centroids, in pixels.
    """

    def __init__(self, classes: int, radius: float) -> None:
        self._classes, self._radius = classes, radius
        self._true, self._predicted = _Side(), _Side()
        self._pairs: list[Numbers] = []  # blocks (pairs, 3): true, predicted, common pixels

    def add_true(self, objects: Sequence[ObjectMask], classes: Sequence[int]) -> None:
        """Take true objects, each with its class (1 or more)."""
        rows = [(*_place(each), 0.0) for each in objects]
        self._add(self._true, self._predicted, objects, classes, rows)

    def add_predicted(
        self,
        objects: Sequence[ObjectMask],
        classes: Sequence[int],
        unknown: Sequence[Flags | None] | None = None,
    ) -> None:
        """Take predicted objects.

        Args:
            objects: Their pixels.
            classes: Their classes (1 or more).
            unknown: For each, which pixels of its box the truth does not know (of the shape of its
                `pixels`), or None where it knows all.
        """
        kept, of, rows = list[ObjectMask](), list[int](), list[tuple[float, ...]]()
        for at, each in enumerate(objects):
            hidden = None if unknown is None else unknown[at]
            seen, doubtful = each, 0.0
            if hidden is not None:
                seen = ObjectMask(each.box, each.pixels & ~hidden)
                if not seen.pixels.any():
                    continue
                doubtful = float(2 * seen.area < each.area)
            kept.append(seen)
            of.append(classes[at])
            rows.append((*_place(seen), doubtful))
        self._add(self._predicted, self._true, kept, of, rows)

    def settle(self, row: int) -> None:
        """Let go of pixels above `row`: objects added from here on have none there."""
        for side in (self._true, self._predicted):
            still = side.rectangles[:, 3] >= row
            if not still.all():
                side.open = [side.open[at] for at in np.flatnonzero(still).tolist()]
                side.rectangles = side.rectangles[still]

    def _add(
        self,
        own: _Side,
        other: _Side,
        objects: Sequence[ObjectMask],
        classes: Sequence[int],
        rows: Sequence[tuple[float, ...]],
    ) -> None:
        if not objects:
            return
        of = np.asarray(classes, np.float64)
        if not (len(of) == len(objects) and of.min() >= 1 and of.max() < self._classes):
            raise ValueError(f"{len(objects)} objects need a class each, 1…{self._classes - 1}")
        first = own.count
        own.rows.append(np.column_stack([of, np.array(rows)]))
        own.count += len(objects)
        own.open += [(first + at, each) for at, each in enumerate(objects)]
        new = _rectangles(objects)
        own.rectangles = np.concatenate([own.rectangles, new])
        # Of many that a tall object keeps open, those in other rows are in no tree.
        top, bottom = new[:, 1].min(), new[:, 3].max()
        level = (other.rectangles[:, 3] >= top) & (other.rectangles[:, 1] <= bottom)
        if not level.any():
            return
        candidates = np.flatnonzero(level)
        tree, boxes = STRtree(box(*other.rectangles[level].T)), np.asarray(box(*new.T))
        found = list[tuple[int, int, int]]()
        for start in range(0, len(objects), _QUERIED):
            near = tree.query(boxes[start : start + _QUERIED])
            near[1] = candidates[near[1]]
            for at, theirs in near.T.tolist():
                number, counterpart = other.open[theirs]
                shared = _common_pixels(objects[start + at], counterpart)
                if shared:
                    found.append((first + start + at, number, shared))
        if found:
            pairs = np.array(found, np.int64)
            self._pairs.append(pairs if own is self._true else pairs[:, [1, 0, 2]])

    def counters(self) -> Figures:
        """Count what has come so far; the results of slides may be added.

        Returns:
            Shape (classes, 8): first for all objects whatever their class, then for each foreground
            class by itself. Along the last axis, as in COUNTERS: common pixels and united pixels of
            AJI; pairs of an IoU above 0.5, and the sum of their IoU; true and predicted objects;
            pairs of centroids, and predicted objects as far as these are concerned (the two numbers
            of predicted objects differ by mostly unknown ones that have a counterpart).
        """
        true, predicted = self._true.table(), self._predicted.table()
        empty = np.empty((0, 3), np.int64)
        shared = np.concatenate([empty, *self._pairs])
        near = _near(true[:, 2:4], predicted[:, 2:4], self._radius)
        counts = np.zeros((self._classes, len(COUNTERS)))
        for index in range(self._classes):
            ours, theirs = (
                np.ones(len(side), bool) if index == 0 else side[:, 0] == index
                for side in (true, predicted)
            )
            certain = theirs & (predicted[:, 4] == 0)
            overlaps, neighbours = (
                pairs[ours[pairs[:, 0].astype(int)] & theirs[pairs[:, 1].astype(int)]]
                for pairs in (shared, near)
            )
            areas = true[:, 1], predicted[:, 1]
            common, united = _aggregated(overlaps, areas, (ours, certain), predicted[:, 2:4])
            ious = _ious(overlaps, areas)
            same = overlaps[ious > 0.5]
            chosen = _one_to_one(same[:, 0], same[:, 1], 1 - ious[ious > 0.5])
            own, other = neighbours[:, :2].astype(np.int64).T
            nearest = other[_one_to_one(own, other, neighbours[:, 2])]
            counts[index] = (
                *(common, united, np.count_nonzero(chosen), ious[ious > 0.5][chosen].sum()),
                *(np.count_nonzero(ours), _counted(certain, same[chosen, 1])),
                *(len(nearest), _counted(certain, nearest)),
            )
        return counts


def _place(of: ObjectMask) -> tuple[float, float, float]:
    """Area, and the x and y of the centroid, of an object in pixels of its frame."""
    moments = cv2.moments(np.ascontiguousarray(of.pixels).view(np.uint8), binaryImage=True)
    area = moments["m00"]
    return area, of.box.x + moments["m10"] / area, of.box.y + moments["m01"] / area


def _rectangles(objects: Sequence[ObjectMask]) -> Figures:
    """Left, top, right and bottom through the centres of the outermost pixels, (objects, 4)."""
    boxes = [each.box for each in objects]
    return np.array([(b.x, b.y, b.right - 1, b.bottom - 1) for b in boxes], np.float64)


def _common_pixels(one: ObjectMask, other: ObjectMask) -> int:
    common = one.box.intersection(other.box)
    if common is None:
        return 0
    both = one.pixels[common.within(one.box)] & other.pixels[common.within(other.box)]
    return int(np.count_nonzero(both))


def _near(true: Figures, predicted: Figures, radius: float) -> Figures:
    """Return (pairs, 3): number of the true object, of the predicted one, and their distance."""
    if not (len(true) and len(predicted)):
        return np.empty((0, 3))
    # 1e-9: centroids of whole pixels that lie `radius` apart are near, whatever the rounding.
    found = KDTree(true).sparse_distance_matrix(
        KDTree(predicted), radius + 1e-9, output_type="ndarray"
    )
    return np.column_stack([found["i"], found["j"], found["v"]])


def _ious(pairs: Numbers, areas: tuple[Figures, Figures]) -> Figures:
    shared = pairs[:, 2].astype(np.float64)
    return shared / (areas[0][pairs[:, 0]] + areas[1][pairs[:, 1]] - shared)


def _aggregated(
    pairs: Numbers, areas: tuple[Figures, Figures], counted: tuple[Flags, Flags], places: Figures
) -> tuple[float, float]:
    """Numerator and denominator of AJI (Kumar et al. 2017, algorithm 1).

    As there, each true object takes the predicted one of largest Jaccard index, used before or not;
    predicted objects that none takes add their area to the denominator. One that overlaps nothing
    adds its own area. Between equals the larger common area decides, then the place, so that the
    order of objects does not matter.

    Args:
        pairs: (pairs, 3), as `ObjectCounts` holds them.
        areas: Areas of the true and of the predicted objects.
        counted: True for objects, true and predicted, whose area counts where nothing is paired
            with them.
        places: Centroids (predicted, 2).
    """
    ious = _ious(pairs, areas)
    x, y = places[pairs[:, 1]].T
    order = np.lexsort((x, y, -pairs[:, 2], -ious, pairs[:, 0]))
    _, first = np.unique(pairs[order, 0], return_index=True)
    best = pairs[order[first]]
    common = float(best[:, 2].sum())
    missed, unused = counted[0].copy(), counted[1].copy()
    missed[best[:, 0]] = unused[best[:, 1]] = False
    united = areas[0][best[:, 0]].sum() + areas[1][best[:, 1]].sum() - common
    return common, float(united + areas[0][missed].sum() + areas[1][unused].sum())


def _one_to_one(rows: Numbers, columns: Numbers, cost: Figures) -> Flags:
    """Choose pairs so that each row and column occurs once at most.

    As many pairs as possible, and of those choices one of least total cost, by the sparse
    assignment of Jonker and Volgenant (SciPy's LAPJVsp) over the pairs that compete; each row may
    take a column of its own instead, which costs more than all pairs together.

    Args:
        rows: (pairs,).
        columns: (pairs,).
        cost: (pairs,), 0 or more.

    Returns:
        True for each chosen pair, shape (pairs,).
    """
    chosen = np.ones(len(rows), bool)
    if not len(rows):
        return chosen
    contested = (np.bincount(rows)[rows] > 1) | (np.bincount(columns)[columns] > 1)
    if not contested.any():
        return chosen
    at = np.flatnonzero(contested)
    height, row = _renumbered(rows[at])
    width, column = _renumbered(columns[at])
    # What no chain of pairs joins is chosen apart: some such parts in each call.
    sides = height + width
    joined = coo_array((np.ones(len(at)), (row, height + column)), shape=(sides, sides))
    count, part = connected_components(joined, directed=False)
    call = np.cumsum(np.bincount(part[:height], minlength=count)) // _PAIRED
    by_call = np.argsort(call[part[row]], kind="stable")
    begins = np.flatnonzero(np.diff(call[part[row]][by_call])) + 1
    for those in np.split(by_call, begins):
        chosen[at[those]] = _cheapest(row[those], column[those], cost[at[those]])
    return chosen


def _cheapest(rows: Numbers, columns: Numbers, cost: Figures) -> Flags:
    """Choose pairs as `_one_to_one` says, with one call to SciPy."""
    height, row = _renumbered(rows)
    width, column = _renumbered(columns)
    real = 1 + cost  # a zero would be taken for no pair
    instead = np.full(height, real.max() * (height + 1))
    own = np.arange(height)
    matrix = csr_array(
        (
            np.concatenate([real, instead]),
            (np.concatenate([row, own]), np.concatenate([column, width + own])),
        ),
        shape=(height, width + height),
    )
    taken = np.full(height, -1)
    matched, partners = min_weight_full_bipartite_matching(matrix)
    taken[matched] = partners
    chosen: Flags = taken[row] == column
    return chosen


def _renumbered(numbers: Numbers) -> tuple[int, Numbers]:
    distinct, places = np.unique(numbers, return_inverse=True)
    return len(distinct), places


def _counted(certain: Flags, paired: Numbers) -> int:
    """Return the number of predicted objects that count: the certain and the paired ones."""
    counted = certain.copy()
    counted[paired] = True
    return int(np.count_nonzero(counted))


def object_figures(counters: Figures) -> dict[str, Figures]:
    """Return the measures of found objects by name.

    Args:
        counters: (..., 8), as `ObjectCounts.counters` gives them, or their sums.

    Returns:
        Of shape (...), nan where nothing is to be measured: `aji` (Kumar et al., "A dataset and a
        technique for generalized nuclear segmentation", IEEE TMI 36, 2017); `pq` = `sq` × `rq`
        (Kirillov et al., "Panoptic segmentation", CVPR 2019), of which `rq` is the F1 of objects at
        an IoU above 0.5, with its `object_precision` and `object_recall`; `centroid_f1`; and
        `object_ratio`, predicted objects per true one.
    """
    common, united, pairs, iou, true, predicted, close, concerned = np.moveaxis(counters, -1, 0)
    both = true + predicted
    return {
        "aji": ratio(common, united),
        "pq": ratio(2 * iou, both),
        "sq": ratio(iou, pairs),
        "rq": ratio(2 * pairs, both),
        "object_precision": ratio(pairs, predicted),
        "object_recall": ratio(pairs, true),
        "centroid_f1": ratio(2 * close, true + concerned),
        "object_ratio": ratio(predicted, true),
    }
