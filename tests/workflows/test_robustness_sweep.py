"""Malformed files of other corpora through infer and train: a whole result or one error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import Forked

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Start = Callable[..., Forked]

BATCH = {"summary.csv", "failures.csv", "report.html", "states"}
RESULT = {"mask.ome.tiff", "regions.geojson", "overlay.png", "summary.json"}
ONE_STEP = """
[data]
classes = ["disc"]
assume_mpp = 0.5
[tiles]
mpp = 4.0
tile = 32
[model]
width = 2
depth = 1
[train]
epochs = 1
batch = 1
samples_per_epoch = 1
"""


def _files(shared_data: Path) -> list[Path]:
    files = sorted(path for path in (shared_data / "robustness").rglob("*") if path.is_file())
    assert len(files) >= 157
    return files


def _refused(code: int, said: str, path: Path) -> bool:
    """Return True if a command refused a file, False if it succeeded.

    Args:
        code: The exit code.
        said: The output.
        path: The file.

    Raises:
        AssertionError: Another exit code than 0 and 2, a traceback, or a refusal that is not one
            error that names the file.
    """
    assert "Traceback" not in said, said
    assert code in (0, 2), said
    if code == 2:
        assert len(re.findall("^Error: ", said, re.MULTILINE)) == 1, said
        assert str(path) in said
    return code == 2


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.slow
def test_each_file_as_the_slide_of_infer(
    tmp_path: Path, shared_data: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    model, outcomes = tiny_bundle(mpp=4.0, overlap=16), Counter[bool]()
    for number, path in enumerate(_files(shared_data)):
        out = tmp_path / str(number)
        code, said = command("infer", path, "--model", model, "--out", out, "--assume-mpp", "2")
        refused = _refused(code, said, path)
        outcomes[refused] += 1
        if refused:
            assert not list(out.glob("*/summary.json"))
        else:
            assert _names(out) == BATCH | {path.stem}
            assert _names(out / path.stem) == RESULT
    assert outcomes[False] >= 20


@pytest.mark.slow
def test_all_files_as_one_batch(
    tmp_path: Path, shared_data: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    for number, path in enumerate(_files(shared_data)[::7]):
        (slides / f"{number}.tif").symlink_to(path)
    arguments = ("--model", tiny_bundle(mpp=4.0, overlap=16), "--assume-mpp", "2")
    code, said = command("infer", slides, *arguments, "--out", tmp_path / "out")
    assert code == 1
    assert "Traceback" not in said
    done = _names(tmp_path / "out") - BATCH
    failed = (tmp_path / "out" / "failures.csv").read_text().count("tif,")
    assert len(done) + failed == len(_names(slides))
    assert done
    assert all(_names(tmp_path / "out" / name) == RESULT for name in done)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["slide", "annotation"])
def test_each_file_as_slide_or_annotation_of_train(
    tmp_path: Path,
    shared_data: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    toy_slides: Path,
    role: str,
) -> None:
    # Most of a run of one step is the reading of its network, which is the same in all.
    monkeypatch.setattr("pathoseg.workflows.train.read_alone", lambda *_: None)
    Path("step.toml").write_text(ONE_STEP)
    annotation = '{"type":"Feature","properties":{"classification":"disc"},"geometry":'
    annotation += '{"type":"Polygon","coordinates":[[[0,0],[9,0],[9,9],[0,9],[0,0]]]}}'
    suffixes = [".tif"] if role == "slide" else ["_mask.tif", "_mask.png", ".geojson", ".xml"]
    outcomes = Counter[bool]()
    for number, path in enumerate(_files(shared_data)):
        folder = Path(f"case{number}")
        folder.mkdir()
        slide, given = folder / "s.png", folder / f"s{suffixes[number % len(suffixes)]}"
        given.symlink_to(path)
        if role == "slide":
            (folder / "s.geojson").write_text(annotation)
        else:
            slide.symlink_to(toy_slides / "slide0.png")
        out = Path(f"run{number}")
        code, said = command("train", "--slides", folder, "--config", "step.toml", "--out", out)
        refused = _refused(code, said, given)
        outcomes[refused] += 1
        assert refused != out.exists()
        assert refused or (out / "model" / "model.json").exists()
    assert outcomes[True] >= 100
    assert role == "annotation" or outcomes[False] >= 10


@pytest.mark.slow
def test_a_sample_through_the_real_command(
    tmp_path: Path, shared_data: Path, tiny_bundle: SaveBundle, start: Start
) -> None:
    model = tiny_bundle(mpp=4.0, overlap=16)
    arguments = ["--model", str(model), "--out", "out", "--assume-mpp", "2"]
    for path in _files(shared_data)[5::40]:
        process = start("infer", str(path), *arguments)
        said, _ = process.communicate(timeout=120)
        refused = _refused(process.returncode, said, path)
        assert refused != (tmp_path / "out" / path.stem).exists()
