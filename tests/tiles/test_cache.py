"""The cache returns what was put in, to any number of writers, whole or not at all."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides.region import Region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.cache import TileCache, TileCacheKey
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.tiles.grid import TileGrid


def key_of(count: int, tile: int = 512, **changes: object) -> TileCacheKey:
    extent = Size(tile * count, tile)
    key = TileCacheKey(
        slide=Path("slides/a.svs"),
        fingerprint=Fingerprint(1000, 5, "abc"),
        frame=Frame(extent, 2.0, 2.0, Mpp(0.5, 0.5)),
        grid=TileGrid(extent, Size(tile, tile), 0),
        indices=tuple(range(count)),
    )
    return replace(key, **changes)  # type: ignore[arg-type]  # the fields have many types


def tile(position: int, side: int = 512, unread: bool = False) -> Region:
    """Noise that tells tiles apart, smooth enough for JPEG."""
    rng = np.random.default_rng(position)
    coarse = rng.integers(0, 256, (side // 32, side // 32, 3), dtype=np.uint8)
    pixels = coarse.repeat(32, axis=0).repeat(32, axis=1)
    return Region(pixels, rng.random((side, side)) < 0.5 if unread else None)


def fill(cache: TileCache, shard: int) -> None:
    cache.write(shard, (tile(position) for position in cache.positions(shard)))


def test_tiles_come_back_as_they_went_in(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of(70))
    assert cache.shards == 3, "a shard holds at most 32 tiles"
    regions = [tile(position, unread=position == 66) for position in cache.positions(2)]
    cache.write(2, regions)
    again = TileCache.open(tmp_path, key_of(70))
    assert again.read(3) is None
    for position, region in zip(cache.positions(2), regions, strict=True):
        found = again.read(position)
        assert found is not None
        assert (found.pixels == region.pixels).all()
        assert found.pixels.shape == (512, 512, 3)
        if region.unread is None:
            assert found.unread is None
        else:
            assert found.unread is not None
            assert (found.unread == region.unread).all()


@settings(max_examples=30)
@given(tiles=st.integers(0, 200), side=st.sampled_from([32, 256, 1024, 4096, 16384]))
def test_every_tile_has_one_shard_of_bounded_size(
    tmp_path_factory: pytest.TempPathFactory, tiles: int, side: int
) -> None:
    cache = TileCache.open(tmp_path_factory.mktemp("cache"), key_of(tiles, side))
    listed = [position for shard in range(cache.shards) for position in cache.positions(shard)]
    assert listed == list(range(tiles))
    for shard in range(cache.shards):
        positions = cache.positions(shard)
        assert {cache.shard_of(position) for position in positions} == {shard}
        assert len(positions) == 1 or len(positions) * side * side * 3 <= 32 * 1024**2


def test_black_tiles_are_there(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of(2))
    cache.write(0, [Region(np.zeros((512, 512, 3), np.uint8))] * 2)
    found = cache.read(1)
    assert found is not None
    assert not found.pixels.any()


def test_lossy_tiles_are_close_and_small(tmp_path: Path, shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "aperio_CMU-1-Small-Region.svs") as slide:
        pixels = slide.read_level(0, Box(1024, 1024, 512, 512))
    sizes = {}
    for codec in ("lossless", "lossy"):
        cache = TileCache.open(tmp_path, key_of(1, codec=codec))
        cache.write(0, [Region(pixels)])
        sizes[codec] = sum(f.stat().st_size for f in cache.path.glob("pixels/c.*"))
    found = TileCache.open(tmp_path, key_of(1, codec="lossy")).read(0)
    assert found is not None
    error = np.square(found.pixels.astype(float) - pixels).mean()
    assert 0 < error < 255**2 / 10**3.8, "38 dB"
    assert sizes["lossy"] * 3 < sizes["lossless"]


def test_everything_that_defines_the_content_names_another_folder(tmp_path: Path) -> None:
    key = key_of(4)
    changed = [
        replace(key, fingerprint=Fingerprint(1000, 6, "abc")),
        replace(key, fingerprint=Fingerprint(1000, 5, "abd")),
        replace(key, frame=replace(key.frame, mpp=Mpp(0.6, 0.6))),
        replace(key, frame=replace(key.frame, scale_x=2.1)),
        replace(key, grid=replace(key.grid, overlap=8)),
        replace(key, indices=(0, 1, 2, 4)),
        replace(key, codec="lossy"),
    ]
    assert len({entry.digest for entry in [key, *changed]}) == len(changed) + 1
    assert replace(key, slide=Path("elsewhere/a.svs")).digest == key.digest
    described = json.loads((TileCache.open(tmp_path, key).path / "cache.json").read_text())
    assert described["slide"].endswith("a.svs")
    assert described["frame"]["mpp"] == {"x": 0.5, "y": 0.5}


def test_a_changed_slide_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = key_of(2)
    old = TileCache.open(tmp_path, key)
    coarse = TileCache.open(tmp_path, replace(key, frame=replace(key.frame, scale_x=4.0)))
    namesake = TileCache.open(tmp_path, replace(key_of(3), slide=Path("others/a.svs")))
    fill(old, 0)
    with caplog.at_level(logging.WARNING):
        new = TileCache.open(tmp_path, replace(key, fingerprint=Fingerprint(1001, 9, "xyz")))
    assert new.read(0) is None
    assert not old.path.exists()
    assert not coarse.path.exists()
    assert namesake.path.exists()
    assert "a.svs has changed" in caplog.text
    assert old.read(0) is None, "a reader that had it open does not get black tiles"


def _fill_all(folder: Path, count: int) -> None:
    cache = TileCache.open(folder, key_of(count))
    for shard in range(cache.shards):
        fill(cache, shard)


@pytest.mark.process
def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    count = 80
    writers = [spawn.Process(target=_fill_all, args=(tmp_path, count)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    cache = TileCache.open(tmp_path, key_of(count))
    for position in range(0, count, 7):
        found = cache.read(position)
        assert found is not None
        assert (found.pixels == tile(position).pixels).all()
    assert [f.name for f in (tmp_path / "a.svs").iterdir()] == [cache.path.name]


_ENDLESS_WRITER = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("writer", sys.argv[1])
test = importlib.util.module_from_spec(spec); spec.loader.exec_module(test)
cache = test.TileCache.open(test.Path(sys.argv[2]), test.key_of(80))
print("writing", flush=True)
while True:
    test.fill(cache, 0)
"""


