"""The generator repeats itself, is what wrote the committed slides, and pastes mosaics exactly."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from shapely import MultiPoint, dwithin, hausdorff_distance, union_all
from shapely.geometry import shape

from pathoseg.errors import PathosegError

pytestmark = [pytest.mark.usefixtures("generator"), pytest.mark.slow]


@pytest.fixture
def sparse(generator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenes count as full after a tenth of the throws: most of their time, for the last glands."""
    monkeypatch.setattr(importlib.import_module("scene"), "ATTEMPTS", 1000)


@pytest.mark.usefixtures("sparse")
def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    make_samples = importlib.import_module("make_samples")
    small = dataclasses.replace(make_samples.SAMPLES[0], width=1600, height=1400)
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        make_samples.write_sample(small, 7, folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        written.append([path.read_bytes() for path in files])
    assert len(written[0]) == 3
    assert written[0] == written[1]


def test_the_committed_slides_come_from_the_generator(tmp_path: Path, sample_data: Path) -> None:
    make_samples = importlib.import_module("make_samples")
    number = 5  # the smallest
    sample = make_samples.SAMPLES[number - 1]
    make_samples.write_sample(sample, number, tmp_path)
    outlines, images = [], []
    for folder in (sample_data, tmp_path):
        files = [place / f"{sample.name}.geojson" for place in (folder, folder / "nuclei")]
        features = [each for file in files for each in json.loads(file.read_text())["features"]]
        outlines.append([shape(feature["geometry"]) for feature in features])
        with openslide.OpenSlide(folder / f"{sample.name}.svs") as slide:
            region = slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")
        images.append(np.asarray(region, np.int16))
    # Other releases of GEOS and libjpeg may round differently.
    for ours, theirs in zip(*outlines, strict=True):
        assert hausdorff_distance(ours, theirs) < 1
    assert np.abs(images[0] - images[1]).mean() < 1


@pytest.fixture
def mosaic(sparse: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with cells of a quarter of their size."""
    mosaic, cells = importlib.import_module("mosaic"), importlib.import_module("cells")
    for module in (mosaic, cells):
        monkeypatch.setattr(module, "CELL", 2048)
    monkeypatch.setattr(cells, "_PAINTED", 1024)
    return mosaic


def test_a_mosaic_is_one_pyramid_with_its_exact_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mosaic: ModuleType
) -> None:
    monkeypatch.setattr(mosaic, "TISSUE", 0.6)  # in all four cells
    side = mosaic.CELL + 300
    path = tmp_path / "large.svs"
    mosaic.write_mosaic(path, side, painted=1)
    with tifffile.TiffFile(tmp_path / "large_mask.tif") as tiff:
        mask, *coarser = [page.asarray() for page in tiff.pages]
    assert mask.shape == (side, side)
    assert set(np.unique(mask)) == {0, 1, 2}
    for pixels, factor in zip(coarser, (4, 16, 64), strict=True):
        n = side // factor
        np.testing.assert_array_equal(pixels, mask[::factor, ::factor][:n, :n])

    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        assert float(slide.properties["openslide.mpp-x"]) == 0.25
        assert slide.level_dimensions == tuple((side // f, side // f) for f in (1, 4, 16, 64))
        levels = [
            np.asarray(slide.read_region((0, 0), level, size).convert("L"), np.float32)
            for level, size in enumerate(slide.level_dimensions)
        ]
    for level, factor in ((1, 4), (2, 16), (3, 64)):
        n = side // factor
        means = levels[0][: n * factor, : n * factor].reshape(n, factor, n, factor).mean((1, 3))
        alike = np.corrcoef(levels[level].ravel(), means.ravel())[0, 1]
        assert alike > 0.98, "every level shows the same mosaic"
    assert (levels[0][mask > 0] < 225).mean() > 0.98, "labels lie on tissue"


def test_real_tiles_fill_the_tissue_of_a_mosaic(tmp_path: Path, mosaic: ModuleType) -> None:
    """Two tiles: one red with class 1 below a diagonal, one blue with 2 and ignored pixels."""
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    y, x = np.mgrid[:208, :304]
    colours = {"a": (200, 60, 60), "b": (60, 60, 200)}
    truths = {"a": (x > y).astype(np.uint8), "b": np.where(x > 100, 2, 255).astype(np.uint8)}
    for name, truth in truths.items():
        Image.new("RGB", (304, 208), colours[name]).save(tiles / f"{name}.png")
        Image.fromarray(truth).save(tiles / f"{name}_mask.png")

    cell = mosaic.CELL
    side = 2 * cell
    path = tmp_path / "large.svs"
    mosaic.write_mosaic(path, side, tiles)
    mask = tifffile.imread(tmp_path / "large_mask.tif", key=0)
    with openslide.OpenSlide(path) as slide:
        middles = {
            (top, left): slide.read_region((left + 1000, top + 1000), 0, (1, 1)).getpixel((0, 0))
            for top in (0, cell)
            for left in (0, cell)
        }
    assert (side, side) == mask.shape
    seen = []
    for (top, left), (red, _, blue, _) in middles.items():
        found = mask[top : top + cell, left : left + cell]
        if red == blue + 2:  # glass
            assert not found.any()
            continue
        name = "a" if red > blue else "b"
        seen.append(name)
        np.testing.assert_array_equal(found[:208, :304], truths[name])
        np.testing.assert_array_equal(found[208:416, 304:608], truths[name][::-1, ::-1])
    assert len(seen) == 1, "a fifth of four cells"


def test_a_folder_without_annotations_is_refused(tmp_path: Path) -> None:
    cells = importlib.import_module("cells")
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    with pytest.raises(PathosegError, match="has an annotation"):
        cells.real_cells(tmp_path)


@pytest.mark.usefixtures("sparse")
def test_what_tells_a_glands_class_is_far_from_it_and_that_of_its_own_hub() -> None:
    scene_file = importlib.import_module("scene")
    rng = np.random.default_rng(0)
    scene = scene_file.make_hub_scene(("inflamed", "resting"), 5120, 3072, rng)
    infiltrate = MultiPoint(scene.nuclei[scene.kinds == 1, :2])
    glands = [region.geometry for region in scene.regions]
    vessels = union_all([hole for hole in scene.clearings if not dwithin(glands, hole, 0).any()])
    counts = Counter(region.class_name for region in scene.regions)
    assert min(counts["inflamed"], counts["resting"]) >= 3
    for region in scene.regions:
        away = [region.geometry.distance(cue) * 0.5 for cue in (infiltrate, vessels)]
        assert min(away) > 240  # µm
        assert (away[0] < away[1]) == (region.class_name == "inflamed")
