"""OME-NGFF from end to end: as a slide, and with `[outputs] ngff` as a mask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import yaozarrs
import zarr
from PIL import Image

from pathoseg.viewer.finding import find_entries

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

MPP = ("--assume-mpp", "0.5")


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    """Noise, in which a network without training sees several classes."""
    path = tmp_path / "slides" / "slide.png"
    path.parent.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (300, 423, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    (tmp_path / "c.toml").write_text('[outputs]\nngff = true\n[tissue]\nmethod = "all"\n')
    return path


def test_a_result_holds_the_mask_of_the_tiff(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, slide: Path
) -> None:
    out, result = tmp_path / "out", tmp_path / "out" / "slide"
    call = ("infer", slide, "--model", tiny_bundle(), "--config", tmp_path / "c.toml", *MPP)
    code, said = command(*call, "--out", out)
    assert code == 0, said
    label = yaozarrs.validate_zarr_store(result / "mask.ome.zarr")
    assert label is not None
    mask = zarr.open_array(result / "mask.ome.zarr" / "mask" / "0", mode="r")[:]
    assert len(np.unique(mask)) > 1
    np.testing.assert_array_equal(mask, tifffile.imread(result / "mask.ome.tiff"))
    (entry,) = find_entries([out])
    assert (entry.status, entry.slide, entry.result) == ("done", slide, result)

    outputs = json.loads((out / "states" / "slide.json").read_text())["outputs"]
    files = [path for path in (result / "mask.ome.zarr").rglob("*") if path.is_file()]
    assert outputs["mask.ome.zarr"] == sum(path.stat().st_size for path in files)
    code, said = command(*call, "--out", out, "--resume")
    assert (code, "1 skipped" in said) == (0, True), said

    # A shard that is not there reads as background, so only its bytes tell.
    (shard,) = (path for path in files if path.name != "zarr.json")
    shard.unlink()
    (entry,) = find_entries([out])
    assert entry.status == "cut short"
    code, said = command(*call, "--out", out, "--resume")
    assert (code, "1 of 1 slides done, 0 skipped" in said) == (0, True), said
    np.testing.assert_array_equal(
        zarr.open_array(result / "mask.ome.zarr" / "mask" / "0", mode="r")[:], mask
    )


def test_it_is_not_there_unless_asked_for(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, slide: Path
) -> None:
    out = tmp_path / "out"
    assert command("infer", slide, "--model", tiny_bundle(), "--out", out, *MPP)[0] == 0
    assert not (out / "slide" / "mask.ome.zarr").exists()
    assert (out / "slide" / "mask.ome.tiff").exists()


def as_zarr(image: Path, path: Path) -> Path:
    """Convert a picture to an OME-Zarr slide of 0.5 µm."""
    pixels = np.asarray(Image.open(image)).transpose(2, 0, 1)
    transformation = {"type": "scale", "scale": [1, 0.5, 0.5]}
    kinds = {"c": {"type": "channel"}}
    space = {"type": "space", "unit": "micrometer"}
    multiscale = {
        "axes": [{"name": axis, **kinds.get(axis, space)} for axis in "cyx"],
        "datasets": [{"path": "0", "coordinateTransformations": [transformation]}],
    }
    ome = {"version": "0.5", "multiscales": [multiscale]}
    group = zarr.create_group(path, attributes={"ome": ome})
    group.create_array("0", data=pixels, chunks=(3, 128, 128), dimension_names=tuple("cyx"))
    yaozarrs.validate_zarr_store(path)
    return path


def test_an_ome_zarr_slide_is_segmented_like_any_other(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, slide: Path
) -> None:
    own = as_zarr(slide, tmp_path / "slides" / "own.ome.zarr")
    model = ("--model", tiny_bundle(), "--config", tmp_path / "c.toml")
    code, said = command("infer", slide.parent, *model, "--out", tmp_path / "all", *MPP)
    assert (code, "2 of 2 slides done" in said) == (0, True), said
    code, said = command("infer", own, *model, "--out", tmp_path / "one")
    assert code == 0, said
    masks = [
        tifffile.imread(tmp_path / result / "mask.ome.tiff")
        for result in ("all/slide", "all/own.ome", "one/own.ome")
    ]
    for mask in masks[1:]:
        np.testing.assert_array_equal(mask, masks[0])
    assert [entry.slide for entry in find_entries([own])] == [own]
    by_name = {entry.name: entry.slide for entry in find_entries([tmp_path / "all"])}
    assert by_name == {"slide.png": slide, "own.ome.zarr": own}
    code, said = command("infer", own, *model, "--out", tmp_path / "one", "--resume")
    assert (code, "1 skipped" in said) == (0, True), said
