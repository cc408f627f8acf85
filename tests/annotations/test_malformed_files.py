"""Whatever is in a file, reading it as an annotation gives labels or one clear error."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from pathoseg.annotations.annotation import ClassTable, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.reading import read_labels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.models.bundle_identity import read_bundle_file
from pathoseg.training.splits import read_rows

NAMES = ["x.geojson", "x.geojson.gz", "x.json", "x.xml", "x_mask.png", "x_mask.tif"]


def _labels(path: Path, size: Size) -> Labels:
    return read_labels(path, size, (0, 0), AnnotationOptions())


def _read(path: Path, size: Size) -> None:
    """Reads all there is of a file, and lets only errors that name it pass."""
    try:
        labels = _labels(path, size)
        names = tuple(labels.classes())
        frame = Frame.at(size, Mpp(0.25, 0.25), 0.5)
        labels.rasterise(Box(-8, -8, 32, 32), frame, ClassTable(names, ((0, 0, 0),) * len(names)))
    except PathosegError as error:
        refused = error
    else:
        return
    assert str(path) in refused.problem
    assert refused.hint


def _image(kind: str) -> bytes:
    file = io.BytesIO()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 4, (24, 24), dtype=np.uint8)).save(file, kind)
    return file.getvalue()


SOUND = {
    "x.geojson": json.dumps(
        {
            "type": "FeatureCollection",
            "features": [
                {
                    "type": "Feature",
                    "id": "a",
                    "geometry": {
                        "type": "MultiPolygon",
                        "coordinates": [[[[0, 0], [9.5, 0], [9, 9], [0, 0]]]],
                    },
                    "properties": {
                        "objectType": "annotation",
                        "classification": {"name": "a", "color": [1, 2, 3]},
                    },
                }
            ],
        }
    ).encode(),
    "x.xml": b'<?xml version="1.0"?><ASAP_Annotations><Annotations>'
    b'<Annotation Type="Polygon" PartOfGroup="a" Color="#ff0000"><Coordinates>'
    b'<Coordinate Order="0" X="0" Y="0"/><Coordinate Order="1" X="9" Y="0"/>'
    b'<Coordinate Order="2" X="9" Y="9"/></Coordinates></Annotation></Annotations>'
    b'<AnnotationGroups><Group Name="a" PartOfGroup="None"/></AnnotationGroups></ASAP_Annotations>',
    "y.xml": b'<Annotations><Annotation Name="" LineColor="255"><Attributes>'
    b'<Attribute Name="a" Value=""/></Attributes><Regions><Region Type="0" NegativeROA="0">'
    b'<Vertices><Vertex X="0" Y="0"/><Vertex X="9" Y="0"/><Vertex X="9" Y="9"/></Vertices>'
    b"</Region></Regions></Annotation></Annotations>",
    "x_mask.png": _image("PNG"),
    "x_mask.tif": _image("TIFF"),
}


@pytest.mark.parametrize("name", NAMES)
@given(
    content=st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
@example(content=b"[" * 5000)
@example(content=b'{"a":' * 5000)
@example(content=b"\x1f\x8b")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    _read(path, Size(24, 24))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of what it then refuses
@pytest.mark.parametrize("name", SOUND)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sound_files_with_a_fault(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(SOUND[name])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / name
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    _read(path, Size(24, 24))


@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        *["type", "features", "geometry", "geometries", "coordinates", "id"],
                        *["properties", "classification", "name", "names", "color", "colorRGB"],
                    ]
                ),
                inner
                | st.sampled_from(["Feature", "Polygon", "MultiPolygon", "GeometryCollection"]),
                max_size=5,
            )
        ),
        max_leaves=30,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_of_any_shape(tmp_path: Path, document: object) -> None:
    path = tmp_path / "x.geojson"
    path.write_text(json.dumps(document))
    _read(path, Size(24, 24))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_truncated_real_files(shared_data: Path, tmp_path: Path, share: float) -> None:
    real = [*(shared_data / "annotations").iterdir(), shared_data / "slides/monusac_A9K0_1.xml"]
    for source in real:
        whole = source.read_bytes()
        path = tmp_path / source.name
        path.write_bytes(whole[: int(len(whole) * share)])
        _read(path, Size(4542, 4594))


# Pillow warns of damaged directories, and then decodes or refuses.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("suffix", [".xml", ".geojson", ".geojson.gz", "_mask.png", "_mask.tif"])
def test_malformed_images_as_annotations(shared_data: Path, tmp_path: Path, suffix: str) -> None:
    sources = [path for path in (shared_data / "robustness").rglob("*") if path.is_file()]
    assert len(sources) == 157
    for source in sources:
        path = tmp_path / f"x{suffix}"
        shutil.copyfile(source, path)
        size = Size(24, 24)
        if suffix == "_mask.tif":  # of the right size, so that it comes to decoding
            size = _stated_size(path) or size
        _read(path, size)


def _stated_size(path: Path) -> Size | None:
    try:
        with TiffImageFile(path) as image:
            return Size(*image.size) if min(image.size) > 0 else None
    except Exception:  # the point of these files
        return None


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.geojson", lambda path: _labels(path, Size(64, 64))),
        ("a.xml", lambda path: _labels(path, Size(64, 64))),
        ("slides.csv", read_rows),
        ("model.json", read_bundle_file),
    ],
)
def test_a_file_without_permission_is_told_as_that(
    name: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as one of another format, which would be made anew."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).touch()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PathosegError, match=f"{name} cannot be read: permission denied") as told:
        read(tmp_path / name)
    assert told.value.hint == "Check its permissions."
