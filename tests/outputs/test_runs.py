"""Runs hold every traced pixel once, and touch exactly where pixels of a class share an edge."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from pathoseg.outputs.boundary import Runs

masks = hnp.arrays(
    np.uint8,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.sampled_from([0, 1, 2, 254]),
)


def run_of_each_pixel(runs: Runs, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The number of each pixel's run, −1 where there is none."""
    number = np.full(shape, -1)
    for index in range(len(runs)):
        row = number[runs.row[index], runs.start[index] : runs.end[index]]
        assert (row == -1).all()
        row[:] = index
    return number


@given(masks)
def test_runs_are_the_longest_stretches_of_a_class(mask: NDArray[np.uint8]) -> None:
    runs = Runs.of(mask)
    number = run_of_each_pixel(runs, mask.shape)
    np.testing.assert_array_equal(number >= 0, mask != 0)
    traced = number >= 0
    np.testing.assert_array_equal(runs.value[number[traced]], mask[traced])
    same_class = traced[:, 1:] & (mask[:, 1:] == mask[:, :-1])
    np.testing.assert_array_equal(number[:, 1:][same_class], number[:, :-1][same_class])
    assert (np.diff(runs.row * 100 + runs.start) > 0).all()


@given(masks)
def test_runs_touch_where_pixels_of_a_class_lie_above_each_other(mask: NDArray[np.uint8]) -> None:
    runs = Runs.of(mask)
    number = run_of_each_pixel(runs, mask.shape)
    same = (number[1:] >= 0) & (mask[1:] == mask[:-1])
    expected = set(zip(number[1:][same].tolist(), number[:-1][same].tolist(), strict=True))
    lower, upper = runs.touching()
    assert set(zip(lower.tolist(), upper.tolist(), strict=True)) == expected
    assert len(lower) == len(expected)
