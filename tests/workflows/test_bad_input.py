"""Input that cannot be used ends as one error that names it and says the hint, exit 2."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from pathoseg.errors import PathosegError
from pathoseg.workflows.early_checks import TrainingArguments, parallel_options

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

SQUARE = "[[[{0},{0}],[{1},{0}],[{1},{1}],[{0},{1}],[{0},{0}]]]"
FEATURE = (
    '{{"type":"Feature","properties":{{"classification":{{"name":"{name}","color":[1,2,3]}}}},'
    '"geometry":{{"type":"Polygon","coordinates":{square}}}}}'
)


def _geojson(name: str = "disc", start: int = 10, end: int = 60) -> str:
    return FEATURE.format(name=name, square=SQUARE.format(start, end))


def _png_bomb() -> bytes:
    """An image of 60,000 × 60,000 black pixels in a few hundred kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 10_000_000, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def _wide_mask() -> bytes:
    file = BytesIO()
    Image.new("L", (96, 48)).save(file, "png")
    return file.getvalue()


def _gzip_bomb() -> bytes:
    """GeoJSON whose features begin after 5 GB of blanks."""
    blanks = gzip.compress(b" " * 10_000_000)
    return gzip.compress(b'{"type":"FeatureCollection","features":[') + 500 * blanks


XML_BOMB = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(
        f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "]><ASAP_Annotations>&i;</ASAP_Annotations>"
)


def _train(command: Command, slides: Path, *more: object) -> str:
    """Train on slides that must be refused, and return the output.

    Args:
        command: Runs the command line.
        slides: The folder of slides.
        more: Further arguments of `train`.

    Raises:
        AssertionError: The exit code is not 2, there is not exactly one error, or a file is left.
    """
    before = set(Path.cwd().rglob("*"))
    code, said = command("train", "--slides", slides, "--config", "tiny.toml", *more)
    assert code == 2, said
    assert len(re.findall("^Error: ", said, re.MULTILINE)) == 1, said
    assert "Traceback" not in said
    assert set(Path.cwd().rglob("*")) == before
    return said


def _one_slide(toy_slides: Path) -> Path:
    for path in toy_slides.iterdir():
        if path.name != "slide0.png":
            path.unlink()
    return toy_slides / "slide0.png"


def test_an_empty_directory(toy_slides: Path, command: Command, tiny_bundle: SaveBundle) -> None:
    Path("empty").mkdir()
    assert "empty holds no slides" in _train(command, Path("empty"))
    assert "nowhere" in _train(command, Path("nowhere"))
    for folder in ("empty", "nowhere"):
        code, said = command("infer", folder, "--model", tiny_bundle())
        assert (code, Path("results").exists()) == (2, False)
        assert folder in said


def test_annotations_that_match_no_slide(toy_slides: Path, command: Command) -> None:
    notes = Path("notes")
    notes.mkdir()
    (notes / "other.geojson").write_text(_geojson())
    said = _train(command, toy_slides, "--annotations", notes)
    assert "slide0.png: it has no annotation" in said
    assert str(notes) in said
    assert "Annotations without a slide of their name: other.geojson" in said


@pytest.mark.parametrize(
    ("suffix", "content", "problem"),
    [
        (".geojson", _geojson(start=5000, end=6000), "outside"),
        (".geojson", _geojson(name="tumour"), '"tumour"'),
        (".geojson", _geojson()[:-40], "cannot be read"),
        (".geojson", '{"type":"FeatureCollection","features":' + "[" * 100_000, "slide0.geojson"),
        (".geojson.gz", _gzip_bomb, "slide0.geojson.gz"),
        (".xml", XML_BOMB, "entities"),
        (".xml", "<html></html>", "<html>"),
        ("_mask.png", _png_bomb, "slide0_mask.png"),
        ("_mask.png", "", "slide0_mask.png"),
        ("_mask.png", _wide_mask, "another shape than its slide"),
        (".geojson", f"[{_geojson()},{_geojson('Region*', end=10)}]", "encloses no area"),
    ],
    ids=[
        *("outside", "class", "cut", "deep", "gzip-bomb", "xml-bomb", "html", "image-bomb"),
        *("empty", "aspect", "flat-region"),
    ],
)
def test_annotations_that_cannot_be_used(
    toy_slides: Path,
    command: Command,
    suffix: str,
    content: str | Callable[[], bytes],
    problem: str,
) -> None:
    slide = _one_slide(toy_slides)
    annotation = slide.with_name(f"slide0{suffix}")
    annotation.write_bytes(content.encode() if isinstance(content, str) else content())
    said = _train(command, toy_slides)
    assert str(annotation) in said
    assert problem in said


def test_a_run_among_its_slides(toy_slides: Path, command: Command) -> None:
    assert "is the folder of the slides" in _train(command, toy_slides, "--out", toy_slides)


def test_annotations_of_nothing(toy_slides: Path, command: Command) -> None:
    slide = _one_slide(toy_slides)
    slide.with_suffix(".geojson").write_text('{"type":"FeatureCollection","features":[]}')
    assert "no region of any class" in _train(command, toy_slides)


