"""Augmentation follows from its generator, moves mask and image together, mixes no classes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.annotations.object_colours import colours, near_numbers, rows_of_cells
from pathoseg.errors import PathosegError
from pathoseg.tiles.tile_options import AugmentOptions
from pathoseg.tiles.transform import Around, Augmentation, object_distance

NOTHING = {
    "flip": False,
    "warp": 0.0,
    "scale": 0.0,
    "rotate": 0.0,
    "shift": 0.0,
    "elastic": 0.0,
    "stain": 0.0,
    "colour": 0.0,
    "blur": 0.0,
    "noise": 0.0,
}
Image = np.ndarray[Any, np.dtype[np.uint8]]


def only(**options: Any) -> Augmentation:
    return Augmentation(AugmentOptions(**{**NOTHING, **options}))


def tile(height: int = 96, width: int = 96) -> tuple[Image, Image]:
    """Discs of class 2 that are dark in the image."""
    y, x = np.mgrid[:height, :width]
    mask = (((x % 32 - 16) ** 2 + (y % 32 - 16) ** 2 < 100) * 2).astype(np.uint8)
    mask[:8, :20] = 1
    image = np.where(mask[..., None] > 0, 60, 220) * np.ones(3)
    return image.astype(np.uint8), mask


def run(augmentation: Augmentation, seed: int, shape: tuple[int, int] = (96, 96)) -> Any:
    image, mask = tile(*shape)
    return augmentation(image, mask, np.random.default_rng(seed))


def test_equal_generators_give_equal_tiles_on_any_thread() -> None:
    augmentation = Augmentation(AugmentOptions(warp=0.7, blur=0.5, noise=0.5))
    alone = [run(augmentation, seed) for seed in range(24)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda seed: run(augmentation, seed), range(24)))
    for (image, mask), (image2, mask2) in zip(alone, together, strict=True):
        assert (image == image2).all()
        assert (mask == mask2).all()
    assert len({image.tobytes() for image, _ in alone}) == 24, "seeds differ"


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_the_layout_in_memory_changes_nothing(seed: int) -> None:
    image, mask = tile(40, 70)
    augmentation = Augmentation(AugmentOptions())
    expected = augmentation(image, mask, np.random.default_rng(seed))
    for lay in (np.asfortranarray, lambda array: array[::-1].copy()[::-1]):
        found = augmentation(lay(image), lay(mask), np.random.default_rng(seed))
        assert all((one == other).all() for one, other in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    height=st.integers(1, 150),
    width=st.integers(1, 150),
)
def test_shapes_stay_and_masks_hold_only_what_they_held(seed: int, height: int, width: int) -> None:
    image, mask = run(Augmentation(AugmentOptions(warp=1.0)), seed, (height, width))
    assert image.shape == (height, width, 3)
    assert image.dtype == mask.dtype == np.uint8
    assert mask.shape == (height, width)
    assert set(np.unique(mask)) <= {0, 1, 2, 255}


def test_nothing_changes_nothing() -> None:
    image, mask = tile()
    for augmentation in (only(), only(warp=1.0)):
        found, labels = augmentation(image, mask, np.random.default_rng(0))
        assert (found == image).all()
        assert (labels == mask).all()


def test_all_eight_flips_come_and_keep_image_and_mask_together() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    seen = set()
    for _ in range(200):
        found, mask = only(flip=True)(image, image[..., 0], rng)
        assert (found[..., 0] == mask).all()
        seen.add(mask.tobytes())
    turns = [np.rot90(image[..., 0], turn) for turn in range(4)]
    assert seen == {flip.tobytes() for turn in turns for flip in (turn, turn[:, ::-1])}


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"rotate": 90.0}, {"shift": 0.2}, {"elastic": 5.0}],
    ids=lambda options: next(iter(options)),
)
def test_a_warp_moves_image_and_mask_together(options: dict[str, float]) -> None:
    moved = [run(only(warp=1.0, **options), seed) for seed in range(10)]
    assert len({mask.tobytes() for _, mask in moved}) >= 8
    for image, mask in moved:
        dark = image[..., 0] < 140
        inside = mask != 255
        assert (dark == (mask > 0))[inside].mean() > 0.985
        assert inside.mean() > 0.5


def test_what_a_shift_uncovers_is_ignored() -> None:
    rng = np.random.default_rng(3)
    image, mask = tile(100, 100)
    _, moved = only(warp=1.0, shift=0.5)(image, mask, rng)
    uncovered = moved == 255
    assert uncovered.any()
    rows, columns = np.flatnonzero(~uncovered.all(axis=1)), np.flatnonzero(~uncovered.all(axis=0))
    assert not uncovered[np.ix_(rows, columns)].any(), "a straight border"


@pytest.mark.parametrize("name", ["stain", "colour", "blur", "noise"])
def test_light_leaves_the_mask_alone(name: str) -> None:
    image, mask = tile()
    found, labels = only(**{name: 0.2 if name in ("stain", "colour") else 1.0})(
        image, mask, np.random.default_rng(1)
    )
    assert (labels == mask).all()
    assert (found != image).mean() > 0.1
    assert np.abs(found.astype(int) - image).mean() < 60


def test_a_tile_is_not_changed_in_place() -> None:
    image, mask = tile()
    kept = image.copy(), mask.copy()
    for seed in range(8):
        Augmentation(AugmentOptions(blur=1.0, noise=1.0))(image, mask, np.random.default_rng(seed))
    assert (image == kept[0]).all()
    assert (mask == kept[1]).all()


@pytest.mark.parametrize("options", [{"warp": 1.5}, {"scale": -0.1}, {"colour": float("nan")}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(PathosegError, match=rf"\[augment\] {next(iter(options))}"):
        AugmentOptions(**options)  # type: ignore[arg-type]  # flip is a bool


@pytest.mark.process
def test_albumentations_is_imported_when_it_is_used() -> None:
    code = "import sys, pathoseg.tiles.transform; assert 'albumentations' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_context_moves_and_colours_as_its_tile(seed: int) -> None:
    y, x = np.mgrid[:256, :256] / 256
    wide = np.stack([60 + 120 * x, 60 + 120 * y, 90 + 60 * x * y], axis=-1)
    fine = cv2.resize(wide, (512, 512))[128:384, 128:384]  # the tile: twice as fine, the middle
    image, context = (np.rint(each).astype(np.uint8) for each in (fine, wide))
    mask = np.zeros(image.shape[:2], np.uint8)
    augmentation = Augmentation(AugmentOptions(warp=1.0, noise=0.0, blur=0.0, colour=0.0))
    alone = augmentation(image, mask, np.random.default_rng(seed))
    stripes = (np.arange(256) // 32 % 2).astype(np.uint8)
    tile_mask = np.repeat(stripes, 2)[128:384] * np.ones((256, 1), np.uint8)
    found, labels, around = augmentation.together(
        image,
        np.stack([mask, tile_mask], axis=-1),
        {"wide": Around(context, 2, stripes * np.ones((256, 1), np.uint8))},
        np.random.default_rng(seed),
    )
    moved, labels = labels[..., 1], labels[..., 0]
    assert (found == alone[0]).all()
    assert (labels == alone[1]).all()
    theirs = cv2.resize(found, (128, 128), interpolation=cv2.INTER_AREA).astype(int)
    wide = around["wide"]
    assert wide.mask is not None
    ours = wide.image[64:192, 64:192]
    inside = cv2.resize(labels, (128, 128), interpolation=cv2.INTER_AREA) == 0  # not mirrored
    assert np.abs(ours - theirs)[inside].max() <= 3
    # Classes of the context are those of the tile, but beside their edges.
    same = wide.mask[64:192, 64:192] == moved[::2, ::2]
    assert same[inside].mean() > 0.9


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    side=st.sampled_from([64, 150, 256]),
    scale=st.sampled_from([0.0, 0.1, 0.5, 0.8]),
    elastic=st.sampled_from([0.0, 6.0, 12.0]),
    warp=st.sampled_from([0.0, 1.0]),
)
def test_objects_of_one_colour_never_touch_and_the_class_plane_is_as_without(
    seed: int, side: int, scale: float, elastic: float, warp: float
) -> None:
    """Squares of 3 to 6 px, a pixel or more apart, coloured for the distance of the options."""
    rng = np.random.default_rng(seed)
    numbers = np.zeros((side, side), np.uint8)
    for number in range(1, 254):
        y, x = rng.integers(0, side - 6, 2)
        size = rng.integers(3, 6)
        if not numbers[y : y + size, x : x + size].any():
            numbers[y : y + size, x : x + size] = number
    options = AugmentOptions(warp=warp, scale=scale, elastic=elastic, blur=0.0, noise=0.0)
    distance = object_distance(options, side)
    rows = rows_of_cells(distance)
    bands = (numbers[top : top + rows] for top in range(0, side, rows))
    boxes = np.zeros((256, 4), np.int64)
    for number in range(1, 254):
        y, x = np.nonzero(numbers == number)
        if len(y):
            boxes[number] = x.min(), y.min(), x.max() + 1, y.max() + 1
    pairs = near_numbers(bands, boxes, distance)
    colour = np.append(0, colours(254, pairs, Path("x"))[1:]).astype(np.uint8)
    mask = (numbers > 0).astype(np.uint8)
    image = rng.integers(0, 256, (side, side, 3), np.uint8)
    planes = np.stack([mask, colour[numbers], numbers], axis=-1)
    augmentation = Augmentation(options)
    alone = augmentation(image, mask, np.random.default_rng(seed))
    found, planes, _ = augmentation.together(image, planes, {}, np.random.default_rng(seed))
    assert (found == alone[0]).all()
    assert (planes[..., 0] == alone[1]).all()
    mask, painted, number = np.moveaxis(planes, -1, 0)
    assert ((painted == 255) == (mask == 255)).all()
    assert ((painted > 0) == (mask > 0)).all()
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        here = (slice(0, side - down), slice(max(0, -right), side - max(0, right)))
        there = (slice(down, side), slice(max(0, right), side + min(0, right)))
        one = (painted[here] == painted[there]) & (painted[here] > 0) & (painted[here] < 255)
        assert (number[here] == number[there])[one].all()
