"""Outlines: what is a ring, what repair does to crossings, holes cut out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.outline import cut_out, refuse_without_area, region, ring, united
from pathoseg.errors import PathosegError

SQUARE = [(0, 0), (10, 0), (10, 10), (0, 10)]


@pytest.mark.parametrize(
    "points", [[1, 2, 3], [[1], [2], [3]], [[1, 2], [3]], "abc", [{"x": 1}], [[[0, 0]]], {"x": 1}]
)
def test_what_is_no_list_of_pairs_is_refused(points: object) -> None:
    with pytest.raises(ValueError, match="list of"):
        ring(points)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, 1e300])
def test_a_coordinate_that_is_no_pixel_is_refused(bad: float | None) -> None:
    with pytest.raises(ValueError, match="pixel of any slide"):
        ring([(0, 0), (bad, 3), (5, 5)])


def test_huge_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="list of"):
        ring([(0, 0), (10**400, 3), (5, 5)])


@pytest.mark.parametrize("points", [[], [(1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 1), (0, 0)]])
def test_two_corners_are_no_ring(points: list[tuple[float, float]]) -> None:
    assert ring(points) is None
    assert region([points]) is None


def test_rings_may_be_closed_and_may_have_more_than_two_numbers() -> None:
    closed = ring([(x, y, 7) for x, y in [*SQUARE, SQUARE[0]]])
    np.testing.assert_array_equal(closed, SQUARE)


def test_a_line_there_and_back_has_no_area() -> None:
    assert region([[(0, 0), (5, 5), (9, 9), (5, 5)]]) is None


def test_holes_are_holes() -> None:
    found = region([SQUARE, [(2, 2), (4, 2), (4, 4), (2, 4)], [(5, 5)]])
    assert found is not None
    assert found.area == 100 - 4


def test_a_line_that_crosses_itself_encloses_all_its_loops() -> None:
    bow = region([[(0, 0), (2, 2), (2, 0), (0, 2)]])
    assert bow is not None
    assert bow.is_valid
    assert bow.area == pytest.approx(2)
    angle = np.arange(5) * 4 * np.pi / 5
    star = region([np.column_stack([np.cos(angle), np.sin(angle)])])
    assert star is not None
    assert star.contains(shapely.Point(0, 0))  # the even-odd rule would make it a hole


def test_a_hole_drawn_in_one_line_with_its_shell_stays_a_hole() -> None:
    hole = [(2, 2), (2, 4), (4, 4), (4, 2), (2, 2)]
    keyhole = region([[(0, 0), (10, 0), (10, 10), (0, 10), (0, 0), *hole]])
    assert keyhole is not None
    assert keyhole.area == 100 - 4


def test_a_hole_that_crosses_itself_or_its_shell_is_cut_out() -> None:
    found = region([SQUARE, [(5, 5), (15, 5), (15, 15), (5, 15)], [(1, 1), (3, 3), (3, 1), (1, 3)]])
    assert found is not None
    assert found.area == pytest.approx(100 - 25 - 2)


def test_overlapping_parts_are_united() -> None:
    found = united([shapely.box(0, 0, 2, 2), shapely.box(1, 1, 3, 3)])
    assert found is not None
    assert found.area == pytest.approx(7)
    assert united([]) is None


CORNERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12)


@given(st.lists(CORNERS, min_size=1, max_size=3), st.sampled_from([1.0, 0.1]))
def test_whatever_is_drawn_becomes_valid(rings: list[list[tuple[int, int]]], scale: float) -> None:
    found = region([np.multiply(corners, scale) for corners in rings])
    if found is not None:
        assert found.is_valid
        assert found.area > 0


def test_holes_cut_and_swallow() -> None:
    big = Annotation(shapely.box(0, 0, 10, 10), "tumour", (1, 2, 3))
    small = Annotation(shapely.box(2, 2, 3, 3), "stroma")
    far = Annotation(shapely.box(20, 20, 30, 30), None)
    cut = cut_out([big, small, far], [shapely.box(1, 1, 4, 4), shapely.box(9, 0, 12, 10)])
    assert [one.class_name for one in cut] == ["tumour", None]
    assert cut[0].geometry.area == pytest.approx(100 - 9 - 10)
    assert cut[0].colour == (1, 2, 3)
    assert cut[1] is far
    assert cut_out([big], []) == [big]


def test_points_alone_are_refused_but_nothing_at_all_is_not() -> None:
    refuse_without_area(Path("empty.xml"), 0, 0)
    refuse_without_area(Path("mixed.xml"), 5, 1)
    with pytest.raises(PathosegError, match=r"5 annotations in dots\.xml"):
        refuse_without_area(Path("dots.xml"), 5, 0)