def test_a_class_that_marks_regions_of_interest(toy_slides: Path, command: Command) -> None:
    config = Path("tiny.toml")
    config.write_text(config.read_text().replace('["disc"]', '["disc", "roi"]'))
    said = _train(command, toy_slides)
    assert 'The class "roi" is to be learnt ([data] classes) and marks regions' in said


def test_an_image_bomb_as_a_slide(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    bomb = Path("bomb.png")
    bomb.write_bytes(_png_bomb())
    code, said = command("infer", bomb, "--model", tiny_bundle(), "--assume-mpp", "0.5")
    assert (code, Path("results").exists()) == (2, False)
    assert "bomb.png claims 60000 × 60000 pixels" in said
    assert len(said.splitlines()) == 2  # the problem, the hint


def test_a_slide_too_coarse_for_the_model(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slide = toy_slides / "slide0.png"
    code, said = command("infer", slide, "--model", tiny_bundle(), "--assume-mpp", "1.01")
    assert (code, Path("results").exists()) == (2, False)
    assert str(slide) in said
    assert "twice" in said
    assert "slide0.png" in _train(command, toy_slides, "--assume-mpp", "1.01")
    code, _ = command("infer", slide, "--model", "model", "--assume-mpp", "1.0")
    assert code == 0


def test_a_slide_without_resolution(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    code, said = command("infer", toy_slides / "slide0.png", "--model", tiny_bundle())
    assert (code, Path("results").exists()) == (2, False)
    assert "--assume-mpp" in said


@pytest.mark.parametrize("name", ["weights.safetensors", "model.json"])
@pytest.mark.parametrize("kept", [0, 100, -1])
def test_a_bundle_cut_short(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, name: str, kept: int
) -> None:
    file = tiny_bundle() / name
    file.write_bytes(file.read_bytes()[:kept])
    for arguments in (("infer", toy_slides / "slide0.png"), ("evaluate", "--slides", toy_slides)):
        code, said = command(*arguments, "--model", file.parent, "--assume-mpp", "0.5")
        assert (code, Path("results").exists()) == (2, False)
        assert str(file) in said


@pytest.mark.parametrize("model", ["nowhere", "slides", "tiny.toml", None])
def test_no_model(toy_slides: Path, command: Command, model: str | None) -> None:
    given = () if model is None else ("--model", model)
    for arguments in (("infer", toy_slides / "slide0.png"), ("evaluate", "--slides", toy_slides)):
        code, said = command(*arguments, *given)
        assert code == 2
        assert (model or "runs") in said
        assert "--model" in said
    assert not Path("results").exists()
    assert not Path("runs").exists()


def test_a_file_where_a_folder_must_be(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    Path("taken").write_text("a file")
    slide = toy_slides / "slide0.png"
    assert "taken" in _train(command, toy_slides, "--out", "taken")
    assert "taken" in _train(command, toy_slides, "--out", "taken/run")
    for out in ("taken", "taken/below"):
        code, said = command(
            "infer", slide, "--model", tiny_bundle(), "--assume-mpp", "0.5", "--out", out
        )
        assert code == 2
        assert "taken" in said
        assert "a folder is needed" in said
    assert Path("taken").read_text() == "a file"


def test_an_image_that_is_cut_short_is_named_in_a_batch(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    whole = (toy_slides / "slide1.png").read_bytes()
    (toy_slides / "slide1.png").write_bytes(whole[: len(whole) // 2])
    Image.new("F", (9, 9)).save(toy_slides / "float.tif")
    code, said = command("infer", toy_slides, "--model", tiny_bundle(), "--assume-mpp", "0.5")
    assert code == 1
    table = Path("results/failures.csv").read_text()
    assert len(table.splitlines()) == 3
    for name in ("slide1.png", "float.tif"):
        assert f"{name}: failed." in said
        assert name in table
    assert {path.parent.name for path in Path("results").glob("*/summary.json")} == {
        "slide0", "slide2", "slide3",
    }  # fmt: skip


def test_a_device_that_is_not_there(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    for arguments in (
        ("infer", toy_slides / "slide0.png", "--model", tiny_bundle(), "--assume-mpp", "0.5"),
        ("evaluate", "--slides", toy_slides, "--model", "model"),
        ("train", "--slides", toy_slides, "--config", "tiny.toml", "--out", "run"),
        ("calibrate", "--quick", "--out", "mine.json"),
    ):
        code, said = command(*arguments, "--device", "nothing:3")
        assert code == 2, said
        assert "There is no device nothing:3 here." in said
        assert "Name one of cpu" in said
    for place in ("results", "run", "mine.json"):
        assert not Path(place).exists()
    code, said = command("infer", toy_slides, "--device", "CUDA 1")
    assert code == 2
    assert "--device CUDA 1 does not fit" in said
    assert "a name such as cpu, cuda or cuda:1" in " ".join(said.split())


def test_what_waits_in_host_memory_needs_a_form_of_offload() -> None:
    flags = {"parallel": {"parked": ["optimizer"], "offload": "none"}}
    with pytest.raises(PathosegError, match="asks for offload") as refused:
        parallel_options(TrainingArguments(None, flags))
    assert "leave out parked" in refused.value.hint
