"""The tiles of one slide, images with masks, through the cache where there is one."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Size
from pathoseg.slides.region import Region, read_region
from pathoseg.tiles.cache import Codec, TileCache, TileCacheKey
from pathoseg.tiles.class_pixels import count_tiles, count_tiles_once
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import StainNormaliser


@dataclass(frozen=True, slots=True)
class Tile:
    """What a model learns from.

    Attributes:
        image: RGB, shape (height, width, 3), white outside the slide.
        mask: Class indices, shape (height, width), 255 where ignored, unread or outside.
        unread: Pixels that the slide could not deliver.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    unread: int


class TissueShare(Protocol):
    """Where tissue lies on a slide."""

    def share(self, box: Box, frame: Frame) -> float:
        """The share of `box` (pixels of `frame`) within the slide that is tissue."""
        ...


@dataclass(frozen=True, slots=True)
class TileOptions:
    """How slides are cut.

    Attributes:
        tile: Side of a tile in pixels.
        overlap: Pixels that neighbours share.
        min_tissue: Least share of tissue in a tile without annotation.
        cache: Folder of the caches of all slides; None reads slides each time.
        codec: How cached tiles are compressed.
    """

    tile: int
    overlap: int = 0
    min_tissue: float = 0.1
    cache: Path | None = None
    codec: Codec = "lossless"


class SlideTiles:
    """Tiles of a slide that hold tissue or annotation, and something known, in the grid's order.

    May be read by several threads. Without a cache every tile is read from the slide each time.

    Args:
        slide: The slide's file.
        frame: Its pixels at the resolution of the tiles.
        grid: Tiles over that frame.
        indices: The tiles of the grid that are kept, ascending.
        class_pixels: Their pixels per class, shape (tiles, classes), background first.
        labels: What is known of the slide.
        classes: The classes of the masks.
        slides: Lends the slide where the cache does not hold a tile.
        cache: Holds the tiles at `indices`, in the slide's own colours.

    Attributes:
        stain: Applied to every image, where one is set.
    """

    def __init__(
        self,
        slide: Path,
        frame: Frame,
        grid: TileGrid,
        indices: NDArray[np.int64],
        class_pixels: NDArray[np.int64],
        labels: Labels,
        classes: ClassTable,
        slides: SlidePool,
        cache: TileCache | None = None,
    ) -> None:
        self.slide, self.frame, self.grid = slide, frame, grid
        self.indices, self.class_pixels = indices, class_pixels
        self.labels, self.classes = labels, classes
        self.cache = cache
        self.stain: StainNormaliser | None = None
        self._slides = slides
        self._filling = [Lock() for _ in range(cache.shards)] if cache else []

    def __len__(self) -> int:
        return len(self.indices)

    def box(self, position: int) -> Box:
        """Where tile `position` (0 … len - 1) lies, in pixels of the frame."""
        return self.grid.box(int(self.indices[position]))

    def read(self, position: int) -> Tile:
        """The tile at `position`; writes the tiles of its shard to the cache if they are missing.

        Raises:
            PathosegError: The slide cannot be opened, or the cache not read or written.
        """
        region = self._region(position)
        image = self.stain.apply(region.pixels) if self.stain else region.pixels
        mask = self.labels.rasterise(self.box(position), self.frame, self.classes)
        if region.unread is None:
            return Tile(image, mask, 0)
        mask[region.unread] = IGNORE
        return Tile(image, mask, int(region.unread.sum()))

    def fill(self, threads: int = 1, part: tuple[int, int] = (0, 1)) -> Generator[int]:
        """Writes the missing shards of the cache and yields the tiles of each when it is there.

        Args:
            threads: Shards written at once, at about 200 MB of memory each.
            part: (rank, of): every `of`-th shard beginning at `rank`, to share the work.

        Raises:
            PathosegError: There is no cache, the slide cannot be opened or the disk is full.
        """
        if self.cache is None:
            raise PathosegError(
                f"The tiles of {self.slide} have no cache to fill.", "Name its folder."
            )
        shards = range(part[0], self.cache.shards, part[1])
        with ThreadPoolExecutor(threads, thread_name_prefix="fill") as workers:
            try:
                for shard, _ in zip(shards, workers.map(self._fill_shard, shards), strict=True):
                    yield len(self.cache.positions(shard))
            finally:
                workers.shutdown(cancel_futures=True)

    def _region(self, position: int) -> Region:
        if self.cache is None:
            with self._slides.borrow(self.slide) as slide:
                return read_region(slide, self.frame, self.box(position))
        region = self.cache.read(position)
        while region is None:
            self._fill_shard(self.cache.shard_of(position))
            region = self.cache.read(position)
        return region

    def _fill_shard(self, shard: int) -> None:
        assert self.cache is not None
        # Threads of one process wait for the first; other processes may do the same work again.
        with self._filling[shard]:
            if self.cache.has(shard):
                return
            with self._slides.borrow(self.slide) as slide:
                self.cache.write(
                    shard,
                    (
                        read_region(slide, self.frame, self.box(position))
                        for position in self.cache.positions(shard)
                    ),
                )


def cut_tiles(
    slide: Path,
    frame: Frame,
    labels: Labels,
    annotations: AnnotationOptions,
    classes: ClassTable,
    tissue: TissueShare,
    options: TileOptions,
    slides: SlidePool,
) -> SlideTiles:
    """The tiles of a slide that hold enough tissue, or anything of a class.

    All tiles have the same size whatever the slide's; what reaches outside is padding. Where all of
    a tile is ignored, as outside the regions of interest, it is left out.

    Args:
        slide: The slide's file.
        frame: Its pixels at the resolution of the tiles.
        labels: What is known of the slide.
        annotations: How `labels` was read.
        classes: The classes of the masks.
        tissue: Where tissue lies.
        options: How it is cut.
        slides: Lends the slide.

    Raises:
        PathosegError: A file cannot be read, a class is unknown, the cache cannot be written.
    """
    grid = TileGrid(frame.size, Size(options.tile, options.tile), options.overlap)
    if options.cache is None:
        counts = count_tiles(grid, frame, labels, classes)
    else:
        folder = options.cache / slide.name
        counts = count_tiles_once(folder, grid, frame, labels, annotations, classes)
    enough = [tissue.share(box, frame) >= options.min_tissue for box in grid]
    known = counts.any(axis=1)
    indices = np.flatnonzero(known & (np.array(enough) | counts[:, 1:].any(axis=1)))
    cache = None
    if options.cache is not None:
        kept = tuple(indices.tolist())
        key = TileCacheKey(slide, Fingerprint.of(slide), frame, grid, kept, options.codec)
        cache = TileCache.open(options.cache, key)
    return SlideTiles(slide, frame, grid, indices, counts[indices], labels, classes, slides, cache)


def tile_labels(counts: NDArray[np.int64], min_cover: float) -> NDArray[np.int64]:
    """The label of each tile: the class that covers most of its annotated part.

    Args:
        counts: Pixels per class, shape (tiles, classes), background first.
        min_cover: Least share of the annotated pixels that the class must cover.

    Returns:
        Class indices, shape (tiles,); 255 where nothing labels the tile.
    """
    annotated = counts[:, 1:]
    total = annotated.sum(axis=1)
    labelled = (total > 0) & (annotated.max(axis=1) >= min_cover * total)
    return np.where(labelled, annotated.argmax(axis=1) + 1, IGNORE).astype(np.int64)
