"""Sizes, boxes, frames and grids: counts and edges that must be exact."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size, area_text
from pathoseg.tiles.grid import TileGrid


def test_a_frame_at_twice_the_resolution_has_half_the_pixels() -> None:
    frame = Frame.at(Size(1000, 601), Mpp(0.25, 0.25), 0.5)
    assert frame.size == Size(500, 301)
    assert frame.to_level0(Box(10, 20, 30, 40)) == (20, 40, 60, 80)


@given(st.integers(1, 100_000), st.floats(0.05, 30, allow_nan=False), st.floats(0.05, 30))
def test_a_frame_holds_the_whole_slide_and_less_than_a_pixel_more(
    width: int, native: float, mpp: float
) -> None:
    frame = Frame.at(Size(width, width), Mpp(native, native), mpp)
    covered = frame.size.width * frame.scale_x
    assert covered >= width - 1e-6 * width
    assert covered - width < frame.scale_x * (1 + 1e-6) or frame.size.width == 1


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_resolutions_are_refused(value: float) -> None:
    with pytest.raises(PathosegError, match="impossible"):
        Mpp(value, 0.5)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(PathosegError("It broke.", "Mend it.")))
    assert (error.problem, error.hint) == ("It broke.", "Mend it.")


@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(1, 12),
    st.integers(0, 6),
    st.sampled_from([1, 2, 4, 16]),
)
def test_a_grid_covers_every_pixel_and_wastes_no_tile(
    width: int, height: int, tile: int, overlap: int, multiple: int
) -> None:
    tile, overlap = tile * 2 * multiple, min(overlap, tile) * multiple
    extent = Size(width, height)
    grid = TileGrid.cover(extent, tile, overlap, multiple)
    covered = np.zeros((height, width), bool)
    for box in grid:
        inside = box.intersection(Box(0, 0, width, height))
        assert inside is not None
        covered[inside.y : inside.bottom, inside.x : inside.right] = True
        assert box.x % multiple == box.y % multiple == 0
        assert box.width % multiple == box.height % multiple == 0
    assert covered.all()
    if grid.columns > 1:
        assert (grid.columns - 2) * grid.stride.width + grid.tile.width < width


def test_a_grid_that_pooling_cannot_divide_is_refused() -> None:
    with pytest.raises(PathosegError, match="multiples of 16"):
        TileGrid.cover(Size(100, 100), 100, 0, 16)


@pytest.mark.parametrize(
    ("area", "shown"),
    [
        *((0.0, "0"), (1.5e-6, "0.0000015"), (0.123456, "0.1235"), (999.84, "999.8")),
        *((1250.0, "1,250.0"), (12_500.04, "12,500.0"), (math.nan, "–")),
    ],
)
def test_an_area_has_no_exponent(area: float, shown: str) -> None:
    assert area_text(area) == shown
