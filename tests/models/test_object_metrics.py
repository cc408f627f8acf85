"""Measures of objects: known answers, the papers’ words in sets of pixels, properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from pathoseg.geometry import Box, ObjectMask
from pathoseg.models import object_metrics
from pathoseg.models.object_metrics import ObjectCounts, object_figures

Classified = tuple[ObjectMask, int]
Pixels = frozenset[tuple[int, int]]

CLASSES = 3
RADIUS = 2.0


def _square(x: int, y: int, side: int = 10, height: int | None = None) -> ObjectMask:
    tall = side if height is None else height
    return ObjectMask(Box(x, y, side, tall), np.ones((tall, side), bool))


def _counters(
    true: Sequence[Classified],
    predicted: Sequence[Classified],
    unknown: NDArray[np.bool_] | None = None,
    radius: float = RADIUS,
) -> NDArray[np.float64]:
    counts = ObjectCounts(CLASSES, radius)
    counts.add_true([each for each, _ in true], [of for _, of in true])
    hidden = None
    if unknown is not None:
        whole = Box(0, 0, unknown.shape[1], unknown.shape[0])
        hidden = [unknown[each.box.within(whole)] for each, _ in predicted]
    counts.add_predicted([each for each, _ in predicted], [of for _, of in predicted], hidden)
    return counts.counters()


def _figures(
    true: Sequence[ObjectMask], predicted: Sequence[ObjectMask], radius: float = RADIUS
) -> dict[str, float]:
    counters = _counters([(o, 1) for o in true], [(o, 1) for o in predicted], radius=radius)
    return {name: float(figure[0]) for name, figure in object_figures(counters).items()}


@pytest.fixture(autouse=True, scope="module")
def in_small_parts() -> Iterator[None]:
    """Pairs that compete are chosen in calls of few objects, as they are of a whole slide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_metrics, "_PAIRED", 2)
        yield


def test_a_shifted_square_has_the_figures_of_its_overlap() -> None:
    figures = _figures([_square(0, 0)], [_square(2, 0)])
    for name in ("aji", "pq", "sq"):
        assert figures[name] == pytest.approx(80 / 120)
    for name in ("rq", "object_precision", "object_recall", "centroid_f1", "object_ratio"):
        assert figures[name] == 1
    assert _figures([_square(0, 0)], [_square(2, 0)], radius=1.9)["centroid_f1"] == 0
    half = _figures([_square(0, 0)], [_square(0, 0, 20, 10)])
    assert (half["aji"], half["rq"]) == (0.5, 0), "an IoU of exactly a half is no pair"
    assert math.isnan(half["sq"])


def test_a_merged_pair_is_used_twice_by_aji_and_never_by_pq() -> None:
    """Kumar's algorithm marks a prediction as used, but lets others take it."""
    true = [_square(0, 0), _square(10, 0), _square(100, 100)]
    predicted = [_square(0, 0, 20, 10), _square(50, 50, 5), _square(101, 100, 9, 10)]
    figures = _figures(true, predicted)
    assert figures["aji"] == pytest.approx((100 + 100 + 90) / (200 + 200 + 100 + 25))
    assert figures["pq"] == pytest.approx(0.9 / 3)
    assert (figures["sq"], figures["rq"]) == (pytest.approx(0.9), pytest.approx(1 / 3))
    assert figures["centroid_f1"] == pytest.approx(1 / 3)
    assert figures["object_ratio"] == 1


def test_nothing_there_is_no_figure_and_one_side_alone_is_none_right() -> None:
    assert all(math.isnan(figure) for figure in _figures([], []).values())
    missed = _figures([_square(0, 0)], [])
    assert (missed["aji"], missed["pq"], missed["object_recall"], missed["centroid_f1"]) == (0,) * 4
    assert math.isnan(missed["object_precision"])
    invented = _figures([], [_square(0, 0)])
    assert (invented["aji"], invented["pq"], invented["object_precision"]) == (0,) * 3
    assert math.isnan(invented["object_recall"])
    assert math.isnan(invented["object_ratio"])


def test_classes_are_compared_apart_and_together() -> None:
    places = [_square(20 * at, 0) for at in range(3)]
    figures = object_figures(
        _counters(list(zip(places, (1, 1, 2), strict=True)), [(place, 1) for place in places])
    )
    assert figures["pq"] == pytest.approx([1, 0.8, 0])
    assert figures["aji"] == pytest.approx([1, 2 / 3, 0])
    assert figures["object_ratio"] == pytest.approx([1, 1.5, 0])
    with pytest.raises(ValueError, match="a class each"):
        _counters([(places[0], CLASSES)], [])


