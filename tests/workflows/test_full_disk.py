"""Disks that are full or read-only: one error that names the file; what was whole stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import Forked

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Mount = Callable[..., Path]

MPP = ("--assume-mpp", "0.5")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small disk in memory; skips where this user may not."""
    with ExitStack() as stack:

        def make(name: str, kib: int) -> Path:
            disk = tmp_path / name
            disk.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
            made = subprocess.run(command, check=False, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"mounting needs more rights: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
            return disk

        yield make


def _read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def _fill(disk: Path, free_kib: int) -> Path:
    """A file that leaves so much of the disk."""
    state, ballast = os.statvfs(disk), disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_bsize - (free_kib << 10))
    return ballast


def _one_error(said: str, disk: Path, why: str) -> None:
    assert said.count("\nError: ") + said.startswith("Error: ") == 1, said
    assert "Traceback" not in said
    assert str(disk) in said.split("Error: ")[1].splitlines()[0]
    assert why in said


@pytest.mark.parametrize("kib", [0, 4, 16])
def test_infer_onto_a_full_disk(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, mount: Mount, kib: int
) -> None:
    """Whatever file comes to be the one too many."""
    disk = mount("disk", 64)
    _fill(disk, kib)
    code, said = command(
        "infer", toy_slides / "slide0.png", "--model", tiny_bundle(), *MPP, "--out", disk
    )
    assert code == 2
    _one_error(said, disk, "No space left on device")
    assert not (disk / "slide0").exists()


def test_a_batch_stops_being_written_but_keeps_what_is_whole(
    toy_slides: Path,
    command: Command,
    tiny_bundle: SaveBundle,
    mount: Mount,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on once there is space, to what a disk with space enough would hold.

    A lease for whose text there was no space names no owner, and is waited for until it is old.
    """
    monkeypatch.setattr("pathoseg.inference.leases.BEAT", 0.1)
    monkeypatch.setattr("pathoseg.inference.leases.LEASE", 2.0)
    disk = mount("disk", 96)
    call = ("infer", toy_slides, "--model", tiny_bundle(), *MPP)
    code, said = command(*call, "--out", disk)
    assert code in (1, 2)
    assert "No space left on device" in said
    folders = [disk / slide.stem for slide in toy_slides.glob("slide?.png")]
    whole = [folder for folder in folders if folder.exists()]
    assert 1 <= len(whole) < 4
    assert all((folder / "summary.json").exists() for folder in whole)

    subprocess.run(["mount", "-o", "remount,size=8192k", str(disk)], check=True)
    code, said = command(*call, "--out", disk, "--resume")
    assert code == 0, said
    assert ", 0 skipped" not in said
    assert command(*call, "--out", "calm")[0] == 0
    assert not list(disk.glob(".*"))
    assert (disk / "summary.csv").read_bytes() == Path("calm/summary.csv").read_bytes()
    for folder in folders:
        for name in ("mask.ome.tiff", "regions.geojson", "overlay.png"):
            assert (folder / name).read_bytes() == Path("calm", folder.name, name).read_bytes()


@pytest.mark.parametrize("what", ["infer", "train", "cache", "evaluate"])
def test_onto_a_read_only_disk(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, mount: Mount, what: str
) -> None:
    model, disk = tiny_bundle(), mount("disk", 64)
    _read_only(disk)
    arguments = {
        "infer": (toy_slides / "slide0.png", "--model", model, *MPP),
        "train": ("--slides", toy_slides, "--config", "tiny.toml"),
        "cache": ("--slides", toy_slides, "--config", "tiny.toml"),
        "evaluate": ("--slides", toy_slides, "--model", model, *MPP),
    }[what]
    if what == "evaluate":
        for mask in toy_slides.glob("*_mask.png"):
            mask.unlink()
        for slide in toy_slides.glob("*.png"):
            slide.with_suffix(".geojson").write_text(
                '{"type":"Feature","properties":{"classification":"gland"},"geometry":'
                '{"type":"Polygon","coordinates":[[[0,0],[9,0],[9,9],[0,9],[0,0]]]}}'
            )
    code, said = command(what, *arguments, "--out", disk / "out")
    assert code == 2
    _one_error(said, disk, "")
    assert list(disk.iterdir()) == []


def test_reading_from_a_read_only_disk_is_fine(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, mount: Mount
) -> None:
    disk = mount("disk", 1024)
    for path in (toy_slides / "slide0.png", *tiny_bundle().iterdir()):
        (disk / path.name).write_bytes(path.read_bytes())
    _read_only(disk)
    code, said = command("infer", disk / "slide0.png", "--model", disk, *MPP, "--out", "out")
    assert code == 0, said


def test_training_fills_the_disk_and_goes_on_after_it_is_freed(
    toy_slides: Path, command: Command, mount: Mount
) -> None:
    """The run resumes from its last whole checkpoint, as if it had been killed."""
    text = Path("tiny.toml").read_text()
    Path("tiny.toml").write_text(text.replace("epochs = 4", "epochs = 2\nsamples_per_epoch = 6"))
    disk = mount("disk", 8192)
    train = ("train", "--slides", toy_slides, "--config", "tiny.toml", "--seed", 3)
    assert command(*train, "--out", "calm")[0] == 0
    for free_kib in (24, 100, 200, 4000):
        ballast = _fill(disk, free_kib)
        code, said = command(*train, "--out", disk / "run", "--resume")
        ballast.unlink()
        if code == 0:
            break
        assert code == 2, said
        _one_error(said, disk, "No space left on device")
        assert not list(disk.rglob(".*"))
    assert code == 0, said
    assert free_kib > 100, "the disk was never full"
    for name in ("model/weights.safetensors", "splits.csv"):
        assert (disk / "run" / name).read_bytes() == Path("calm", name).read_bytes()


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
from pathoseg.__main__ import main
main()
"""


@pytest.mark.parametrize("what", ["infer", "train"])
def test_a_file_that_may_not_grow(toy_slides: Path, tiny_bundle: SaveBundle, what: str) -> None:
    """The same on any machine: the system's limit on the size of a file stands in for the disk."""
    arguments = {
        "infer": ["slides/slide0.png", "--model", str(tiny_bundle()), *MPP],
        "train": ["--slides", "slides", "--config", "tiny.toml"],
    }[what]
    with Forked([what, *arguments, "--out", "out"], Path.cwd(), LIMITED) as process:
        said, _ = process.communicate()
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert said.count("Error: ") == 1
    assert "File too large" in said
    assert "out" in said.split("Error: ")[1]
    assert not list(Path("out").glob("*/*.tiff"))
    assert not list(Path("out").rglob(".*-*"))  # drafts
