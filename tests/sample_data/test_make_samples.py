"""The generator repeats itself, is what wrote the committed slides, and pastes mosaics exactly."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from shapely import hausdorff_distance
from shapely.geometry import shape

pytestmark = pytest.mark.usefixtures("generator")


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    make_samples = importlib.import_module("make_samples")
    small = dataclasses.replace(make_samples.SAMPLES[0], width=1200, height=1000)
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        make_samples.write_sample(small, 7, folder)
        written.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert len(written[0]) == 2
    assert written[0] == written[1]


def test_the_committed_slides_come_from_the_generator(tmp_path: Path, sample_data: Path) -> None:
    make_samples = importlib.import_module("make_samples")
    number = 5  # the smallest
    sample = make_samples.SAMPLES[number - 1]
    make_samples.write_sample(sample, number, tmp_path)
    outlines, images = [], []
    for folder in (sample_data, tmp_path):
        features = json.loads((folder / f"{sample.name}.geojson").read_text())["features"]
        outlines.append([shape(feature["geometry"]) for feature in features])
        with openslide.OpenSlide(folder / f"{sample.name}.svs") as slide:
            region = slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")
        images.append(np.asarray(region, np.int16))
    # Other releases of GEOS and libjpeg may round differently.
    for ours, theirs in zip(*outlines, strict=True):
        assert hausdorff_distance(ours, theirs) < 1
    assert np.abs(images[0] - images[1]).mean() < 1


def test_a_mosaic_is_one_pyramid_with_its_exact_mask(tmp_path: Path) -> None:
    mosaic = importlib.import_module("mosaic")
    side = 2 * mosaic.CELL + 300
    path = tmp_path / "large.svs"
    mosaic.write_mosaic(path, side, cores=1)
    mask = tifffile.imread(tmp_path / "large_mask.tif")
    assert mask.shape == (side, side)
    assert set(np.unique(mask)) == {0, 1, 2}

    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        assert slide.level_dimensions == tuple((side // f, side // f) for f in (1, 4, 16, 64))
        levels = [
            np.asarray(slide.read_region((0, 0), level, size).convert("L"), float)
            for level, size in enumerate(slide.level_dimensions)
        ]
    for level, factor in ((1, 4), (2, 16), (3, 64)):
        n = side // factor
        means = levels[0][: n * factor, : n * factor].reshape(n, factor, n, factor).mean((1, 3))
        alike = np.corrcoef(levels[level].ravel(), means.ravel())[0, 1]
        assert alike > 0.98, "every level shows the same mosaic"
    assert (levels[0][mask > 0] < 225).mean() > 0.98, "labels lie on tissue"
