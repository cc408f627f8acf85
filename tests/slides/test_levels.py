"""Exact downsamples from rounded sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.geometry import Size
from pathoseg.slides.levels import exact_levels, whole_downsample

roundings = st.sampled_from([math.floor, math.ceil, round])


powers = st.lists(st.tuples(st.sampled_from([2, 4]), roundings), min_size=1, max_size=4)
others = st.lists(st.tuples(st.sampled_from([2, 3, 5]), roundings), min_size=1, max_size=2)


@given(st.integers(3_000, 200_000), st.integers(3_000, 200_000), powers | others)
def test_rounding_in_cascades_leaves_the_downsample_whole(
    width: int, height: int, steps: list[tuple[int, Callable[[float], int]]]
) -> None:
    sizes, factors = [Size(width, height)], [1]
    for factor, rounding in steps:
        last = sizes[-1]
        sizes.append(Size(rounding(last.width / factor), rounding(last.height / factor)))
        factors.append(factors[-1] * factor)
    assert [level.downsample for level in exact_levels(sizes)] == factors


def test_a_pyramid_of_no_whole_factor_keeps_the_mean_ratio() -> None:
    levels = exact_levels([Size(1000, 2000), Size(400, 800), Size(160, 320)])
    assert [level.downsample for level in levels] == [1.0, 2.5, pytest.approx(6.25)]


@pytest.mark.parametrize(
    ("level", "whole"),
    [(Size(250, 500), 4), (Size(251, 500), None), (Size(249, 499), None), (Size(500, 250), None)],
)
def test_both_sides_must_agree(level: Size, whole: int | None) -> None:
    assert whole_downsample(Size(1000, 2000), level) == whole


def test_no_level_is_finer_than_the_first() -> None:
    levels = exact_levels([Size(100, 100), Size(130, 170)])
    assert levels[1].downsample == 1
