"""The cache returns what was put in, to any number of writers, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Mpp
from pathoseg.slides.region import Region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.cache import SHARD, TileCache
from pathoseg.tiles.fingerprint import Fingerprint
from tests.forked import Forked
from tests.tiles.filling import SIZE, WHOLE, fill, key_of, picture

_ROOT = Path(__file__).resolve().parents[2]
Around = tuple[NDArray[np.uint8], NDArray[np.bool_]]


@given(
    x=st.integers(-400, 2600), y=st.integers(-400, 2000),
    width=st.integers(1, 1200), height=st.integers(1, 1200),
)  # fmt: skip
def test_any_box_comes_back_as_it_went_in(
    filled: TileCache, around: Around, x: int, y: int, width: int, height: int
) -> None:
    found = filled.read(Box(x, y, width, height))
    assert found is not None
    pixels, lost = (each[400 + y :][:height, 400 + x :][:, :width] for each in around)
    assert (found.pixels == pixels).all()
    assert (found.unread is not None) == lost.any()
    if found.unread is not None:
        assert (found.unread == lost).all()


def _lost() -> NDArray[np.bool_]:
    lost = np.zeros(picture().shape[:2], np.bool_)
    lost[1000:1030, 1500:2100] = True
    return lost


@pytest.fixture(scope="module")
def around() -> Around:
    """The picture and what of it is lost, with all that a box may reach around it."""
    pixels = np.pad(picture(), ((400, 1300), (400, 1300), (0, 0)), constant_values=255)
    return pixels, np.pad(_lost(), ((400, 1300), (400, 1300)))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> TileCache:
    folder = tmp_path_factory.mktemp("filled")
    fill(TileCache.open(folder, key_of()), unread=_lost())
    return TileCache.open(folder, key_of())


def test_a_box_needs_all_of_its_shards(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of())
    fill(cache, Box(0, 0, 1100, 1))
    assert cache.read(Box(900, 900, 200, 100)) is not None
    assert cache.read(Box(900, 900, 200, 125)) is None
    assert list(cache.shards(Box(900, 900, 200, 125))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    outside = cache.read(Box(-300, 0, 300, 200))
    assert outside is not None
    assert (outside.pixels == 255).all()


def test_zarr_reads_the_same(filled: TileCache) -> None:
    pixels = zarr.open_array(filled.path / "pixels", mode="r")
    assert (np.asarray(pixels[300:1300, 700:1800]) == picture()[300:1300, 700:1800]).all()


def test_black_pixels_are_there(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of())
    cache.write((0, 0), Region(np.zeros((SHARD, SHARD, 3), np.uint8)))
    found = cache.read(Box(0, 0, 512, 512))
    assert found is not None
    assert not found.pixels.any()


def test_lossy_pixels_are_close_and_small(tmp_path: Path, shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "aperio_CMU-1-Small-Region.svs") as slide:
        pixels = slide.read_level(0, Box(1024, 1024, SHARD, SHARD))
    sizes = {}
    for codec in ("lossless", "lossy"):
        cache = TileCache.open(tmp_path, key_of(codec=codec))
        cache.write((0, 0), Region(pixels))
        sizes[codec] = sum(f.stat().st_size for f in cache.path.glob("pixels/c.*"))
    found = TileCache.open(tmp_path, key_of(codec="lossy")).read(Box(0, 0, SHARD, SHARD))
    assert found is not None
    error = np.square(found.pixels.astype(float) - pixels).mean()
    assert 0 < error < 255**2 / 10**3.8, "38 dB"
    assert sizes["lossy"] * 3 < sizes["lossless"]


def test_everything_that_defines_the_content_names_another_folder(tmp_path: Path) -> None:
    key = key_of()
    changed = [
        replace(key, fingerprint=Fingerprint(1000, 6, "abc")),
        replace(key, fingerprint=Fingerprint(1000, 5, "abd")),
        replace(key, frame=replace(key.frame, mpp=Mpp(0.6, 0.6))),
        replace(key, frame=replace(key.frame, scale_x=2.1)),
        replace(key, codec="lossy"),
    ]
    assert len({entry.digest for entry in [key, *changed]}) == len(changed) + 1
    assert replace(key, slide=Path("elsewhere/a.svs")).digest == key.digest
    described = json.loads((TileCache.open(tmp_path, key).path / "cache.json").read_text())
    assert described["slide"].endswith("a.svs")
    assert described["frame"]["mpp"] == {"x": 0.5, "y": 0.5}


def test_a_cache_of_an_earlier_format_is_said_once_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of()
    former = tmp_path / key.slide.name / "former"
    former.mkdir(parents=True)
    (former / "cache.json").write_text(json.dumps({**key.described(), "format": 1}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            TileCache.open(tmp_path, key)
    assert [record.message for record in caplog.records] == [
        f"{former} is of an earlier version and not used: the slide is read again. Delete it."
    ]
    assert (former / "cache.json").exists()


def test_a_changed_slide_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = key_of()
    old = TileCache.open(tmp_path, key)
    coarse = TileCache.open(tmp_path, replace(key, frame=replace(key.frame, scale_x=4.0)))
    namesake = TileCache.open(tmp_path, key_of(slide=Path("others/a.svs"), codec="lossy"))
    fill(old)
    with caplog.at_level(logging.WARNING):
        new = TileCache.open(tmp_path, replace(key, fingerprint=Fingerprint(1001, 9, "xyz")))
    assert new.read(WHOLE) is None
    assert not old.path.exists()
    assert not coarse.path.exists()
    assert namesake.path.exists()
    assert "a.svs has changed" in caplog.text
    assert old.read(WHOLE) is None, "a reader that had it open does not get black tiles"


_WRITER = "import sys; from tests.tiles.filling import main; main(*sys.argv[1:])"


@pytest.mark.process
def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    with ExitStack() as stack:
        writers = [stack.enter_context(Forked([str(tmp_path)], _ROOT, _WRITER)) for _ in range(3)]
        for writer in writers:
            said, _ = writer.communicate()
            assert writer.returncode == 0, said
    cache = TileCache.open(tmp_path, key_of())
    found = cache.read(WHOLE)
    assert found is not None
    assert (found.pixels == picture()[: SIZE.height, : SIZE.width]).all()
    assert [f.name for f in (tmp_path / "a.svs").iterdir()] == [cache.path.name]


@pytest.mark.process
def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    rng, cached = np.random.default_rng(0), tmp_path / "cache"
    for number in range(4):
        begun = tmp_path / f"begun{number}"
        with Forked([str(cached), str(begun)], _ROOT, _WRITER) as writer:
            while not begun.exists():
                assert writer.poll() is None, writer.communicate()[0]
                time.sleep(0.005)
            time.sleep(rng.uniform(0.05, 0.6))
            writer.kill()
        cache = TileCache.open(cached, key_of())
        found = cache.read(Box(100, 100, 600, 600))
        if found is not None:
            assert (found.pixels == picture()[100:700, 100:700]).all()
    fill(cache)
    assert cache.read(WHOLE) is not None


def test_what_killed_writers_left_is_cleared_away_later(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of())
    drafts = [cache.path / "pixels" / "c.0.0.0.123.partial", cache.path.parent / ".123.draft"]
    drafts[0].touch()
    drafts[1].mkdir()
    TileCache.open(tmp_path, key_of())
    assert all(draft.exists() for draft in drafts), "they may be another writer's"
    for draft in drafts:
        os.utime(draft, (0, 0))
    TileCache.open(tmp_path, key_of())
    assert not any(draft.exists() for draft in drafts)


def test_a_damaged_shard_is_told_of(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of())
    corner = Box(0, 0, SHARD, SHARD)
    fill(cache, corner)
    [shard] = (cache.path / "pixels").glob("c.*")
    whole = shard.read_bytes()
    for place in (len(whole) // 4, len(whole) - 100):  # in a block, and in the index
        data = bytearray(whole)
        data[place] ^= 1
        shard.write_bytes(data)
        with pytest.raises(PathosegError, match=f"{cache.path} is damaged"):
            cache.read(corner)
    for length in (len(whole) // 2, 10):
        shard.write_bytes(whole[:length])
        with pytest.raises(PathosegError, match="Delete that folder"):
            cache.read(corner)
    (cache.path / "pixels" / "zarr.json").write_text("{")
    with pytest.raises(PathosegError, match=f"{cache.path} is damaged"):
        TileCache.open(tmp_path, key_of())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.process
def test_a_full_disk_is_told_of(small_disk: Path) -> None:
    cache = TileCache.open(small_disk, key_of())
    noise = np.random.default_rng(0).integers(0, 256, (SHARD, SHARD, 3), dtype=np.uint8)
    with pytest.raises(PathosegError, match=f"disk of the tile cache {cache.path} is full"):
        cache.write((0, 0), Region(noise))
    assert cache.read(Box(0, 0, 9, 9)) is None
    assert not list(cache.path.glob("pixels/*.partial"))


@pytest.mark.process
def test_a_read_only_cache_serves_what_it_holds(small_disk: Path) -> None:
    cache = TileCache.open(small_disk, key_of())
    fill(cache, Box(0, 0, 9, 9))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = TileCache.open(small_disk, key_of())
    assert again.read(Box(0, 0, 9, 9)) is not None
    with pytest.raises(PathosegError, match="cannot be written"):
        TileCache.open(small_disk, key_of(codec="lossy"))
