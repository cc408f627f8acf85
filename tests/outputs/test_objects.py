"""Objects: basins as a slow walk finds them, wherever bands and blocks begin."""

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


def _slowly(height: NDArray[np.int16], depth: int) -> dict[Pixel, Pixel]:
    """Each pixel's peak, pixel by pixel and basin by basin."""

    def key(pixel: Pixel) -> tuple[int, Pixel]:
        return int(height[pixel]), pixel

    inside = [(int(y), int(x)) for y, x in zip(*np.nonzero(height >= 0), strict=True)]
    peaks = {}
    for pixel in inside:
        at = pixel
        while (best := max([at, *_around(at, height)], key=key)) != at:
            at = best
        peaks[pixel] = at
    joins = {}
    for peak in set(peaks.values()):
        saddles = [
            (min(key(one)[0], key(other)[0]), key(peaks[other]))
            for one in inside
            if peaks[one] == peak
            for other in _around(one, height)
            if key(peaks[other]) > key(peak)
        ]
        if saddles:
            saddle, (_, higher) = max(saddles)
            if height[peak] - saddle < depth:
                joins[peak] = higher

    def end(peak: Pixel) -> Pixel:
        return end(joins[peak]) if peak in joins else peak

    return {pixel: end(peak) for pixel, peak in peaks.items()}


@given(HEIGHTS, st.integers(0, 4))
def test_basins_are_those_of_a_slow_walk(height: NDArray[np.int16], depth: int) -> None:
    found = separate(height, depth)
    expected = _slowly(height, depth)
    assert sorted(set(expected.values())) == sorted(map(tuple, found.peaks.tolist()))
    for pixel in np.ndindex(height.shape):
        label = found.labels[pixel]
        assert (label > 0) == (pixel in expected)
        if label:
            assert tuple(found.peaks[label - 1]) == expected[pixel]


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
    assert part.box.y > 0
    assert part.pixels[0] == 20 * (390 - part.box.y)
