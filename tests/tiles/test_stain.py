"""Stains move to the reference, in one affine map of logarithms that numpy can follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.stain import (
    _AXES,
    _CONES,
    _DEVIATIONS,
    _MEANS,
    _STAINS,
    Method,
    StainNormaliser,
    fit_stain,
    jitter_stains,
    sample_pixels,
    stain_densities,
)
from pathoseg.tiles.tissue import TissueOptions, find_tissue

METHODS: tuple[Method, ...] = ("macenko", "reinhard")


def stained(stains: Any, strengths: Any, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An image of two stains (columns: optical density of RGB) and a corner of glass."""
    rng = np.random.default_rng(seed)
    amounts = rng.beta(0.5, 0.7, (200, 200, 2)) * strengths
    density = amounts @ np.asarray(stains).T
    density[:40, :40] = 0
    return np.clip(np.rint(256 * np.exp(-density) - 1), 0, 255).astype(np.uint8)


def densities(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return -np.log((image.reshape(-1, 3).astype(float) + 1) / 256)


@given(
    values=st.lists(st.integers(0, 255), min_size=3, max_size=30),
    numbers=st.lists(st.floats(-0.4, 0.4), min_size=12, max_size=12),
    cones=st.booleans(),
)
def test_a_normaliser_does_what_numpy_does(
    values: list[int], numbers: list[float], cones: bool
) -> None:
    image = np.resize(np.array(values, np.uint8), (2, 5, 3))
    affine = np.eye(3, 4) + np.reshape(numbers, (3, 4))
    basis = _CONES if cones else np.eye(3)
    logs = np.log((image.astype(float) + 1) / 256 @ basis.T)
    light = np.exp(logs @ affine[:, :3].T + affine[:, 3]) @ np.linalg.inv(basis).T
    expected = np.clip(256 * light - 1, 0, 255)
    found = StainNormaliser(affine, basis).apply(image)
    assert found.dtype == np.uint8
    assert np.abs(found - expected).max() < 0.51


def test_macenko_brings_other_stains_together() -> None:
    purple = [[0.60, 0.10], [0.70, 0.90], [0.35, 0.20]]
    blue = [[0.70, 0.15], [0.55, 0.80], [0.20, 0.45]]
    assert come_closer("macenko", stained(purple, [1.6, 0.9]), stained(blue, [1.1, 1.3])) < 1 / 3


def test_reinhard_brings_other_exposures_together() -> None:
    first = stained([[0.6, 0.2], [0.7, 0.8], [0.4, 0.5]], [1.0, 0.6])[50:]
    first = np.minimum(first, 200)  # no glass, so that of both images all pixels count
    darker = np.column_stack([1.3 * np.eye(3), [-0.1, -0.1, -0.1]])
    assert come_closer("reinhard", first, StainNormaliser(darker, _CONES).apply(first)) < 1 / 10


def come_closer(method: Method, *images: np.ndarray[Any, np.dtype[np.uint8]]) -> float:
    """Return the mean absolute difference of two images after normalisation over that before.

    Args:
        method: Of the normaliser, which is fitted to each image.
        images: Two of one tissue, RGB, of one shape (height, width, 3).
    """
    before = np.subtract(*[image.astype(float) for image in images])
    moved = [normalised(image, method).astype(float) for image in images]
    return float(np.abs(np.subtract(*moved)).mean() / np.abs(before).mean())


def normalised(
    image: np.ndarray[Any, np.dtype[np.uint8]], method: Method
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return StainNormaliser.fit(image, method, Path("a.svs")).apply(image)


def test_macenko_finds_the_stains_that_were_mixed() -> None:
    image = stained(_STAINS, [1.9, 1.0])
    found = normalised(image, "macenko")
    assert np.abs(found.astype(int) - image).mean() < 6, "an image like the reference stays"
    assert (found[:40, :40] == 255).all(), "glass stays white"


def test_reinhard_gives_the_reference_mean_and_deviation() -> None:
    image = stained([[0.6, 0.2], [0.7, 0.8], [0.4, 0.5]], [1.0, 0.6])[50:]
    found = normalised(image, "reinhard")
    kept = (densities(image) > 0.15).all(axis=1)
    logs = np.log(np.exp(-densities(found)[kept]) @ _CONES.T)
    axes = logs @ _AXES.T
    assert axes.mean(axis=0) == pytest.approx(_MEANS, abs=0.05)
    assert axes.std(axis=0) == pytest.approx(_DEVIATIONS, abs=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_real_tissue_stays_tissue(method: Method, shared_data: Path) -> None:
    paths = sorted((shared_data / "monuseg-train" / "images").glob("*.tif"))[:6]
    images = [np.asarray(Image.open(path).convert("RGB"))[::2, ::2] for path in paths]
    moved = [normalised(image, method) for image in images]
    before = np.std([image.mean(axis=(0, 1)) for image in images], axis=0)
    after = np.std([image.mean(axis=(0, 1)) for image in moved], axis=0)
    assert (after < before * 0.75).all(), "the slides' colours come closer"
    assert all(image.std() > 20 for image in moved)


@pytest.mark.parametrize("method", METHODS)
def test_slides_without_tissue_are_refused(method: Method) -> None:
    glass = np.full((100, 100, 3), 250, np.uint8)
    flat = np.full((100, 100, 3), 120, np.uint8)
    for image in (glass, flat):
        with pytest.raises(PathosegError, match=r"bare\.svs has too little stained tissue"):
            StainNormaliser.fit(image, method, Path("bare.svs"))


@pytest.mark.parametrize("method", METHODS)
def test_a_small_biopsy_is_fitted_by_all_its_pixels(method: Method, tmp_path: Path) -> None:
    """Fit 10,000 stained pixels, of which one in sixteen is too few."""
    image = np.full((400, 400, 3), 250, np.uint8)
    tissue_pixels = stained([[0.6, 0.2], [0.7, 0.8], [0.4, 0.5]], [1.0, 0.6])
    image[100:200, 100:200] = tissue_pixels[60:160, 60:160]
    Image.fromarray(image).save(tmp_path / "small.png")
    with open_slide(tmp_path / "small.png", assume_mpp=0.5) as slide:
        frame = Frame.at(slide.size, slide.mpp, 0.5)
        whole = [Box(0, 0, 400, 400)]
        tissue = find_tissue(slide, TissueOptions(method="all"))
        found = fit_stain(slide, frame, whole, tissue, method)
    expected = StainNormaliser.fit(image, method, tmp_path)
    assert np.array_equal(found.affine, expected.affine)


def test_pixels_are_sampled_from_all_over_the_slide(make_bench: Any) -> None:
    bench = make_bench()
    frame = Frame.at(Size(300, 200), Mpp(0.5, 0.5), 0.5)
    boxes = [Box(10 * x, 20, 10, 10) for x in range(30)]
    with bench.open(bench.path) as slide:
        found = sample_pixels(slide, frame, boxes)
        assert found.shape == (16 * -(-100 // 16), 3)
        assert (found[0] == bench.pixels[20, 0]).all()
        assert (found[-7] == bench.pixels[20, 290]).all()
    bench.broken = Box(0, 0, 300, 200)
    with bench.open(bench.path) as slide:
        assert sample_pixels(slide, frame, boxes).shape == (0, 3)


def test_jitter_scales_and_shifts_the_three_stains() -> None:
    image = stained([[0.6, 0.2], [0.7, 0.8], [0.4, 0.5]], [1.0, 0.6])
    assert (jitter_stains(image, 0.0, np.random.default_rng(0)) == image).all()
    hed = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
    hed /= np.linalg.norm(hed, axis=1, keepdims=True)
    rng = np.random.default_rng(5)
    factors, offsets = 1 + 0.2 * rng.uniform(-1, 1, 3), 0.2 * rng.uniform(-1, 1, 3)
    amounts = densities(image) @ np.linalg.inv(hed) * factors + offsets
    expected = np.clip(256 * np.exp(-amounts @ hed) - 1, 0, 255).reshape(image.shape)
    found = jitter_stains(image, 0.2, np.random.default_rng(5))
    assert np.abs(found - expected).max() < 0.51


def test_an_image_of_several_strips_is_changed_row_by_row() -> None:
    image = np.random.default_rng(0).integers(0, 256, (75, 1000, 3), dtype=np.uint8)

    def jittered(pixels: Any, out: Any = None) -> Any:
        return jitter_stains(pixels, 0.2, np.random.default_rng(1), out)

    rows = np.concatenate([jittered(row[None]) for row in image])
    assert (jittered(image) == rows).all()
    jittered(image, out=image)
    assert (image == rows).all()


@given(st.floats(0, 1.2), st.floats(0, 1.2))
def test_densities_are_those_that_were_laid_on(hematoxylin: float, eosin: float) -> None:
    """Colours as Ruifrok and Johnston give them, laid on white by Lambert and Beer's law."""
    dyes = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]])
    dyes /= np.linalg.norm(dyes, axis=1, keepdims=True)
    light = 255 * 10 ** -(np.array([hematoxylin, eosin]) @ dyes)
    found = stain_densities(np.round(light).astype(np.uint8)[None])
    np.testing.assert_allclose(found, [[hematoxylin, eosin]], atol=0.03 + 1 / light.min())
