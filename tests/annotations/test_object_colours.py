"""Colours of objects: neighbours differ, few are needed; neighbours against brute force."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from pathoseg.annotations.object_colours import (
    colours,
    near_numbers,
    near_outlines,
    rows_of_cells,
)
from pathoseg.errors import PathosegError

FILE = Path("slide.geojson")


@given(
    edges=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=120),
    random=st.randoms(use_true_random=False),
)
def test_neighbours_differ_in_few_colours_whatever_the_order_of_pairs(
    edges: list[tuple[int, int]], random: object
) -> None:
    pairs = [(one, other) for one, other in edges if one != other]
    found = colours(30, np.array(pairs, np.int64).reshape(-1, 2), FILE)
    assert found.min() >= 1
    assert all(found[one] != found[other] for one, other in pairs)
    degree = np.bincount(np.array(pairs, np.int64).ravel(), minlength=30)
    assert found.max() <= degree.max() + 1
    turned = [pair[::-1] for pair in pairs[::-1]]
    again = colours(30, np.array(turned, np.int64).reshape(-1, 2), FILE)
    np.testing.assert_array_equal(found, again)


def test_254_objects_on_one_spot_are_the_most() -> None:
    assert len(set(colours(254, np.array(list(combinations(range(254), 2))), FILE))) == 254
    with pytest.raises(PathosegError, match=r"More than 254 objects in slide\.geojson"):
        colours(255, np.array(list(combinations(range(255), 2))), FILE)


@given(
    mask=arrays(
        np.uint16,
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        elements=st.sampled_from([1, 2, 3, 9, 65535]),
        fill=st.just(0),
    ),
    distance=st.floats(0, 14),
)
@settings(max_examples=60)
def test_numbers_within_the_distance_are_found_in_bands(
    mask: NDArray[np.uint16], distance: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathoseg.annotations.object_colours._ROWS", 8)
        rows = rows_of_cells(distance)
    bands = (mask[top : top + rows] for top in range(0, len(mask), rows))
    places = {int(value): np.argwhere(mask == value) for value in np.unique(mask[mask > 0])}
    boxes = np.zeros((65_536, 4), np.int64)
    for value, at in places.items():
        boxes[value] = [*at.min(axis=0)[::-1], *at.max(axis=0)[::-1] + 1]
    found = {(one, other) for one, other in near_numbers(bands, boxes, distance).tolist()}
    for one, other in combinations(sorted(places), 2):
        steps = np.abs(places[one][:, None] - places[other][None])
        gap = np.hypot(*np.moveaxis((steps - 1).clip(0), -1, 0)).min()  # of pixels' areas
        if gap <= distance:
            assert (one, other) in found
        if gap > 3 * distance + 3:
            assert (one, other) not in found


@given(
    boxes=st.lists(
        st.tuples(*[st.integers(0, 60)] * 2, *[st.integers(1, 30)] * 2), min_size=1, max_size=9
    ),
    distance=st.integers(0, 9),
)
@settings(max_examples=50)
def test_outlines_within_the_distance_are_found(
    boxes: list[tuple[int, int, int, int]], distance: int
) -> None:
    areas = np.array([shapely.box(x, y, x + w, y + h) for x, y, w, h in boxes], dtype=object)
    found = sorted(map(tuple, near_outlines(areas, distance).tolist()))
    expected = [
        (one, other)
        for one, other in combinations(range(len(areas)), 2)
        if shapely.distance(areas[one], areas[other]) <= distance
    ]
    assert found == expected
