"""Tiles are what the slide and its labels hold, with a cache and without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache as cached
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import shapely
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pathoseg.annotations.annotation import Annotation, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.reading import class_table, read_labels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, ModelInput, Mpp, Size
from pathoseg.slides import region
from pathoseg.slides.region import Region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles import tiles as tiles_file
from pathoseg.tiles.dataset import TrainingSet
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import StainNormaliser
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tiles import SlideTiles, TileOptions, TissueGrid, cut_tiles, tile_labels
from pathoseg.tiles.tissue import find_tissue
from tests.tiles.conftest import Bench
from tests.tiles.conftest import bench as new_bench

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


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 128 px, in blocks of 32: 3 × 2 on the bench."""
    monkeypatch.setattr("pathoseg.tiles.cache.SHARD", 128)
    monkeypatch.setattr("pathoseg.tiles.cache.BLOCK", 32)


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


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("broken", [None, Box(32, 32, 32, 32)])
def test_the_cache_changes_nothing(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Box | None
) -> None:
    """Cached tiles equal direct ones, also where a stored tile as large as a block is damaged."""
    monkeypatch.setattr(region, "_BLOCK", 32)
    bench = make_bench()
    bench.broken = broken
    expected = content(bench.cut(overlap=10))
    assert (sum(unread for *_, unread in expected) > 0) == (broken is not None)
    assert content(bench.cut(overlap=10, cache=tmp_path / "cache")) == expected
    bench.opened.clear()
    assert content(bench.cut(overlap=10, cache=tmp_path / "cache")) == expected
    # Tiles of another size come from it, too.
    other = content(bench.cut(tile=100, cache=tmp_path / "cache"))
    assert bench.opened == [], "all tiles come from the cache"
    assert other == content(bench.cut(tile=100))


