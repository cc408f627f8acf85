"""Tiles are what the slide and its labels hold, with a cache and without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.reading import class_table, read_labels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Size
from pathoseg.slides.slide import open_slide
from pathoseg.tiles import tiles as tiles_file
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import StainNormaliser
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles, tile_labels
from pathoseg.tiles.tissue import find_tissue

MakeBench = Callable[..., Any]


def content(tiles: SlideTiles) -> list[tuple[bytes, bytes, int]]:
    read = [tiles.read(position) for position in range(len(tiles))]
    return [(tile.image.tobytes(), tile.mask.tobytes(), tile.unread) for tile in read]


def test_tiles_are_the_slide_and_its_labels(make_bench: MakeBench) -> None:
    bench = make_bench()
    tiles = bench.cut(tile=64, overlap=14)
    assert len(tiles) == len(tiles.grid) == 6 * 4
    whole = np.full((64 + 50 * 3, 64 + 50 * 5, 3), 255, np.uint8)
    whole[:200, :300] = bench.pixels
    mask = bench.labels.rasterise(Box(0, 0, 314, 214), bench.frame, bench.classes)
    for position in range(len(tiles)):
        tile, box = tiles.read(position), tiles.box(position)
        assert tile.unread == 0
        assert (tile.image == whole[box.y : box.bottom, box.x : box.right]).all()
        assert (tile.mask == mask[box.y : box.bottom, box.x : box.right]).all()
    assert (tile.mask[:, 300 - box.x :] == 255).all()


def test_a_slide_below_a_tile_is_padded(make_bench: MakeBench) -> None:
    tiles = make_bench().cut(tile=512)
    tile = tiles.read(0)
    assert len(tiles) == 1
    assert tile.image.shape == (512, 512, 3)
    assert (tile.mask != 255).sum() == 300 * 200


def test_tiles_hold_enough_tissue_or_annotation(make_bench: MakeBench) -> None:
    bench = make_bench()
    assert len(bench.cut(tile=100, tissue=0.1, min_tissue=0.1)) == 6
    sparse = bench.cut(tile=100, tissue=0.09, min_tissue=0.1)
    assert sparse.indices.tolist() == [0, 5]
    assert sparse.class_pixels.tolist() == [
        [100 * 100 - 50 * 30, 50 * 30, 0],
        [100 * 100 - 90 * 90, 0, 90 * 90],
    ]
    assert sparse.box(1) == Box(200, 100, 100, 100)


def test_no_tile_lies_outside_the_regions_of_interest(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench()
    outlines = [
        Annotation(shapely.box(110, 90, 170, 150), "Region*"),
        Annotation(shapely.box(120, 100, 130, 110), "tumor"),
        Annotation(shapely.box(200, 0, 300, 50), "stroma"),  # drawn, but outside
    ]
    bench.labels = PolygonLabels(bench.labels.path, outlines, Size(300, 200))
    for cache in (None, tmp_path / "cache"):
        tiles = bench.cut(tile=20, cache=cache)
        assert tiles.class_pixels.sum(axis=0).tolist() == [60 * 60 - 100, 100, 0]
        for position in range(len(tiles)):
            box = tiles.box(position)
            assert box.intersection(Box(110, 90, 60, 60))
            assert (tiles.read(position).mask != 255).any()


def test_the_cache_changes_nothing(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    bench.broken = Box(20, 20, 10, 10)
    plain = bench.cut(overlap=10)
    cached = bench.cut(overlap=10, cache=tmp_path / "cache")
    expected = content(plain)
    assert sum(unread for *_, unread in expected) > 0
    assert content(cached) == expected
    bench.opened.clear()
    assert content(bench.cut(overlap=10, cache=tmp_path / "cache")) == expected
    assert bench.opened == [], "all tiles come from the cache"


def test_unread_pixels_are_ignored_and_counted(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.broken = Box(0, 0, 300, 200)
    tile = bench.cut().read(0)
    assert tile.unread == 64 * 64
    assert (tile.mask == 255).all()


def test_tiles_are_read_by_many_threads(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathoseg.tiles.cache._MOST_TILES_A_SHARD", 5)
    bench = make_bench()
    expected = content(bench.cut())
    for cache in (None, tmp_path / "cache"):
        tiles = bench.cut(cache=cache)
        bench.opened.clear()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(tiles.read, list(range(len(tiles))) * 3))
        assert [tile.image.tobytes() for tile in found] == [image for image, *_ in expected] * 3
        assert len(bench.opened) <= 8
    assert tiles.cache is not None
    assert tiles.cache.shards == 4


def test_a_shard_is_filled_once_by_the_threads_of_a_process(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Box] = []
    read_region = tiles_file.read_region

    def counted(slide: Any, frame: Any, box: Box) -> Any:
        reads.append(box)
        return read_region(slide, frame, box)

    monkeypatch.setattr(tiles_file, "read_region", counted)
    tiles = make_bench().cut(cache=tmp_path / "cache")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(tiles.read, range(len(tiles))))
    assert len(reads) == len(tiles)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_cache_is_filled_in_parts(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr("pathoseg.tiles.cache._MOST_TILES_A_SHARD", 3)
    tiles = make_bench().cut(cache=tmp_path / "cache")
    assert tiles.cache is not None
    steps = [list(tiles.fill(threads, (rank, 3))) for rank in range(3)]
    assert sum(map(sum, steps)) == len(tiles) == 20
    assert all(tiles.cache.has(shard) for shard in range(tiles.cache.shards))


def test_filling_can_be_stopped(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathoseg.tiles.cache._MOST_TILES_A_SHARD", 1)
    tiles = make_bench().cut(cache=tmp_path / "cache", tile=16)
    assert tiles.cache is not None
    filling = tiles.fill(2)
    next(filling)
    filling.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fill")]
    assert not all(tiles.cache.has(shard) for shard in range(tiles.cache.shards))


def test_only_a_cache_can_be_filled(make_bench: MakeBench) -> None:
    with pytest.raises(PathosegError, match=r"slide\.svs have no cache"):
        next(make_bench().cut().fill())


def test_a_changed_slide_gets_fresh_tiles(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    before = content(bench.cut(cache=tmp_path / "cache"))
    bench.pixels = 255 - bench.pixels
    bench.path.write_bytes(b"another scan")
    after = content(bench.cut(cache=tmp_path / "cache"))
    assert after == content(bench.cut())
    assert after != before


def test_stains_change_after_the_cache(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    darker = StainNormaliser(np.eye(3, 4) * 2, np.eye(3))
    expected = darker.apply(bench.cut().read(3).image)
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        tiles = bench.cut(cache=cache)
        tiles.stain = darker
        assert (tiles.read(3).image == expected).all()


def test_a_real_slide_with_its_annotation(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "slides" / "monusac_A9K0_1.svs"
    options = AnnotationOptions()
    pool = SlidePool(open_slide)
    with pool.borrow(path) as slide:
        labels = read_labels(path.with_suffix(".xml"), slide.size, slide.origin, options)
        frame = Frame.at(slide.size, slide.mpp, 0.3)
        tissue = find_tissue(slide, TissueOptions())
    classes = class_table([labels], None)
    cut = TileOptions(tile=256, overlap=32, cache=tmp_path)
    tiles = cut_tiles(path, frame, labels, options, classes, tissue, cut, pool)
    pool.close()
    assert len(tiles) == len(tiles.grid) == 4 * 4
    epithelial, macrophage = tiles.class_pixels[:, 1:].sum(axis=0)
    assert epithelial > macrophage > 0
    read = [tiles.read(position) for position in range(len(tiles))]
    images, masks = np.stack([t.image for t in read]), np.stack([t.mask for t in read])
    nuclei, rest = images[..., 0][masks == 1], images[..., 0][masks == 0]
    assert nuclei.mean() < rest.mean() - 30, "blue nuclei are where their outlines are"


@given(
    counts=hnp.arrays(np.int64, (7, 4), elements=st.integers(0, 50)),
    min_cover=st.floats(0, 1),
)
def test_a_tile_has_the_class_that_covers_most_of_its_annotated_part(
    counts: np.ndarray[Any, Any], min_cover: float
) -> None:
    for row, label in zip(counts, tile_labels(counts, min_cover), strict=True):
        annotated = row[1:].sum()
        if label == 255:
            assert annotated == 0 or row[1:].max() < min_cover * annotated
        else:
            assert row[label] == row[1:].max() >= min_cover * annotated
            assert row[label] > 0
            assert label > 0
