"""Asks which codec should hold cached tiles: how small, how fast, how true."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
from numcodecs import Blosc
from numpy.typing import NDArray

from pathoseg.geometry import Frame, Size
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import find_tissue

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PATHOSEG_DATA", ROOT.parent / "shared" / "data")) / "slides"
TILE = 512
# slide, assumed mpp, mpp of the tiles: stored pixels, and resampled ones
SOURCES = {
    "cmu": ("aperio_CMU-1-Small-Region.svs", None, 0.499),
    "gastric": ("wsi_gastric-erosion_13196x16866.tif", 0.5, 0.7),
}

Tile = NDArray[np.uint8]


@dataclass(frozen=True)
class Coder:
    """A way to store a tile."""

    encode: Callable[[Tile], bytes | bytearray]
    decode: Callable[[bytes | bytearray], Tile]


def blosc(name: str, level: int, shuffle: int) -> Coder:
    codec = Blosc(name, level, shuffle, typesize=1)
    return Coder(codec.encode, lambda data: np.frombuffer(codec.decode(data), np.uint8))


def jpeg(level: int, subsampling: str) -> Coder:
    encode = partial(imagecodecs.jpeg8_encode, level=level, subsampling=subsampling)
    return Coder(encode, imagecodecs.jpeg8_decode)


CODERS = {
    "blosc_lz4_1_plain": blosc("lz4", 1, Blosc.NOSHUFFLE),
    "blosc_lz4_5_bitshuffle": blosc("lz4", 5, Blosc.BITSHUFFLE),
    "blosc_zstd_3_plain": blosc("zstd", 3, Blosc.NOSHUFFLE),
    "blosc_zstd_3_bitshuffle": blosc("zstd", 3, Blosc.BITSHUFFLE),
    "qoi": Coder(imagecodecs.qoi_encode, imagecodecs.qoi_decode),
    "png_1": Coder(partial(imagecodecs.png_encode, level=1), imagecodecs.png_decode),
    "webp_lossless": Coder(
        partial(imagecodecs.webp_encode, lossless=True, method=0), imagecodecs.webp_decode
    ),
    "jpegxl_lossless": Coder(
        partial(imagecodecs.jpegxl_encode, lossless=True, effort=1, numthreads=1),
        partial(imagecodecs.jpegxl_decode, numthreads=1),
    ),
    "jpeg_95_444": jpeg(95, "444"),
    "jpeg_90_444": jpeg(90, "444"),
    "jpeg_80_444": jpeg(80, "444"),
    "jpeg_90_420": jpeg(90, "420"),
    "jpegxl_distance_1": Coder(
        partial(imagecodecs.jpegxl_encode, distance=1.0, effort=3, numthreads=1),
        partial(imagecodecs.jpegxl_decode, numthreads=1),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tiles and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if not DATA.is_dir():
        parser.exit(0, f"skipped: no slides in {DATA} (set PATHOSEG_DATA)\n")
    most, rounds = (3, 2) if options.quick else (10, 7)
    figures: dict[str, float] = {}
    for source, (name, assume_mpp, mpp) in SOURCES.items():
        tiles = tissue_tiles(DATA / name, assume_mpp, mpp, most)
        for coder, row in measured(tiles, rounds).items():
            print(f"{source:8} {coder:24} " + "  ".join(f"{k} {v:7.1f}" for k, v in row.items()))
            figures.update({f"{source}_{coder}_{key}": value for key, value in row.items()})
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def tissue_tiles(path: Path, assume_mpp: float | None, mpp: float, most: int) -> list[Tile]:
    """Tiles that are mostly tissue, chosen at random."""
    with open_slide(path, assume_mpp) as slide:
        frame = Frame.at(slide.size, slide.mpp, mpp)
        tissue = find_tissue(slide, TissueOptions())
        grid = TileGrid(frame.size, Size(TILE, TILE), 0)
        boxes = [box for box in grid if tissue.share(box, frame) > 0.5]
        chosen = np.random.default_rng(0).permutation(len(boxes))[:most]
        return [read_region(slide, frame, boxes[index]).pixels for index in chosen]


def measured(tiles: list[Tile], rounds: int) -> dict[str, dict[str, float]]:
    """Size, decoding speed and error of each coder, all coders in turn every round."""
    data = {name: [coder.encode(tile) for tile in tiles] for name, coder in CODERS.items()}
    times: dict[str, list[float]] = {name: [] for name in CODERS}
    for _ in range(rounds):
        for name, coder in CODERS.items():
            start = time.process_time()
            for encoded in data[name]:
                coder.decode(encoded)
            times[name].append(time.process_time() - start)
    megapixels = len(tiles) * TILE * TILE / 1e6
    return {
        name: {
            "ratio": sum(tile.nbytes for tile in tiles) / sum(map(len, data[name])),
            "decode_mpx_per_s": megapixels / statistics.median(times[name]),
            "psnr_db": psnr(tiles, [coder.decode(encoded) for encoded in data[name]]),
        }
        for name, coder in CODERS.items()
    }


def psnr(tiles: list[Tile], decoded: list[Tile]) -> float:
    """Peak signal to noise ratio in dB; 100 where nothing differs."""
    errors = [
        np.square(tile.ravel().astype(float) - found.ravel()).mean()
        for tile, found in zip(tiles, decoded, strict=True)
    ]
    return min(100.0, 10 * math.log10(255**2 / max(float(np.mean(errors)), 1e-9)))


if __name__ == "__main__":
    main()
