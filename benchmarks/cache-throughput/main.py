"""Asks how much faster random tiles come from the cache than from the slide by OpenSlide."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray
from PIL import Image

from pathoseg.geometry import Box, Frame, Size
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.cache import SHARD, Codec, Shard, TileCache, TileCacheKey
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import find_tissue

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PATHOSEG_DATA", ROOT.parent / "shared" / "data"))
SLIDE = DATA / "slides" / "wsi_gastric-erosion_13196x16866.tif"
NATIVE_MPP, MPP, TILE = 0.5, 0.7, 1024
CODECS: tuple[Codec, ...] = ("lossless", "lossy")

Read = Callable[[int], NDArray[np.uint8]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tiles and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    tiles, rounds = (12, 3) if options.quick else (64, 9)
    with tempfile.TemporaryDirectory() as folder:
        slide = SLIDE if SLIDE.exists() else generated(Path(folder))
        figures = measured(slide, Path(folder), tiles, rounds)
    for name, value in figures.items():
        print(f"{name:28} {value:10.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measured(path: Path, folder: Path, tiles: int, rounds: int) -> dict[str, float]:
    """Reads the same tiles at random places by each way in turn, several times over."""
    frame, homes, boxes = tissue_tiles(path, tiles)
    figures = {"tiles": float(len(boxes)), "rounds": float(rounds)}
    key = TileCacheKey(path, Fingerprint.of(path), frame)
    ways: dict[str, Read] = {}
    for codec in CODECS:
        cache = TileCache.open(folder / codec, replace(key, codec=codec))
        shards = sorted({shard for home in homes for shard in cache.shards(home)})
        kept = len(shards) * SHARD**2
        figures[f"fill_{codec}_megapixels_per_s"] = (
            kept / 1e6 / seconds(partial(fill, cache, key, shards))
        )
        stored = sum(file.stat().st_size for file in cache.path.rglob("c.*"))
        figures[f"{codec}_ratio"] = kept * 3 / stored
        figures[f"{codec}_mb_a_tile"] = stored / 1e6 / len(boxes)
        figures["pixels_vs_tiles"] = kept / (len(boxes) * TILE**2)
        ways[codec] = from_cache(cache, boxes)
    ways["direct"] = from_slide(path, frame, boxes)
    ways["openslide"] = by_openslide(path, frame, boxes)
    times = alternating(ways, len(boxes), rounds)
    for way, taken in times.items():
        figures[f"{way}_tiles_per_s"] = len(boxes) / taken
    figures["cache_vs_openslide"] = times["openslide"] / times["lossless"]
    figures["lossy_cache_vs_openslide"] = times["openslide"] / times["lossy"]
    figures["cache_vs_direct"] = times["direct"] / times["lossless"]
    return figures


def tissue_tiles(path: Path, most: int) -> tuple[Frame, list[Box], list[Box]]:
    """Some tiles of tissue: all that training may show near each, and one place of it."""
    with open_slide(path, NATIVE_MPP) as slide:
        frame = Frame.at(slide.size, slide.mpp, MPP)
        tissue = find_tissue(slide, TissueOptions())
    grid, half = TileGrid(frame.size, Size(TILE, TILE), 0), TILE // 2
    right, bottom = frame.size.width - TILE, frame.size.height - TILE
    rng = np.random.default_rng(0)
    # A part of the slide, so that tiles lie beside each other as they do in training.
    kept = [box for box in grid if tissue.share(box, frame) >= 0.1][:most]
    homes, boxes = [], []
    for tile in kept:
        x, y = min(tile.x, right), min(tile.y, bottom)
        left, top = max(0, x - half), max(0, y - half)
        last = min(right, x + half), min(bottom, y + half)
        homes.append(Box(left, top, last[0] - left + TILE, last[1] - top + TILE))
        place = rng.integers((left, top), last, endpoint=True)
        boxes.append(Box(int(place[0]), int(place[1]), TILE, TILE))
    return frame, homes, boxes


def fill(cache: TileCache, key: TileCacheKey, shards: Sequence[Shard]) -> None:
    with open_slide(key.slide, NATIVE_MPP) as slide:
        for shard in shards:
            cache.write(shard, read_region(slide, key.frame, cache.box(shard)))


def from_cache(cache: TileCache, boxes: Sequence[Box]) -> Read:
    def read(position: int) -> NDArray[np.uint8]:
        region = cache.read(boxes[position])
        assert region is not None
        return region.pixels

    return read


def from_slide(path: Path, frame: Frame, boxes: Sequence[Box]) -> Read:
    slide = open_slide(path, NATIVE_MPP)
    return lambda position: read_region(slide, frame, boxes[position]).pixels


def by_openslide(path: Path, frame: Frame, boxes: Sequence[Box]) -> Read:
    """Read as a plain script does: OpenSlide's best level, Pillow's cheapest antialiased filter."""
    slide = openslide.OpenSlide(path)
    level = slide.get_best_level_for_downsample(frame.scale_x)
    downsample = slide.level_downsamples[level]

    def read(position: int) -> NDArray[np.uint8]:
        x, y, width, height = frame.to_level0(boxes[position])
        size = (round(width / downsample), round(height / downsample))
        image = slide.read_region((round(x), round(y)), level, size).convert("RGB")
        return np.asarray(image.resize((TILE, TILE), Image.Resampling.BILINEAR))

    return read


def alternating(ways: dict[str, Read], tiles: int, rounds: int) -> dict[str, float]:
    """Median seconds that each way takes for all tiles, in an order drawn anew every round."""
    rng = np.random.default_rng(1)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        order = rng.permutation(tiles).tolist()
        for way, read in ways.items():
            times[way].append(seconds(partial(all_of, read, order)))
    return {way: statistics.median(taken) for way, taken in times.items()}


def all_of(read: Read, order: Sequence[int]) -> None:
    for tile in order:
        read(tile)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def generated(folder: Path) -> Path:
    """A slide of 8,192² px that stands in where the real one is not at hand."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(60, 200, (256, 256, 3), dtype=np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((8192, 8192), Image.Resampling.BICUBIC))
    pixels //= 2
    pixels += rng.integers(0, 100, pixels.shape, dtype=np.uint8)
    path = folder / "generated.tif"
    tiles = (
        pixels[y : y + 256, x : x + 256] for y in range(0, 8192, 256) for x in range(0, 8192, 256)
    )
    encoded = (bytes(imagecodecs.jpeg8_encode(np.ascontiguousarray(t), level=80)) for t in tiles)
    tifffile.imwrite(
        path,
        encoded,
        shape=pixels.shape,
        dtype="uint8",
        tile=(256, 256),
        photometric="ycbcr",
        compression="jpeg",
    )
    return path


if __name__ == "__main__":
    main()
