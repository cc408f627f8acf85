"""Objects: the peaks that a flood finds, wherever bands and blocks begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from pathoseg.geometry import Box, ObjectMask, Size
from pathoseg.outputs import objects
from pathoseg.outputs.objects import FoundObjects, ObjectFinder, ObjectOptions, separate

Pixel = tuple[int, int]
HEIGHTS = hnp.arrays(np.int16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)).map(
    lambda values: (values % 9 - 3).astype(np.int16)
)


def _around(pixel: Pixel, height: NDArray[np.int16]) -> Iterator[Pixel]:
    """The eight neighbours of a pixel that are inside objects."""
    for y, x in product((-1, 0, 1), repeat=2):
        row, column = pixel[0] + y, pixel[1] + x
        on = 0 <= row < height.shape[0] and 0 <= column < height.shape[1]
        if (y or x) and on and height[row, column] >= 0:
            yield row, column


def _flooded(pixel: Pixel, height: NDArray[np.int16], above: int) -> set[Pixel]:
    """The pixels that can be reached from one through pixels higher than `above`."""
    found, new = {pixel}, [pixel]
    while new:
        reached = {each for each in _around(new.pop(), height) if height[each] > above} - found
        found |= reached
        new += reached
    return found


@given(HEIGHTS, st.integers(1, 4))
def test_basins_are_those_of_the_peaks_of_enough_dynamic(
    height: NDArray[np.int16], depth: int
) -> None:
    """From a peak no higher one can be reached without going down by `depth`."""

    def key(pixel: Pixel) -> tuple[int, Pixel]:
        return int(height[pixel]), pixel

    def peak_of(pixel: Pixel) -> Pixel:
        best = max([pixel, *_around(pixel, height)], key=key)
        return pixel if best == pixel else peak_of(best)

    peak = {(y, x): peak_of((y, x)) for y, x in np.argwhere(height >= 0).tolist()}
    around = {top: _flooded(top, height, int(height[top]) - depth) for top in set(peak.values())}
    standing = {
        top for top, near in around.items() if all(key(peak[one]) <= key(top) for one in near)
    }
    found = separate(height, depth)
    assert found.peaks.tolist() == sorted(map(list, standing))
    for pixel in np.ndindex(height.shape):
        label = found.labels[pixel]
        assert (label > 0) == (pixel in peak)
        if label:
            top = peak[pixel]
            own = (int(found.peaks[label - 1][0]), int(found.peaks[label - 1][1]))
            assert own == top if top in standing else own in around[top]


@pytest.mark.parametrize("noise", [0, 1, 2])
def test_ripples_part_no_large_object(noise: int) -> None:
    """A disc whose height is at its ceiling but for noise, and a ridge, are an object each."""
    y, x = np.mgrid[:200, :200].astype(float)
    disc = 70 - np.hypot(y - 80, x - 80)
    ridge = 10 - np.hypot(y - 180, np.maximum(np.abs(x - 100) - 70, 0))
    rise = np.maximum(disc, ridge)
    ripples = np.random.default_rng(1).integers(-noise, noise + 1, x.shape)
    height = np.where(rise > 0, np.clip(8 * rise, 8, 240) + ripples, -1)
    assert len(separate(height.astype(np.int16), 2 * noise + 1).peaks) == 2


def _cells(size: Size, count: int, seed: int) -> NDArray[np.uint8]:
    """Planes of discs that touch and overlap, up to 16 px across, of two classes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size.height, : size.width]
    height, kind = np.zeros(x.shape), np.zeros(x.shape, np.uint8)
    for number in range(count):
        centre, radius = rng.uniform(0, (size.height, size.width)), rng.uniform(2, 8)
        rise = radius - np.hypot(y - centre[0], x - centre[1])
        kind[rise > np.maximum(height, 0)] = 1 + number % 2
        height = np.maximum(height, rise)
    kind[rng.random(x.shape) < 0.01] = 255
    ripples = np.clip(8 * height + rng.normal(0, 2, x.shape), 0, 255)
    return np.stack([kind, ripples.astype(np.uint8), rng.integers(0, 256, x.shape, np.uint8)])


def _found(
    planes: NDArray[np.uint8], cuts: Sequence[int], options: ObjectOptions
) -> list[FoundObjects]:
    finder = ObjectFinder(Size(planes.shape[2], planes.shape[1]), options)
    bands = np.split(planes, sorted(cuts), axis=1)
    return [found for band in bands if band.size for found in finder.add(band)]


def _described(parts: Sequence[FoundObjects]) -> list[tuple[str, int, int, float]]:
    return sorted(
        (outline.wkt, int(kind), int(pixels), round(float(chance), 9))
        for part in parts
        for outline, kind, pixels, chance in zip(
            part.outlines, part.class_index, part.pixels, part.probability, strict=True
        )
    )


def _same(one: ObjectMask, other: ObjectMask) -> bool:
    return one.box == other.box and np.array_equal(one.pixels, other.pixels)


def test_no_objects_are_trimmed_to_a_pixel() -> None:
    planes = np.zeros((3, 9, 9), np.uint8)
    planes[:2, 4, 4] = 1
    [found] = _found(planes, [], ObjectOptions(depth=1, extent=3, min_pixels=2))
    assert found.left_out == 1
    assert found.trimmed().labels.tolist() == [[0]]