def test_what_the_truth_does_not_know_counts_nowhere() -> None:
    unknown = np.zeros((40, 100), bool)
    unknown[:, 50:] = True
    cut = (_square(46, 0, 4, 10), 1)  # of a nucleus that reaches into the unknown part

    def figures(*predicted: ObjectMask) -> dict[str, NDArray[np.float64]]:
        return object_figures(_counters([cut], [(each, 1) for each in predicted], unknown))

    for found in (_square(46, 0), _square(46, 0, 4, 10)):
        for others in ((), (_square(70, 20),), (_square(46, 20),)):
            for name, figure in figures(found, *others).items():
                assert figure[0] == 1, f"{name}: mostly unknown ones count where they are right"
    mostly_known = figures(_square(46, 0), _square(44, 20))
    assert mostly_known["object_precision"][0] == 0.5
    assert mostly_known["aji"][0] == pytest.approx(40 / (40 + 60))
    assert mostly_known["centroid_f1"][0] == pytest.approx(2 / 3)


# The same measures over sets of pixels, as the papers put them.


def _pixels(of: ObjectMask) -> Pixels:
    rows, columns = np.nonzero(of.pixels)
    return frozenset(zip((rows + of.box.y).tolist(), (columns + of.box.x).tolist(), strict=True))


def _jaccard(one: Pixels, other: Pixels) -> Fraction:
    return Fraction(len(one & other), len(one | other))


def _centre(of: Pixels) -> tuple[float, float]:
    return (sum(y for y, _ in of) / len(of), sum(x for _, x in of) / len(of))


def _papers_aji(true: list[Pixels], predicted: list[Pixels]) -> float:
    correct, union, used = 0, 0, set[int]()
    for of in true:

        def likeness(at: int, of: Pixels = of) -> tuple[float, ...]:
            other = predicted[at]
            y, x = _centre(other)
            return (float(_jaccard(of, other)), len(of & other), -y, -x)

        best = max(range(len(predicted)), key=likeness, default=None)
        if best is None or not of & predicted[best]:
            union += len(of)
            continue
        correct += len(of & predicted[best])
        union += len(of | predicted[best])
        used.add(best)
    union += sum(len(each) for at, each in enumerate(predicted) if at not in used)
    return correct / union if union else math.nan


def _assigned(
    true: list[Pixels],
    predicted: list[Pixels],
    gain: Callable[[Pixels, Pixels], float | None],
) -> list[float]:
    """Gains of the most pairs that can be had, and of those the largest sum of gains."""
    gains = [[gain(one, other) for other in predicted] for one in true]
    table = [[0.0 if each is None else 1000 + each for each in row] for row in gains]
    matrix = np.array(table).reshape(len(true), len(predicted))
    rows, columns = linear_sum_assignment(matrix, maximize=True)
    chosen = [gains[row][column] for row, column in zip(rows, columns, strict=True)]
    return [each for each in chosen if each is not None]


