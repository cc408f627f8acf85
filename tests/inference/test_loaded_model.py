"""A picture in memory is predicted as the same picture in a file is segmented."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

import pathoseg
from pathoseg.models.model_options import ModelConfig, Task

RNG = np.random.default_rng(5)


def _picture(height: int, width: int) -> np.ndarray:
    small = RNG.integers(40, 220, (height // 8 + 1, width // 8 + 1, 3)).astype(np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("shape", [(150, 210), (40, 33)])
def test_a_picture_is_predicted_as_its_file_is_segmented(
    shape: tuple[int, int], tmp_path: Path, tiny_bundle: Callable[..., Path]
) -> None:
    picture = _picture(*shape)
    Image.fromarray(picture).save(tmp_path / "a.png")
    options = {"data": {"assume_mpp": 0.5}, "tissue": {"method": "all"}}
    out = pathoseg.infer(tmp_path / "a.png", tiny_bundle(), out=tmp_path / "out", options=options)
    mask = tifffile.imread(out / "a" / "mask.ome.tiff", level=0)
    model = pathoseg.load_model(tmp_path / "model")
    found = model.predict(picture, mpp=0.5)
    np.testing.assert_array_equal(found.classes, mask)
    assert found.probabilities.shape == (3, *shape)
    assert found.objects is None
    np.testing.assert_array_equal(found.probabilities.argmax(0), found.classes)


@pytest.mark.parametrize("task", ["segment", "objects"])
def test_a_finer_picture_keeps_its_own_pixels(task: Task, tiny_bundle: Callable[..., Path]) -> None:
    picture = _picture(96, 128)
    network = ModelConfig("unet", task, 3, width=4, depth=2)
    model = pathoseg.load_model(tiny_bundle(network=network))
    coarse = model.predict(picture, mpp=0.5)
    fine = model.predict(picture.repeat(2, axis=0).repeat(2, axis=1), mpp=0.25)
    for one, other in zip(coarse.probabilities, fine.probabilities, strict=True):
        np.testing.assert_array_equal(cv2.resize(one, (256, 192)), other)


def test_objects_are_those_that_infer_writes(
    tmp_path: Path, tiny_bundle: Callable[..., Path]
) -> None:
    picture = np.full((220, 180, 3), (225, 190, 205), np.uint8)
    for at, (x, y) in enumerate(RNG.integers(0, 180, (60, 2)).tolist()):
        cv2.circle(picture, (x, y), 4 + at % 4, [(70, 50, 60), (60, 40, 130)][at % 2], -1)
    Image.fromarray(picture).save(tmp_path / "a.png")
    factory = "tests.workflows.test_evaluate_objects:make_blobs"
    bundle = tiny_bundle(network=ModelConfig(factory, "objects", 3), tile=64, overlap=32)
    options = {"data": {"assume_mpp": 0.5}, "tissue": {"method": "all"}}
    out = pathoseg.infer(
        tmp_path / "a.png", bundle, out=tmp_path / "out", factory=factory, options=options
    )
    with (out / "a" / "objects.csv").open() as file:
        written = [(row["class"], float(row["Area µm^2"])) for row in csv.DictReader(file)]
    model = pathoseg.load_model(bundle, factory=factory)
    found = model.predict(picture, mpp=0.5)
    assert found.objects is not None
    assert found.object_classes is not None
    areas = np.bincount(found.objects.ravel())[1:] * 0.25
    names = [model.classes[index] for index in found.object_classes]
    assert len(set(names)) == 2
    assert sorted(zip(names, areas.tolist(), strict=True)) == sorted(written)
    assert found.probabilities.shape == (3, 220, 180)
    finer = model.predict(picture.repeat(2, axis=0).repeat(2, axis=1), mpp=0.25)
    assert finer.objects is not None
    np.testing.assert_array_equal(finer.objects, found.objects.repeat(2, 0).repeat(2, 1))


def test_what_the_model_sees_lies_where_it_is_in_the_picture(
    tiny_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a side of 101 px, whose last pixel fills a quarter of the model's last pixel."""
    model = pathoseg.load_model(tiny_bundle())
    ramp = np.tile(np.arange(26, dtype=np.float32), (3, 26, 1))
    monkeypatch.setattr(model._segmenter, "maps", lambda _: ramp)
    found = model.predict(_picture(101, 101), mpp=0.125).probabilities
    assert found.shape == (3, 101, 101)
    expected = np.clip((np.arange(101) + 0.5) / 4 - 0.5, 0, 25)
    np.testing.assert_allclose(found[1, 50], expected, atol=1e-4)


def test_a_classifier_answers_by_tile(tiny_bundle: Callable[..., Path]) -> None:
    network = ModelConfig("resnet11_v2", "classify", 3, width=4)
    model = pathoseg.load_model(tiny_bundle(network=network, overlap=0))
    found = model.predict(_picture(130, 70), mpp=0.5)
    assert found.probabilities.shape == (3, 3, 2)
    np.testing.assert_allclose(found.probabilities.sum(0), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("picture", "mpp", "said"),
    [
        (np.zeros((8, 8), np.uint8), 0.5, "RGB pixels"),
        (np.zeros((8, 8, 3), np.float32), 0.5, "float32"),
        (np.zeros((0, 8, 3), np.uint8), 0.5, "RGB pixels"),
        (Image.new("RGB", (8, 8)), 0.5, "not Image"),
        (np.zeros((8, 8, 3), np.uint8), 0.0, "mpp = 0"),
        (np.zeros((8, 8, 3), np.uint8), "0.5", "mpp = '0.5'"),
        (np.zeros((8, 8, 3), np.uint8), None, "mpp = None"),
        (np.zeros((8, 8, 3), np.uint8), 1.5, "coarser|more than twice"),
    ],
)
def test_what_is_no_picture_is_refused(
    picture: Any, mpp: Any, said: str, tiny_bundle: Callable[..., Path]
) -> None:
    model = pathoseg.load_model(tiny_bundle())
    with pytest.raises(pathoseg.PathosegError, match=said):
        model.predict(picture, mpp)


def test_no_slide_is_nothing_to_segment(tmp_path: Path, tiny_bundle: Callable[..., Path]) -> None:
    with pytest.raises(pathoseg.PathosegError, match="There is nothing to segment"):
        pathoseg.infer([], tiny_bundle(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