@pytest.mark.parametrize(("min_pixels", "expected"), [(1, [9, 4]), (4, [9, 4]), (5, [9])])
def test_a_part_that_meets_the_rest_at_a_corner_is_an_object(
    min_pixels: int, expected: list[int]
) -> None:
    """Height falls from one square to the next, so both are one basin."""
    planes = np.zeros((3, 9, 9), np.uint8)
    planes[0, 1:4, 1:4] = planes[0, 4:6, 4:6] = 1
    planes[1, 1:4, 1:4], planes[1, 4:6, 4:6] = 90, 50
    [found] = _found(planes, [], ObjectOptions(depth=1, extent=8, min_pixels=min_pixels))
    assert found.pixels.tolist() == expected
    assert [outline.area for outline in found.outlines] == expected
    assert found.left_out == 0


@given(st.integers(0, 2**16), st.integers(0, 30))
def test_with_no_least_size_each_pixel_is_in_an_object(seed: int, extent: int) -> None:
    planes = _cells(Size(70, 60), 40, seed)
    planes[0][np.random.default_rng(seed).random((60, 70)) < 0.2] = 0  # holes, and crumbs
    found = _found(planes, [17, 30], ObjectOptions(depth=8, extent=extent + 4))
    known = (planes[0] > 0) & (planes[0] < 255)
    assert sum(part.pixels.sum() for part in found) == known.sum()
    outlines = [outline for part in found for outline in part.outlines]
    assert sum(outline.area for outline in outlines) == pytest.approx(known.sum())


@given(
    st.integers(1, 90),
    st.integers(20, 90),
    st.integers(0, 60),
    st.integers(0, 2**16),
    st.lists(st.integers(1, 89), max_size=4),
    st.integers(24, 60),
    st.sampled_from([0.0, 0.5]),
)
def test_objects_do_not_depend_on_bands_and_blocks(
    rows: int, columns: int, count: int, seed: int, cuts: list[int], block: int, simplify: float
) -> None:
    size = Size(columns, rows)
    planes = _cells(size, count, seed)
    options = ObjectOptions(depth=8, extent=24, min_pixels=4, simplify=simplify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_BLOCK", Size(200, 200))
        whole = _found(planes, [], options)
        patch.setattr(objects, "_BLOCK", Size(block, block))
        parts = _found(planes, [cut for cut in cuts if cut < rows], options)
    assert _described(parts) == _described(whole)
    assert sum(part.left_out for part in parts) == sum(part.left_out for part in whole)
    assert not any(part.is_cut.any() for part in parts)

    times, whole_mask = np.zeros((rows, columns), int), Box(0, 0, columns, rows)
    for part in parts:
        masks = part.masks()
        assert all(map(_same, part.trimmed().masks(), masks))
        assert [mask.area for mask in masks] == part.pixels.tolist()
        assert all(outline.is_valid for outline in part.outlines)
        if not simplify:
            assert [outline.area for outline in part.outlines] == part.pixels.tolist()
        for mask, kind in zip(masks, part.class_index, strict=True):
            times[mask.box.within(whole_mask)] += mask.pixels
            own = planes[0][mask.box.within(whole_mask)][mask.pixels]
            assert np.bincount(own).max() == np.count_nonzero(own == kind)
    assert times.max(initial=0) <= 1
    assert not times[(planes[0] == 0) | (planes[0] == 255)].any()


def test_an_object_beyond_the_halo_is_cut_once_and_said() -> None:
    size = Size(40, 400)
    planes = np.zeros((3, size.height, size.width), np.uint8)
    planes[0, 10:390, 10:30] = 1
    planes[1, 10:390, 10:30] = 40
    planes[1, 389, 29] = 41
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_BLOCK", Size(40, 40))
        parts = _found(planes, [], ObjectOptions(depth=8, extent=20))
    assert sum(map(len, parts)) == 1
    [part] = [part for part in parts if len(part)]
    assert part.is_cut.tolist() == [True]
    assert part.pixels[0] == 20 * (390 - (360 - 20))


@given(st.integers(0, 2**16), st.integers(1, 12), st.integers(8, 30))
def test_no_pixel_is_in_two_objects_however_large_they_are(
    seed: int, extent: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    planes = rng.integers(0, 256, (3, 30, 33)).astype(np.uint8)
    planes[0] = rng.random((30, 33)) < 0.9
    planes[1] = planes[1] >> int(rng.integers(0, 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_BLOCK", Size(block, block))
        parts = _found(
            planes, [15, 25], ObjectOptions(depth=int(rng.integers(1, 9)), extent=extent)
        )
    times, whole = np.zeros((30, 33), int), Box(0, 0, 33, 30)
    for part in parts:
        for mask, is_cut in zip(part.masks(), part.is_cut, strict=True):
            times[mask.box.within(whole)] += mask.pixels
            assert is_cut or max(mask.box.width, mask.box.height) <= block + 2 * extent
    assert times.max() <= 1


def test_thousands_of_objects_that_touch_keep_their_own_outlines() -> None:
    """Far more objects than `_coloured` has numbers: some that touch begin with the same one."""
    rng = np.random.default_rng(3)
    planes = np.stack([np.ones((200, 200)), rng.integers(0, 8, (200, 200)), np.full((200, 200), 9)])
    [found] = _found(planes.astype(np.uint8), [], ObjectOptions(depth=1, extent=24))
    assert len(found) > 2000
    assert [outline.area for outline in found.outlines] == found.pixels.tolist()
