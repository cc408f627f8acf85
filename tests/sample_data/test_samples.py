"""The sample slides are what they claim: Aperio pyramids, exact outlines, classes beyond colour."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray
from PIL import Image
from rasterio.features import rasterize
from shapely import STRtree, box
from shapely.affinity import translate
from shapely.geometry import shape
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import balanced_accuracy_score

pytestmark = pytest.mark.slow  # many seconds in all

NAMES = [f"sample_0{number}" for number in range(1, 7)]
INDEX = {"gland": 1, "tumour": 2}


def _features(sample_data: Path, name: str) -> list[dict]:
    collection = json.loads((sample_data / f"{name}.geojson").read_text())
    assert collection["type"] == "FeatureCollection"
    return collection["features"]


def _image(path: Path) -> NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))


def _mask(sample_data: Path, name: str, size: tuple[int, ...]) -> NDArray[np.uint8]:
    shapes = [
        (shape(feature["geometry"]), INDEX[feature["properties"]["classification"]["name"]])
        for feature in _features(sample_data, name)
    ]
    return rasterize(shapes, out_shape=size, dtype=np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_openslide_sees_an_aperio_pyramid(sample_data: Path, name: str) -> None:
    path = sample_data / f"{name}.svs"
    assert path.stat().st_size < 2_000_000
    with openslide.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        assert float(slide.properties["openslide.mpp-x"]) == 0.5
        assert slide.properties["openslide.objective-power"] == "20"
        assert slide.level_downsamples == pytest.approx((1, 4, 16), rel=0.01)
        assert {"thumbnail", "label", "macro"} <= set(slide.associated_images)
        thumbnail = slide.associated_images["thumbnail"].convert("RGB")
        whole = slide.get_thumbnail(thumbnail.size).resize(thumbnail.size)
    difference = np.abs(np.asarray(thumbnail, float) - np.asarray(whole, float))
    assert difference.mean() < 4, "the thumbnail shows the slide, in its colours"


@pytest.mark.parametrize("name", NAMES)
def test_outlines_are_valid_disjoint_and_of_every_form(sample_data: Path, name: str) -> None:
    features = _features(sample_data, name)
    regions = [shape(feature["geometry"]) for feature in features]
    with openslide.OpenSlide(sample_data / f"{name}.svs") as slide:
        extent = box(0, 0, *slide.dimensions)
    assert all(region.is_valid and extent.contains(region) for region in regions)
    assert {region.geom_type for region in regions} == {"Polygon", "MultiPolygon"}
    first, second = STRtree(regions).query(regions, predicate="intersects")
    assert (first == second).all(), "no two regions touch"

    holes = dict.fromkeys(INDEX, 0)
    for feature, region in zip(features, regions, strict=True):
        classification = feature["properties"]["classification"]
        assert len(classification["color"]) == 3
        if region.geom_type == "Polygon":
            holes[classification["name"]] += len(region.interiors)
    assert all(holes.values())


def test_no_patient_is_in_two_splits(sample_data: Path) -> None:
    with (sample_data / "slides.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["slide"] for row in rows) == [f"{name}.svs" for name in NAMES]
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    of_patient = {(row["patient"], row["split"]) for row in rows}
    assert len(of_patient) == len({row["patient"] for row in rows})


@pytest.mark.parametrize("name", NAMES)
def test_outlines_lie_on_what_was_painted(sample_data: Path, name: str) -> None:
    """Lumina are glass and the wall around them is not, up to two pixels from the outline."""
    image = _image(sample_data / f"{name}.svs")
    glass = image.min(axis=2) > 215
    lumina, walls = [], []
    for feature in _features(sample_data, name):
        region = shape(feature["geometry"])
        if feature["properties"]["classification"]["name"] == "gland":
            lumina.append(shape({"type": "Polygon", "coordinates": [region.interiors[0].coords]}))
            walls.append(region.buffer(-3))
    inside = rasterize([lumen.buffer(-4) for lumen in lumina], out_shape=glass.shape) > 0
    wall = rasterize(walls, out_shape=glass.shape) > 0
    assert glass[inside].mean() > 0.98
    assert glass[wall].mean() < 0.02


@pytest.mark.parametrize("factor", [1, 4])
def test_colour_alone_does_not_tell_the_classes_apart(sample_data: Path, factor: int) -> None:
    rng = np.random.default_rng(0)

    def pixels(names: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        colours, classes = [], []
        for name in names:
            image = _image(sample_data / f"{name}.svs")
            mask = _mask(sample_data, name, image.shape[:2])[factor // 2 :: factor]
            mask = mask[:, factor // 2 :: factor]
            image = np.asarray(Image.fromarray(image).reduce(factor))
            image = image[: mask.shape[0], : mask.shape[1]]
            for index in INDEX.values():
                rows, columns = np.nonzero(mask == index)
                chosen = rng.integers(0, len(rows), 5000)
                colours.append(image[rows[chosen], columns[chosen]])
                classes.append(np.full(5000, index))
        return np.concatenate(colours), np.concatenate(classes)

    model = HistGradientBoostingClassifier(max_iter=50).fit(*pixels(NAMES[:4]))
    for names in (NAMES[:4], NAMES[5:]):
        colours, classes = pixels(names)
        assert balanced_accuracy_score(classes, model.predict(colours)) < 0.62


@pytest.mark.parametrize("name", NAMES)
def test_nuclei_are_outlined_where_they_were_painted(sample_data: Path, name: str) -> None:
    """Each is darker than what is around it, and in the square of `Region*` none is missed."""
    collection = json.loads((sample_data / "nuclei" / f"{name}.geojson").read_text())
    (square, *nuclei) = [shape(feature["geometry"]) for feature in collection["features"]]
    kinds = [feature["properties"]["classification"] for feature in collection["features"]]
    assert kinds[0] == "Region*"
    assert {*kinds[1:]} == {"epithelial", "lymphocyte", "fibroblast"}
    assert all(nucleus.is_valid and nucleus.intersects(square) for nucleus in nuclei)
    one, other = STRtree(nuclei).query(nuclei, predicate="intersects")
    assert len({*one[one != other]}) > 0.25 * len(nuclei), "a quarter touch or overlap"
    left, top, right, bottom = map(int, square.bounds)
    red = _image(sample_data / f"{name}.svs")[top:bottom, left:right, 0].astype(float)
    inside = [translate(nucleus, -left, -top) for nucleus in nuclei]

    def painted(grown: float) -> NDArray[np.uint16]:
        numbered = [(each.buffer(grown), at) for at, each in enumerate(inside, start=1)]
        return rasterize(numbered, out_shape=red.shape, dtype=np.uint16)

    core, ring = painted(-1), (painted(1) == 0) & (red < 215)
    area = np.bincount(core.ravel())
    shade = np.bincount(core.ravel(), red.ravel()) / np.maximum(area, 1)
    assert (shade[1:][area[1:] > 20] < np.median(red[ring]) - 15).all()
    dark = red < np.median(red[core > 0])
    assert (dark & ring).sum() < 0.005 * dark.sum(), "none is missed"
