"""The pixels and programs with which tests fill a tile cache, in forked processes, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides.region import Region
from pathoseg.tiles.cache import SHARD, TileCache, TileCacheKey
from pathoseg.tiles.fingerprint import Fingerprint

SIZE = Size(2500, 1900)  # 3 × 2 shards
WHOLE = Box(0, 0, SIZE.width, SIZE.height)


def key_of(size: Size = SIZE, **changes: object) -> TileCacheKey:
    key = TileCacheKey(
        slide=Path("slides/a.svs"),
        fingerprint=Fingerprint(1000, 5, "abc"),
        frame=Frame(size, 2.0, 2.0, Mpp(0.5, 0.5)),
    )
    return replace(key, **changes)  # type: ignore[arg-type]  # the fields have many types


def picture(size: Size = SIZE) -> NDArray[np.uint8]:
    """Noise, smooth enough for JPEG; white outside the slide, to the end of the last shards."""
    whole = size.rounded_up(SHARD)
    coarse = np.random.default_rng(0).integers(0, 256, (whole.height // 32, whole.width // 32, 3))
    pixels = coarse.astype(np.uint8).repeat(32, axis=0).repeat(32, axis=1)
    pixels[size.height :], pixels[:, size.width :] = 255, 255
    return pixels


def fill(cache: TileCache, box: Box = WHOLE, unread: NDArray[np.bool_] | None = None) -> None:
    pixels = picture()
    for shard in cache.shards(box):
        place = cache.box(shard)
        part = slice(place.y, place.bottom), slice(place.x, place.right)
        cache.write(shard, Region(pixels[part], None if unread is None else unread[part]))


def main(folder: str, begun: str | None = None) -> None:
    """Fill the cache of a folder: once, or again and again after making the file `begun`."""
    cache = TileCache.open(Path(folder), key_of())
    if begun is None:
        fill(cache)
        return
    Path(begun).touch()
    while True:
        fill(cache)