def _papers_figures(true: list[Pixels], predicted: list[Pixels]) -> dict[str, float]:
    def overlap(one: Pixels, other: Pixels) -> float | None:
        iou = _jaccard(one, other)
        return float(iou) if iou > Fraction(1, 2) else None

    def nearness(one: Pixels, other: Pixels) -> float | None:
        distance = math.dist(_centre(one), _centre(other))
        return -distance if distance <= RADIUS + 1e-9 else None

    def over(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    matched = _assigned(true, predicted, overlap)
    hits, missed, invented = len(matched), len(true) - len(matched), len(predicted) - len(matched)
    either = hits + missed / 2 + invented / 2
    near = len(_assigned(true, predicted, nearness))
    return {
        "aji": _papers_aji(true, predicted),
        "pq": over(sum(matched), either),
        "sq": over(sum(matched), hits),
        "rq": over(hits, either),
        "object_precision": over(hits, hits + invented),
        "object_recall": over(hits, hits + missed),
        "centroid_f1": over(2 * near, len(true) + len(predicted)),
        "object_ratio": over(len(predicted), len(true)),
    }


@st.composite
def _objects(draw: st.DrawFn) -> list[Classified]:
    """Small objects of any form on 14 × 14 pixels; some of one side overlap each other."""
    objects = []
    for _ in range(draw(st.integers(0, 6))):
        width, height = draw(st.integers(1, 5)), draw(st.integers(1, 5))
        bits = draw(st.integers(1, 2 ** (width * height) - 1) | st.just(2 ** (width * height) - 1))
        flat = np.array([bits >> at & 1 for at in range(width * height)], bool)
        place = Box(draw(st.integers(0, 9)), draw(st.integers(0, 9)), width, height)
        mask = ObjectMask(place, flat.reshape(height, width))
        objects.append((mask, draw(st.integers(1, CLASSES - 1))))
    return objects


@st.composite
def _disjoint(draw: st.DrawFn) -> tuple[list[Classified], list[Classified]]:
    """A true and a predicted image of numbered areas, one often the other's with changes."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    true = np.kron(generator.integers(0, 9, (4, 4)), np.ones((3, 3), int))
    predicted = np.where(generator.random(true.shape) < draw(st.floats(0, 0.5)), 0, true)
    predicted = np.roll(predicted, draw(st.integers(-1, 1)), axis=1)
    return tuple(  # type: ignore[return-value]
        [
            (ObjectMask(Box(0, 0, 12, 12), labels == number), 1 + number % 2)
            for number in np.unique(labels[labels > 0])
        ]
        for labels in (true, predicted)
    )


BOTH = st.tuples(_objects(), _objects()) | _disjoint()


@given(BOTH)
def test_figures_are_those_of_the_papers(
    objects: tuple[list[Classified], list[Classified]],
) -> None:
    figures = object_figures(_counters(*objects))
    for index in range(CLASSES):
        sides = ([_pixels(o) for o, of in side if index in {0, of}] for side in objects)
        for name, expected in _papers_figures(*sides).items():
            assert figures[name][index] == pytest.approx(expected, nan_ok=True), (name, index)


@given(BOTH, st.randoms(use_true_random=False))
def test_order_and_place_of_objects_do_not_matter(
    objects: tuple[list[Classified], list[Classified]], random: st.DataObject
) -> None:
    expected = _counters(*objects)
    for side in objects:
        random.shuffle(side)  # type: ignore[attr-defined]
    moved = [
        [
            (replace(o, box=replace(o.box, x=o.box.x + 1000, y=o.box.y + 70_000)), of)
            for o, of in side
        ]
        for side in objects
    ]
    assert _counters(*moved) == pytest.approx(expected)


@given(BOTH)
def test_pq_and_f1_are_symmetric_and_a_perfect_prediction_is_one(
    objects: tuple[list[Classified], list[Classified]],
) -> None:
    true, predicted = objects
    one = object_figures(_counters(true, predicted))
    other = object_figures(_counters(predicted, true))
    for name in ("pq", "sq", "rq", "centroid_f1"):
        assert one[name] == pytest.approx(other[name], nan_ok=True)
    assert one["object_precision"] == pytest.approx(other["object_recall"], nan_ok=True)
    # AJI lets a twin of an object take the other's counterpart, as published.
    apart = list({_pixels(o): (o, of) for o, of in true}.values())
    for name, figure in object_figures(_counters(apart, apart)).items():
        assert figure[~np.isnan(figure)] == pytest.approx(1), name
    for figure in one.values():
        assert (figure[~np.isnan(figure)] >= 0).all()


@given(BOTH, st.integers(1, 5))
def test_objects_that_come_in_bands_count_like_all_at_once(
    objects: tuple[list[Classified], list[Classified]], rows: int
) -> None:
    """And a slide's counters are the sum of those of its parts, where these lie far apart."""
    counts = ObjectCounts(CLASSES, RADIUS)
    for bottom in range(rows, 21, rows):
        adds = (counts.add_true, counts.add_predicted)
        for side, add in zip(objects, adds, strict=True):
            band = [(o, of) for o, of in side if bottom - rows < o.box.bottom <= bottom]
            add([o for o, _ in band], [of for _, of in band])
        later = [o.box.y for side in objects for o, _ in side if o.box.bottom > bottom]
        counts.settle(min(later, default=bottom))
    expected = _counters(*objects)
    assert counts.counters() == pytest.approx(expected)
    twice = [
        [*side, *((replace(o, box=replace(o.box, y=o.box.y + 500)), of) for o, of in side)]
        for side in objects
    ]
    assert _counters(*twice) == pytest.approx(2 * expected)
