"""OME-Zarr slides: resolution, what is refused and why, missing and damaged chunks, memory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.outputs.mask_zarr import zarr_mask_writer
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.fingerprint import Fingerprint

Write = Callable[..., Path]


@pytest.fixture
def levels(pyramid: Callable[..., Any]) -> list[Any]:
    return list(pyramid(400, 300, (2,)))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the JSON in a file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("unit", "microns"),
    [("micrometer", 0.5), ("nanometer", 0.0005), ("millimeter", 500.0), ("µm", 0.5)],
)
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_resolution_by_scale_and_unit(
    tmp_path: Path, write_zarr: Write, levels: Any, version: str, unit: str, microns: float
) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels, version, unit=unit)
    with open_slide(path, assume_mpp=7.0) as slide:
        assert (slide.mpp.x, slide.mpp.y) == (pytest.approx(microns), pytest.approx(microns))


def test_a_scale_of_all_levels_multiplies(tmp_path: Path, write_zarr: Write, levels: Any) -> None:
    says = {"coordinateTransformations": [{"type": "scale", "scale": [1, 2, 4]}]}
    with open_slide(write_zarr(tmp_path / "a.ome.zarr", levels, says=says)) as slide:
        assert slide.mpp == Mpp(2.0, 1.0)


def test_without_a_unit_the_resolution_is_asked_for(
    tmp_path: Path, write_zarr: Write, levels: Any
) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels, unit=None)
    with pytest.raises(PathosegError, match="does not state its microns") as refused:
        open_slide(path)
    assert "--assume-mpp" in refused.value.hint
    with open_slide(path, assume_mpp=0.3) as slide:
        assert slide.mpp == Mpp(0.3, 0.3)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"dtype": np.uint16}, "uint16"),
        ({"dtype": np.float32}, "float32"),
        ({"channels": 4}, "c 4"),
        ({"channels": 1}, "c 1"),
        ({"axes": "zyx", "channels": 1}, "axes are z, y, x"),
    ],
)
def test_what_is_no_rgb_of_8_bits_is_refused(
    tmp_path: Path, write_zarr: Write, version: str, how: dict[str, Any], said: str
) -> None:
    pixels = np.ones((64, 64, how.get("channels", 3)), how.get("dtype", np.uint8))
    axes = how.get("axes", "cyx")
    path = write_zarr(tmp_path / "a.ome.zarr", [pixels], version, axes)
    with pytest.raises(PathosegError, match=said) as refused:
        open_slide(path)
    assert str(path) in refused.value.problem
    assert "RGB of 8 bits" in refused.value.hint


def test_a_stack_of_planes_is_refused(tmp_path: Path, write_zarr: Write, levels: Any) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels[:1], axes="czyx")
    zarr.create_array(path / "0", shape=(3, 2, 64, 64), dtype="uint8", overwrite=True)
    with pytest.raises(PathosegError, match="c 3, z 2, y 64, x 64"):
        open_slide(path)


def test_labels_plates_and_plain_arrays_are_no_slides(tmp_path: Path) -> None:
    mask, table = tmp_path / "mask.ome.zarr", ClassTable(("a",), ((1, 2, 3),))
    with zarr_mask_writer(mask, Size(64, 64), Mpp(1, 1), table) as add:
        add(np.ones((64, 64), np.uint8))
    zarr.create_group(tmp_path / "plate.zarr", attributes={"plate": {}}, zarr_format=2)
    zarr.create_array(tmp_path / "array.zarr", shape=(9, 9, 3), dtype="uint8")
    (tmp_path / "empty.ome.zarr").mkdir()
    for name, said in [
        ("mask.ome.zarr", "no image but labels"),
        ("mask.ome.zarr/mask", "no image but image-label"),
        ("plate.zarr", "no image but plate"),
        ("array.zarr", "no image"),
        ("empty.ome.zarr", "zattrs"),
    ]:
        with pytest.raises(PathosegError, match=said):
            open_slide(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ome: ome.update(version="0.6"), "OME-NGFF 0.6"),
        (lambda ome: ome.update(multiscales=[]), "multiscales"),
        (lambda ome: ome["multiscales"][0].pop("axes"), "multiscales"),
        (lambda ome: ome["multiscales"][0]["axes"].pop(), "axes"),
        (lambda ome: ome["multiscales"][0]["axes"].append({"name": "q"}), "a"),
        (lambda ome: ome["multiscales"][0].update(datasets=[]), "0 levels"),
        (lambda ome: ome["multiscales"][0]["datasets"][0].update(path="9"), "9"),
        (lambda ome: ome["multiscales"][0]["datasets"][0].update(path="../b"), "outside"),
        (lambda ome: ome["multiscales"][0]["datasets"][0].update(path="/etc"), "outside"),
        (
            lambda ome: ome["multiscales"][0]["datasets"][0]["coordinateTransformations"][0].update(
                scale=[1]
            ),
            "IndexError",
        ),
    ],
)
def test_damaged_metadata_is_refused_by_name(
    tmp_path: Path, write_zarr: Write, levels: Any, change: Callable[[Any], object], said: str
) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels)
    edit(path / "zarr.json", lambda content: change(content["attributes"]["ome"]))
    with pytest.raises(PathosegError, match=said) as refused:
        open_slide(path)
    assert str(path) in refused.value.problem


def test_a_codec_that_runs_code_is_refused(tmp_path: Path, write_zarr: Write, levels: Any) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels, "0.4")
    edit(path / "0" / ".zarray", lambda array: array.update(compressor={"id": "pickle"}))
    with pytest.raises(PathosegError, match="pickle"):
        open_slide(path)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_missing_chunk_is_unread_unless_what_is_missing_is_white(
    tmp_path: Path, write_zarr: Write, levels: Any, version: str
) -> None:
    chunk = {"0.4": "0.1.1", "0.5": "c/0/1/1"}[version]
    for fill in (0, 255):
        chunks = (3, 100, 100)
        path = write_zarr(
            tmp_path / f"{fill}.ome.zarr", levels, version, fill_value=fill, chunks=chunks
        )
        (path / "0" / chunk).unlink()
        with open_slide(path) as slide:
            if fill:
                assert (slide.read_level(0, Box(110, 110, 90, 90)) == 255).all()
            else:
                with pytest.raises(UnreadableError, match="missing"):
                    slide.read_level(0, Box(0, 0, 200, 200))
                region = read_region(
                    slide, Frame.at(slide.size, slide.mpp, 0.5), Box(0, 0, 400, 300)
                )
                assert region.unread is not None
                assert region.unread[100:200, 100:200].all()
            read = slide.read_level(0, Box(200, 0, 200, 300))
            np.testing.assert_array_equal(read, levels[0][:, 200:])


@pytest.mark.parametrize("shards", [None, (3, 200, 200), (3, 100, 100)])
def test_blosc_that_is_cut_short_is_unread(
    tmp_path: Path, write_zarr: Write, levels: Any, shards: Any
) -> None:
    """Blosc itself would read on in memory that is not the chunk's."""
    codec = BloscCodec(cname="lz4", clevel=5)
    how = {"chunks": (3, 100, 100), "shards": shards, "compressors": codec}
    path = write_zarr(tmp_path / "a.ome.zarr", levels, **how)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read_level(0, Box(0, 0, 400, 300)), levels[0])
    file = path / "0" / "c" / "0" / "0" / "0"
    whole = file.read_bytes()
    # The first stream states more bytes than it has; a file without shards is cut short, too.
    stated = int.from_bytes(whole[12:16], "little")
    longer = whole[:12] + (stated + 9).to_bytes(4, "little") + whole[16:]
    for damaged in [longer] if shards else [longer, whole[:-9], whole[:3]]:
        file.write_bytes(damaged)
        with open_slide(path) as slide, pytest.raises(UnreadableError):
            slide.read_level(0, Box(0, 0, 9, 9))


def test_memory_does_not_grow_with_the_slide(
    tmp_path: Path, write_zarr: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathoseg.slides.zarr_reader._KEPT_BYTES", 2 << 20)
    peaks = []
    for height in (2048, 8192):
        path = tmp_path / f"{height}.ome.zarr"
        write_zarr(path, [np.full((height, 512, 3), 7, np.uint8)], chunks=(3, 256, 256))
        with open_slide(path) as slide:
            tracemalloc.start()
            try:
                for top in range(0, height, 256):
                    slide.read_level(0, Box(0, top, 512, 256))
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1e6, "of 9 MB more"
    assert peaks[0] < 5e6, "2 MB of chunks, and those in the works"


def test_the_fingerprint_is_that_of_all_chunks_without_labels(
    tmp_path: Path, write_zarr: Write, levels: Any
) -> None:
    path = write_zarr(tmp_path / "a.ome.zarr", levels)
    before = Fingerprint.of(path)
    (path / "labels").mkdir()
    (path / "labels" / "zarr.json").write_text("{}")
    assert Fingerprint.of(path) == before
    shutil.rmtree(path / "1" / "c")
    assert Fingerprint.of(path) != before
