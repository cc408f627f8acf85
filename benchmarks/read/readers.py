"""One reader of slides in its own process: reads the boxes it is told and answers in seconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

# read(x, y, factor): the tile whose corner is (x, y) on level 0, at `factor` times its resolution
Read = Callable[[int, int, float], Any]
TILE = 1024
WARM_UP = 4


def direct(path: Path) -> Read:
    """`open_slide` and `read_region` of pathoseg."""
    from pathoseg.geometry import Box, Frame
    from pathoseg.slides.direct_reader import DirectSlide
    from pathoseg.slides.region import read_region
    from pathoseg.slides.slide import open_slide

    slide = open_slide(path)
    assert isinstance(slide, DirectSlide)

    def read(x: int, y: int, factor: float) -> Any:
        frame = Frame.at(slide.size, slide.mpp, slide.mpp.x * factor)
        box = Box(round(x / factor), round(y / factor), TILE, TILE)
        return read_region(slide, frame, box).pixels

    return read


def openslide(path: Path) -> Read:
    """`read_region` of openslide-python, made RGB and resampled."""
    return _by_openslide(path, lambda image, factor: _resampled(np.asarray(image), factor))


def openslide_pillow(path: Path) -> Read:
    """The same, resampled by Pillow, whose images OpenSlide gives."""
    return _by_openslide(path, _resampled_by_pillow)


def _by_openslide(path: Path, resampled: Callable[[Any, float], Any]) -> Read:
    from openslide import OpenSlide

    handle = OpenSlide(path)

    def read(x: int, y: int, factor: float) -> Any:
        side = round(TILE * factor)
        return resampled(handle.read_region((x, y), 0, (side, side)).convert("RGB"), factor)

    return read


def zarr_store(path: Path) -> Read:
    """Slices of tifffile's zarr store, resampled."""
    import tifffile
    import zarr

    level: Any = zarr.open(tifffile.imread(path, aszarr=True, level=0), mode="r")

    def read(x: int, y: int, factor: float) -> Any:
        side = round(TILE * factor)
        return _resampled(level[y : y + side, x : x + side], factor)

    return read


def cucim(path: Path) -> Read:
    """`read_region` of cuCIM on the CPU, resampled."""
    from cucim import CuImage

    image = CuImage(str(path))

    def read(x: int, y: int, factor: float) -> Any:
        side = round(TILE * factor)
        return _resampled(np.asarray(image.read_region((x, y), (side, side), 0)), factor)

    return read


def tiatoolbox(path: Path) -> Read:
    """`read_rect` of TIAToolbox's reader for slides, which resamples."""
    from tiatoolbox.wsicore.wsireader import OpenSlideWSIReader

    # By name: `WSIReader.open` takes a TIFF that is neither Aperio's, OME nor BigTIFF for a
    # picture, and loads all of it.
    reader = OpenSlideWSIReader(path)

    def read(x: int, y: int, factor: float) -> Any:
        return reader.read_rect((x, y), (TILE, TILE), resolution=1 / factor, units="baseline")

    return read


def _resampled(pixels: NDArray[np.uint8], factor: float) -> Any:
    """By OpenCV, which pathoseg uses too, in the fastest way that it has."""
    if factor == 1:
        return pixels
    kernel = cv2.INTER_AREA if factor == round(factor) else cv2.INTER_LINEAR
    return cv2.resize(pixels, (TILE, TILE), interpolation=kernel)


def _resampled_by_pillow(image: Any, factor: float) -> Any:
    from PIL.Image import Resampling

    if factor == round(factor):
        return np.asarray(image.reduce(round(factor)))
    return np.asarray(image.resize((TILE, TILE), Resampling.BILINEAR))


READERS: dict[str, Callable[[Path], Read]] = {
    "direct": direct,
    "openslide": openslide,
    "openslide_pillow": openslide_pillow,
    "zarr_store": zarr_store,
    "cucim": cucim,
    "tiatoolbox": tiatoolbox,
}


def seconds(opener: Callable[[], Read], work: dict[str, Any]) -> float:
    """Time the reading of all tiles, dealt to threads that each have a reader opened before.

    One thread's work is told in processor time, that of all threads the library starts included:
    other work on the machine then counts little. Several threads' is told in wall time.

    Args:
        opener: Opens a reader; called once for each thread.
        work: `corners`, the (x, y) of each tile on level 0, `factor`, the side of a tile's pixel in
            pixels of level 0, and `threads`.

    Returns:
        Seconds, without those to open readers and to warm up.

    Raises:
        AssertionError: A tile does not have the shape (TILE, TILE, 3).
    """
    clock = time.process_time if work["threads"] == 1 else time.perf_counter
    corners, each = work["corners"], -(-len(work["corners"]) // work["threads"])
    shares = [corners[start : start + each] for start in range(0, len(corners), each)]
    readers = [opener() for _ in shares]
    warm = Barrier(len(shares) + 1, timeout=120)  # where one fails, no other waits for ever

    def run(read: Read, mine: list[list[int]]) -> None:
        # In the thread that reads: memory that is new to it costs more than memory used before.
        for x, y in corners[-WARM_UP:]:
            read(x, y, work["factor"])
        warm.wait()
        for x, y in mine:
            pixels = read(x, y, work["factor"])
            assert pixels.shape == (TILE, TILE, 3)

    with ThreadPoolExecutor(len(shares)) as pool:
        done = [pool.submit(run, *pair) for pair in zip(readers, shares, strict=True)]
        warm.wait()
        start = clock()
        for future in done:
            future.result()
        return clock() - start


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    cv2.setNumThreads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(seconds(lambda: READERS[name](path), json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
