"""Windows cover the tissue once, within their bounds, and join to what one pass would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pathoseg.geometry import Size
from pathoseg.inference import windows as windows_file
from pathoseg.inference.windows import WindowOptions, Windows, most_pixels
from pathoseg.models.unet import UNet
from pathoseg.outputs.stitch import TilePrediction

CELL = 8
TISSUE = arrays.arrays(np.bool_, st.tuples(st.integers(1, 9), st.integers(1, 9)))


def _extent(tissue: np.ndarray, short: tuple[int, int]) -> Size:
    """Return the size of a slide of these cells, whose last row and column may be cut short."""
    rows, columns = tissue.shape
    return Size(columns * CELL - short[0], rows * CELL - short[1])


@given(
    tissue=TISSUE,
    short=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    margin=st.sampled_from([0, 4, 8, 20]),
    most=st.integers(1, 6000),
    band=st.sampled_from([8, 24, 1000]),
)
def test_tissue_is_covered_once_within_bounds(
    tissue: np.ndarray, short: tuple[int, int], margin: int, most: int, band: int
) -> None:
    extent = _extent(tissue, short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_file, "_BAND", band)
        found = Windows(extent, WindowOptions(margin, most, 4), CELL, tissue)
    covered = np.zeros((extent.height, extent.width), int)
    limit = extent.rounded_up(4)
    area = 0
    for number in range(len(found)):
        box, core = found.box(number), found.core(number)
        covered[core.y : core.bottom, core.x : core.right] += 1
        assert min(core.x, core.y) >= 0
        assert (box.x, box.y) == (max(0, core.x - margin), max(0, core.y - margin))
        # A core that the extent cuts short ends with it, and its window with what a model takes.
        for end, box_end, last in (
            (core.right, box.right, limit.width),
            (core.bottom, box.bottom, limit.height),
        ):
            assert box_end == min(last, -(-end // CELL) * CELL + margin)
        assert box.size.pixels <= most or max(core.width, core.height) <= CELL
        row = found.row_of(number)
        assert found.first_of(row) <= number < found.first_of(row + 1)
        assert core.y // band == (core.bottom - 1) // band == row
        area += box.size.pixels
    cells = tissue.repeat(CELL, 0).repeat(CELL, 1)[: extent.height, : extent.width]
    assert covered.max(initial=0) <= 1
    assert (covered[cells] == 1).all()
    assert found.first_of(found.rows) == len(found)
    # No dearer than a window for each cell of tissue.
    assert area + len(found) * windows_file._WINDOW_COST <= tissue.sum() * (
        (CELL + 2 * margin) ** 2 + windows_file._WINDOW_COST
    )


def test_separate_pieces_get_windows_of_their_own() -> None:
    tissue = np.zeros((6, 40), np.bool_)
    tissue[1:3, 2:5] = tissue[4:, 2:5] = tissue[:, 30:33] = True
    found = Windows(Size(40 * 128, 6 * 128), WindowOptions(96, 2**22, 16), 128, tissue)
    cores = [found.core(number) for number in range(len(found))]
    assert [(core.x // 128, core.width // 128) for core in cores] == [(2, 3), (30, 3)]


@given(tissue=TISSUE, short=st.tuples(st.integers(0, 7), st.integers(0, 7)), data=st.data())
def test_joined_windows_are_one_pass(
    tissue: np.ndarray, short: tuple[int, int], data: st.DataObject
) -> None:
    """With the predictions cut out of a whole one, also from a band in the middle on."""
    extent = _extent(tissue, short)
    rng = np.random.default_rng(0)
    limit = extent.rounded_up(4)
    whole = torch.from_numpy(rng.random((3, limit.height, limit.width), np.float32))
    lost = rng.random((limit.height, limit.width)) < 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_file, "_BAND", 2 * CELL)
        found = Windows(extent, WindowOptions(4, 2000, 4), CELL, tissue)
    first = data.draw(st.integers(0, found.rows))

    def predictions() -> list[TilePrediction]:
        given = []
        for number in range(found.first_of(first), len(found)):
            box = found.box(number)
            part = slice(box.y, box.bottom), slice(box.x, box.right)
            given.append((number, whole[:, *part].clone(), lost[part]))
        return given

    bands = list(found.join(predictions(), 3, first=first))
    expected = whole.argmax(0).numpy().astype(np.uint8)
    expected[lost] = 255
    expected = expected[: extent.height, : extent.width]
    expected[~tissue.repeat(CELL, 0).repeat(CELL, 1)[: extent.height, : extent.width]] = 0
    empty = np.zeros((0, extent.width), np.uint8)
    np.testing.assert_array_equal(np.concatenate([empty, *bands]), expected[2 * CELL * first :])


def test_memory_bounds_windows_and_small_ones_are_not_taken() -> None:
    model = UNet(3, width=16).eval()
    pixels = most_pixels(model, 16, 2**30, batch=1)
    # In the last block live the skip, what comes from below (half as much), both joined, and a
    # convolution before and after its norm: 5.5 maps of 16 float32 numbers a pixel.
    assert pixels == int(2**30 / (2 * 5.5 * 16 * 4))
    assert most_pixels(model, 16, 2**30, batch=4) == pixels // 4
    assert most_pixels(model, 16, 2**50, batch=1) == windows_file._MOST_PIXELS
    assert model.reach == 94
    assert WindowOptions.choose(94, 16, 768**2) == WindowOptions(96, 768**2, 16)
    assert WindowOptions.choose(94, 16, 767**2) is None