@pytest.mark.process
def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", _ENDLESS_WRITER, __file__, str(tmp_path)],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        with writer, writer.stdout as out:
            assert out.readline() == b"writing\n"
            time.sleep(rng.uniform(0.05, 0.6))
            os.kill(writer.pid, signal.SIGKILL)
        cache = TileCache.open(tmp_path, key_of(80))
        found = cache.read(5)
        if found is not None:
            assert (found.pixels == tile(5).pixels).all()
    fill(cache, 0)
    assert cache.read(31) is not None


def test_what_killed_writers_left_is_cleared_away_later(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of(2))
    drafts = [cache.path / "pixels" / "c.0.0.0.123.partial", cache.path.parent / ".123.draft"]
    drafts[0].touch()
    drafts[1].mkdir()
    TileCache.open(tmp_path, key_of(2))
    assert all(draft.exists() for draft in drafts), "they may be another writer's"
    for draft in drafts:
        os.utime(draft, (0, 0))
    TileCache.open(tmp_path, key_of(2))
    assert not any(draft.exists() for draft in drafts)


def test_a_damaged_shard_is_told_of(tmp_path: Path) -> None:
    cache = TileCache.open(tmp_path, key_of(2))
    fill(cache, 0)
    [shard] = (cache.path / "pixels").glob("c.*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 4] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PathosegError, match=f"{cache.path} is damaged"):
        [cache.read(position) for position in range(2)]
    shard.write_bytes(data[: len(data) // 2])
    with pytest.raises(PathosegError, match="Delete that folder"):
        cache.read(0)
    (cache.path / "pixels" / "zarr.json").write_text("{")
    with pytest.raises(PathosegError, match=f"{cache.path} is damaged"):
        TileCache.open(tmp_path, key_of(2))


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
    cache = TileCache.open(small_disk, key_of(8))
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    with pytest.raises(PathosegError, match=f"disk of the tile cache {cache.path} is full"):
        cache.write(0, [Region(noise)] * 8)
    assert cache.read(0) is None
    assert not list(cache.path.glob("pixels/*.partial"))


@pytest.mark.process
def test_a_read_only_cache_serves_what_it_holds(small_disk: Path) -> None:
    cache = TileCache.open(small_disk, key_of(1))
    fill(cache, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    again = TileCache.open(small_disk, key_of(1))
    assert again.read(0) is not None
    with pytest.raises(PathosegError, match="cannot be written"):
        TileCache.open(small_disk, key_of(3))