@pytest.mark.usefixtures("small_shards")
def test_the_cache_keeps_what_is_unread(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    bench.broken = Box(20, 20, 10, 10)
    tiles = bench.cut(cache=tmp_path / "cache", apart=5.0)
    list(tiles.fill())
    direct = [bench.cut().read(position) for position in range(len(tiles))]
    assert sum(tile.unread for tile in direct) > 0
    bench.broken = None
    for position, plain in enumerate(direct):
        one, other = tiles.read(position), bench.cut().read(position)
        box, lost = tiles.box(position), one.mask == 255
        # What fails is left out by blocks of 256 px, or what a shard or a tile has of them.
        assert lost[plain.mask == 255].all()
        assert one.objects is not None
        assert ((one.objects == 255) == lost).all()
        assert ((one.objects == 0) == (one.mask == 0)).all()
        assert (one.image[~lost] == plain.image[~lost]).all()
        assert (one.mask[~lost] == plain.mask[~lost]).all()
        assert one.unread == lost.sum() - (other.mask == 255).sum()
        assert (one.unread > 0) == (box.x < 128 and box.y < 128)
        assert (one.image[~lost] == other.image[~lost]).all()


def test_unread_pixels_are_ignored_counted_and_told_of(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    bench.cut().read(0)
    assert caplog.text == ""
    bench.broken = Box(0, 0, 300, 200)
    tiles = bench.cut()
    for position in range(2):
        tile = tiles.read(position)
        assert tile.unread == 64 * 64
        assert (tile.mask == 255).all()
    assert caplog.text.count("slide.svs is damaged: pixels of its tiles cannot be read") == 1


@pytest.mark.usefixtures("small_shards")
def test_the_cache_counts_damaged_tiles(make_bench: MakeBench, tmp_path: Path) -> None:
    for broken, cache in ((None, tmp_path / "whole"), (Box(20, 20, 10, 10), tmp_path / "damaged")):
        bench = make_bench()
        bench.broken = broken
        tiles = bench.cut(cache=cache)
        assert tiles.count_damaged() == 0, "nothing is there yet"
        list(tiles.fill())
        unread = [tiles.read(position).unread > 0 for position in range(len(tiles))]
        assert tiles.count_damaged() == sum(unread)
        assert any(unread) == (broken is not None)


@pytest.mark.usefixtures("small_shards")
def test_tiles_are_read_by_many_threads(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    expected = content(bench.cut())
    for cache in (None, tmp_path / "cache"):
        tiles = bench.cut(cache=cache)
        bench.opened.clear()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(tiles.read, list(range(len(tiles))) * 3))
        assert [tile.image.tobytes() for tile in found] == [image for image, *_ in expected] * 3
        assert len(bench.opened) <= 8


@pytest.mark.usefixtures("small_shards")
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
    assert len(reads) == len(set(reads)) == len(tiles.shards()) == 6


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_cache_is_filled(make_bench: MakeBench, tmp_path: Path, threads: int) -> None:
    tiles = make_bench().cut(cache=tmp_path / "cache")
    assert tiles.cache is not None
    assert [*tiles.fill(threads)] == tiles.shards()
    assert all(tiles.cache.has(shard) for shard in tiles.shards())


@pytest.mark.parametrize("threads", [1, 2])
def test_filling_can_be_stopped(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    for name in ("SHARD", "BLOCK"):  # 247 of them
        monkeypatch.setattr(f"pathoseg.tiles.cache.{name}", 16)
    tiles = make_bench().cut(cache=tmp_path / "cache", tile=16)
    assert tiles.cache is not None
    filling = tiles.fill(threads)
    next(filling)
    filling.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fill")]
    assert not all(tiles.cache.has(shard) for shard in tiles.shards())


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench whose pixels tell where they lie; none of them is white."""
    made = new_bench(tmp_path_factory.mktemp("coded"))
    y, x = np.mgrid[:200, :300]
    made.pixels = np.stack([x % 256, x // 256, y], axis=-1).astype(np.uint8)
    return made


@pytest.fixture(scope="module")
def coded_tiles(coded: Bench) -> Callable[[int, int], SlideTiles]:
    """Its tiles of a side and an overlap, cut once each."""
    return cached(lambda side, overlap: coded.cut(tile=side, offsets="random", overlap=overlap))


@given(
    side=st.sampled_from([16, 64, 150, 250, 400]),
    overlap=st.sampled_from([0, 8]),
    number=st.integers(0, 1000),
    seed=st.integers(0, 1000),
    refused=st.integers(0, 7),
)
def test_a_tile_near_the_grid_is_what_lies_there(
    coded: Bench,
    coded_tiles: Callable[[int, int], SlideTiles],
    side: int,
    overlap: int,
    number: int,
    seed: int,
    refused: int,
) -> None:
    """Also where the slide is narrower than a tile, or the first places are refused."""
    tiles = coded_tiles(side, overlap)
    position, asked = number % len(tiles), 0

    def accept(_: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked > refused

    tile = tiles.read_near(position, np.random.default_rng(seed), accept)
    assert asked == min(refused + 1, 6)
    inside = (tile.image != 255).any(axis=-1)
    row, column = map(int, np.argwhere(inside)[0])
    red, green, blue = map(int, tile.image[row, column])
    box = Box(red + 256 * green - column, blue - row, side, side)
    assert inside.sum() == min(side, 300) * min(side, 200), "no more padding than must be"
    mask = coded.labels.rasterise(box, coded.frame, coded.classes)
    assert (tile.mask == mask).all()
    assert (mask != 255)[inside].all()
    grid = tiles.box(position)
    home = (
        min(max(grid.x, min(0, 300 - side)), max(0, 300 - side)),
        min(max(grid.y, min(0, 200 - side)), max(0, 200 - side)),
    )
    assert max(abs(box.x - home[0]), abs(box.y - home[1])) <= (side - overlap) / 2
    if refused > 5:
        assert (box.x, box.y) == home


@pytest.mark.slow
@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    sides=st.tuples(st.integers(200, 1500), st.integers(200, 1500)),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    tile=st.sampled_from([64, 256, 512]),
    outlined=st.booleans(),
    unlabelled=st.sampled_from(["background", "ignore"]),
)
@example(1000, 1000, (4000, 4000), (0.3, 0.45), 512, False, "background")
@settings(max_examples=25)
def test_no_tile_near_the_grid_lies_outside_the_regions_of_interest(
    width: int,
    height: int,
    sides: tuple[int, int],
    at: tuple[float, float],
    tile: int,
    outlined: bool,
    unlabelled: Literal["background", "ignore"],
) -> None:
    """In every draw of some epochs, balanced or not; the whole slide is tissue."""
    size = Size(max(width, sides[0]), max(height, sides[1]))
    x, y = int(at[0] * (size.width - width)), int(at[1] * (size.height - height))
    box = Box(x, y, width, height)
    outlines = [Annotation(shapely.box(x, y, box.right, box.bottom), "Region*")]
    if outlined or unlabelled == "ignore":  # half inside, half outside
        across = shapely.box(x + width // 2, y, box.right + width, box.bottom)
        outlines.append(Annotation(across, "tumor"))
    labels = PolygonLabels(Path("slide.svs"), outlines, size)
    options = AnnotationOptions(unlabelled=unlabelled)
    tiles = cut_tiles(
        Path("slide.svs"), Frame.at(size, Mpp(0.5, 0.5), 0.5), labels, options,
        ClassTable(("tumor",), ((1, 2, 3),)), AllTissue(),
        TileOptions(tile=tile, offsets="random"), SlidePool(open_slide),
    )  # fmt: skip
    drawn = list[Box]()

    def read(place: Box) -> Region:
        drawn.append(place)
        return Region(np.zeros((1, 1, 3), np.uint8), None)

    tiles._pixels.read = read  # type: ignore[method-assign]  # pixels are of no interest
    for balance in ("none", "class"):
        training = TrainingSet([tiles], 3, 5, 12, balance, 4.0, offsets="random")
        for epoch in range(2):
            for sample in training.order(epoch):
                mask = training.sample(epoch, sample)[1]
                assert (mask != 255).any()
                assert drawn[-1].intersection(box)


def test_places_near_the_grid_are_spread_evenly(coded: Bench) -> None:
    """So that over epochs no pixel of the slide's middle is seen more often than others."""
    tiles = coded.cut(tile=50, offsets="random")
    seen = np.zeros((200, 300))
    for seed in range(60):
        for position in range(len(tiles)):
            tile = tiles.read_near(
                position, np.random.default_rng([seed, position]), lambda _: True
            )
            red, green, blue = (int(value) for value in tile.image[0, 0])
            seen[blue : blue + 50, red + 256 * green : red + 256 * green + 50] += 1
    middle = seen[50:150, 50:250]
    assert middle.mean() == pytest.approx(60, rel=0.05)
    assert middle.std() < 0.2 * middle.mean()
    assert seen[0, 100:200].mean() == pytest.approx(30, rel=0.2)


def test_a_place_without_annotation_needs_tissue(coded: Bench) -> None:
    """Tissue in one tile of the grid: places near it have what linear interpolation says."""
    shares = np.zeros((4, 5), np.float32)
    shares[3, 4] = 1
    grid = TissueGrid(shares, 0.3)
    assert grid.has_enough(4, 3)
    assert grid.has_enough(3.5, 3)
    assert grid.has_enough(9, 9)
    assert not grid.has_enough(3.2, 3)
    assert not grid.has_enough(3.5, 2.5)
    tiles = cut_tiles(
        coded.path, coded.frame, coded.labels, AnnotationOptions(), coded.classes,
        LeftHalf(), TileOptions(tile=32, offsets="random", min_tissue=0.5), SlidePool(coded.open),
    )  # fmt: skip
    for position in range(len(tiles)):
        for seed in range(5):
            tile = tiles.read_near(position, np.random.default_rng(seed), lambda _: True)
            red, green, _ = (int(value) for value in tile.image[0, 0])
            annotated = ((tile.mask != 0) & (tile.mask != 255)).any()
            assert annotated or red + 256 * green <= 150


class LeftHalf:
    """Tissue on the left half of the bench."""

    def share(self, box: Box, frame: Frame) -> float:
        return min(max((150 - box.x) / box.width, 0.0), 1.0)


class AllTissue:
    def share(self, box: Box, frame: Frame) -> float:
        return 1.0


@pytest.mark.parametrize("unlabelled", ["ignore", "background"])
def test_background_that_is_drawn_among_strokes_needs_no_tissue(
    coded: Bench, unlabelled: Literal["ignore", "background"]
) -> None:
    """Pen ink and glass, where no tissue is found; else it is as what nobody has drawn."""
    x, y = coded.frame.size.width // 2 + 40, 40
    strokes = [Annotation(shapely.box(x, y, x + 8, y + 8), "background")]
    labels = PolygonLabels(coded.path, strokes, coded.frame.size)
    tiles = cut_tiles(
        coded.path, coded.frame, labels, AnnotationOptions(unlabelled=unlabelled), coded.classes,
        LeftHalf(), TileOptions(tile=32, offsets="random", min_tissue=0.5), SlidePool(coded.open),
    )  # fmt: skip
    right = [position for position in range(len(tiles)) if tiles.box(position).x >= x - 40]
    assert bool(right) == (unlabelled == "ignore")
    for position in right:
        places = set()
        for seed in range(9):
            tile = tiles.read_near(position, np.random.default_rng(seed), lambda _: True)
            assert ((tile.mask == 0).any(), (tile.mask > 0).all()) == (True, False)
            places.add(int(tile.image[0, 0, 0]))
        assert len(places) > 1, "near its place in the grid, too"


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


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("tile", [64, 512])
def test_context_lies_around_the_centre_of_the_tile(
    tile: int, cached: bool, make_bench: MakeBench, tmp_path: Path
) -> None:
    """Its middle, a fourth of its side, is the tile averaged over 4 × 4 pixels."""
    tiles = make_bench().cut(
        tile=tile,
        offsets="random",
        context=(ModelInput("wide", 2.0, 64),),
        cache=tmp_path / "cache" if cached else None,
        labelled="wide",
    )
    assert tiles.ratios == {"wide": 4}
    rng = np.random.default_rng(0)
    for position in (0, len(tiles) - 1):
        for _ in range(4):
            read = tiles.read_near(position, rng, lambda mask: True)
            cells = read.image.reshape(tile // 4, 4, tile // 4, 4, 3).mean(axis=(1, 3))
            within = min(64, tile // 4)
            ours, theirs = (
                image[(len(image) - within) // 2 :][:within, (len(image) - within) // 2 :][
                    :, :within
                ]
                for image in (read.context["wide"], cells)
            )
            np.testing.assert_array_equal(ours, np.floor(theirs + 0.5))
            assert read.around is not None
            part = slice((64 - within) // 2, (64 + within) // 2)
            fine = read.mask.reshape(tile // 4, 4, tile // 4, 4).transpose(0, 2, 1, 3)
            at = (tile // 4 - within) // 2
            fine = fine[at : at + within, at : at + within].reshape(within, within, 16)
            even = (fine == fine[..., :1]).all(axis=-1)  # cells that no outline crosses
            assert even.any()
            assert (read.around[part, part] == fine[..., 0])[even].all()


def test_tiles_that_do_not_lie_on_the_pixels_of_the_context_are_refused(
    make_bench: MakeBench,
) -> None:
    with pytest.raises(PathosegError, match="overlap of 10 px do not lie on pixels"):
        make_bench().cut(tile=64, overlap=10, context=(ModelInput("wide", 2.0, 64),))
