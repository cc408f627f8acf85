"""Stitched bands equal a blend that holds everything, and tiles equal the whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.geometry import Size
from pathoseg.outputs.stitch import (
    TilePrediction,
    argmax,
    certainty_planes,
    settle_certainty,
    stitch,
)
from pathoseg.tiles.grid import TileGrid

CLASSES = 3


def identity(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities


def ramp(position: int, shared: int, margin: int) -> float:
    """The weight of a tile `position` pixels from its edge, by the definition."""
    if position < margin:
        return 0
    if position >= shared - margin:
        return 1
    part = (position + 0.5 - margin) / (shared - 2 * margin)
    return 0.5 * (1 - np.cos(np.pi * part))


def weights(tile: int, shared: int, margin: int, first: bool, last: bool) -> NDArray[np.float64]:
    """A tile's weights in one direction, with a floor that only shows where nothing else is."""
    result = np.ones(tile)
    for position in range(tile):
        if not first:
            result[position] = ramp(position, shared, margin)
        if not last:
            result[position] = min(result[position], ramp(tile - 1 - position, shared, margin))
    return np.maximum(result, 1e-6)


def blend_of_everything(
    grid: TileGrid, predictions: list[TilePrediction], margin: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Probabilities, which pixels a tile has read, and which a tile covers."""
    padded = (grid.box(len(grid) - 1).bottom, grid.box(len(grid) - 1).right)
    sums, total = np.zeros((CLASSES, *padded)), np.zeros(padded)
    covered = np.zeros(padded, bool)
    for index, probabilities, unread in predictions:
        box = grid.box(index)
        row, column = divmod(index, grid.columns)
        window = np.outer(
            weights(box.height, grid.overlap, margin, row == 0, row == grid.rows - 1),
            weights(box.width, grid.overlap, margin, column == 0, column == grid.columns - 1),
        )
        if unread is not None:
            window = np.where(unread, 0, window)
        here = np.s_[box.y : box.bottom, box.x : box.right]
        sums[:, *here] += probabilities.numpy() * window
        total[here] += window
        covered[here] = True
    crop = np.s_[: grid.extent.height, : grid.extent.width]
    blended = sums / np.where(total > 0, total, 1)
    return blended[:, *crop], (total > 0)[crop], covered[crop]


@st.composite
def grids(draw: st.DrawFn) -> TileGrid:
    extent = Size(draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    tile = draw(st.integers(1, 16))
    return TileGrid.cover(extent, tile, draw(st.integers(0, tile - 1)))


@pytest.mark.slow
@given(grids(), st.data(), st.integers(0, 2**32 - 1))
def test_bands_equal_the_blend_of_everything(
    grid: TileGrid, data: st.DataObject, seed: int
) -> None:
    margin = data.draw(st.integers(0, grid.overlap // 2), "margin")
    missing = data.draw(st.floats(0, 1), "share of missing tiles")
    unread = data.draw(st.sampled_from([0.0, 0.1, 1.0]), "share of unread pixels")
    rng = np.random.default_rng(seed)
    shape = (grid.tile.height, grid.tile.width)
    predictions: list[TilePrediction] = [
        (
            index,
            torch.from_numpy(rng.random((CLASSES, *shape), np.float32)),
            rng.random(shape) < unread if rng.random() < 0.5 else None,
        )
        for index in range(len(grid))
        if rng.random() >= missing
    ]
    blended, read, covered = blend_of_everything(grid, predictions, margin)
    bands = list(stitch(grid, predictions, CLASSES, margin, finish=identity))
    assert len(bands) == grid.rows
    result = np.concatenate(bands, axis=1)
    assert result.shape == blended.shape
    np.testing.assert_allclose(result[:, read], blended[:, read], atol=2e-6)
    assert (result[:, covered & ~read] == 255).all()
    assert (result[:, ~covered] == 0).all()

    mask = np.concatenate(list(stitch(grid, predictions, CLASSES, margin)))
    assert mask.dtype == np.uint8
    np.testing.assert_array_equal(mask[read], result[:, read].argmax(axis=0))
    assert (mask[covered & ~read] == 255).all()
    assert (mask[~covered] == 0).all()


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_argmax_is_that_of_numpy(classes: int, seed: int) -> None:
    ties = np.random.default_rng(seed).integers(0, 3, (classes, 5, 7)).astype(np.float32)
    np.testing.assert_array_equal(argmax(torch.from_numpy(ties)), ties.argmax(axis=0))


@given(st.integers(2, 6), st.floats(0, 40), st.integers(0, 2**32 - 1))
def test_certainty_is_probability_and_entropy(classes: int, contrast: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, contrast, (classes, 5, 7))
    chances = np.exp(logits - logits.max(axis=0))
    chances /= chances.sum(axis=0)
    planes = certainty_planes(torch.from_numpy(chances.astype(np.float32))).numpy()
    assert planes.dtype == np.uint8
    assert planes.shape == (classes + 1, 5, 7)
    assert np.abs(planes[:-1] - 255 * chances).max() <= 0.5001
    entropy = -(chances * np.log(np.maximum(chances, 1e-300))).sum(axis=0) / np.log(classes)
    assert np.abs(planes[-1] - 255 * entropy).max() <= 0.5001


def test_certainty_goes_from_nothing_to_all() -> None:
    even, sure = torch.full((3, 1, 1), 1 / 3), torch.tensor([0.0, 1.0, 0.0])[:, None, None]
    assert certainty_planes(even).flatten().tolist() == [85, 85, 85, 255]
    assert certainty_planes(sure).flatten().tolist() == [0, 255, 0, 0]


def test_what_was_not_predicted_is_background_and_what_was_not_read_is_nothing() -> None:
    mask = np.array([[1, 0, 255]], np.uint8)
    planes = np.array([[[10, 0, 255]], [[245, 0, 255]], [[60, 0, 255]]], np.uint8)
    settle_certainty(mask, planes)
    assert planes[:, 0].T.tolist() == [[10, 245, 60], [255, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("tile", "overlap"), [(64, 32), (64, 24), (64, 48)])
def test_tiles_of_a_network_equal_the_whole(tile: int, overlap: int) -> None:
    """With pooling cells that coincide and no weight within reach of a tile's edge."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=4),
        nn.Conv2d(8, CLASSES, 3, padding=1),
        nn.Softmax(dim=1),
    ).eval()
    margin = 12  # 1 + 4 + 1 pixels of convolutions, and up to 4 of a pooling cell, rounded up
    grid = TileGrid.cover(Size(190, 131), tile, overlap, multiple=4)
    last = grid.box(len(grid) - 1)
    image = torch.rand(1, 3, last.bottom, last.right)

    def predict(pixels: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            probabilities: torch.Tensor = network(pixels)[0]
            return probabilities

    tiles: Iterator[TilePrediction] = (
        (index, predict(image[:, :, box.y : box.bottom, box.x : box.right]), None)
        for index, box in enumerate(grid)
    )
    stitched = np.concatenate(list(stitch(grid, tiles, CLASSES, margin, finish=identity)), axis=1)
    whole = predict(image)[:, : grid.extent.height, : grid.extent.width]
    assert np.abs(stitched - whole.numpy()).max() < 1e-5


def test_a_band_is_done_before_the_next_row_is_asked_for() -> None:
    grid = TileGrid.cover(Size(40, 40), 16, 4)
    asked = []

    def predictions() -> Iterator[TilePrediction]:
        for index in range(len(grid)):
            asked.append(index)
            yield index, torch.ones(2, 16, 16), None

    bands = stitch(grid, predictions(), 2, 1)
    next(bands)
    assert len(asked) == grid.columns


def test_what_rows_share_is_held_only_where_tiles_are() -> None:
    grid = TileGrid.cover(Size(100_000, 5 * 16 + 112), 128, 112)
    tile = torch.full((2, 128, 128), 0.5)
    some = [index for index in range(len(grid)) if index % grid.columns < 10]
    everywhere = grid.overlap * grid.extent.width * 3 * 4  # 134 MB
    process = psutil.Process()
    before = process.memory_info().rss
    most = 0
    for _ in stitch(grid, ((index, tile, None) for index in some), 2, 8):
        most = max(most, process.memory_info().rss - before)
    assert most < everywhere / 4


@given(grids(), st.integers(1, 10))
def test_a_margin_beyond_half_the_overlap_is_refused(grid: TileGrid, excess: int) -> None:
    assume(len(grid) > 1 and grid.overlap > 0)
    with pytest.raises(PathosegError, match=r"overlap of at least \d+ px"):
        list(stitch(grid, [], CLASSES, grid.overlap // 2 + excess))


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [4], [-1]])
def test_predictions_out_of_order_are_an_error(order: list[int]) -> None:
    grid = TileGrid.cover(Size(16, 16), 8)
    predictions = [(index, torch.zeros(2, 8, 8), None) for index in order]
    with pytest.raises(ValueError, match="out of order"):
        list(stitch(grid, predictions, 2, 0))
