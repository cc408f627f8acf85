"""The tiles of one slide, images with masks: on a grid or near it, through the cache or not."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, ClassTable, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE, Box, Frame, ModelInput, Size
from pathoseg.slides.region import Region, read_region
from pathoseg.tiles.cache import Codec, Shard, TileCache, TileCacheKey
from pathoseg.tiles.class_pixels import count_tiles, count_tiles_once
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.stain import StainNormaliser


@dataclass(frozen=True, slots=True)
class Tile:
    """One training tile with its labels.

    Attributes:
        image: RGB, shape (height, width, 3), white outside the slide.
        mask: Class indices, shape (height, width), 255 where ignored, unread or outside.
        unread: Number of pixels that could not be read.
        context: The network's other inputs by name, RGB, shape (size, size, 3), around the tile's
            centre; white outside the slide and where unread.
        objects: Colours of objects as `Labels.objects` has them, shape (height, width), 0
            where `mask` is 0 and 255 where it is 255; None where objects are not learnt.
        around: Class indices of the input `TileOptions.labelled`, as `mask`, shape (size, size);
            None where there is none.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    unread: int
    context: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    objects: NDArray[np.uint8] | None = None
    around: NDArray[np.uint8] | None = None


class TissueShare(Protocol):
    """The tissue of a slide, as it decides which tiles are kept."""

    def share(self, box: Box, frame: Frame) -> float:
        """Return the share of `box` (pixels of `frame`) within the slide that is tissue, 0…1."""
        ...


@dataclass(frozen=True, slots=True)
class TileOptions:
    """The size and choice of training tiles, and their cache.

    Attributes:
        tile: Side of a tile in pixels.
        overlap: Pixels that neighbours share.
        offsets: "random" tiles lie up to half a stride from the grid's (`SlideTiles.read_near`).
        min_tissue: Least share of tissue in a tile without annotation.
        cache: Folder of the caches of all slides; None reads slides each time.
        codec: The compression of cached tiles.
        context: What the network sees beside the tile, around its centre.
        apart: Pixels within which two objects differ in colour (`object_distance`); None where
            objects are not learnt.
        labelled: Name of the input of `context` whose labels are read, too; None for none.
    """

    tile: int
    overlap: int = 0
    offsets: Literal["grid", "random"] = "grid"
    min_tissue: float = 0.1
    cache: Path | None = None
    codec: Codec = "lossless"
    context: tuple[ModelInput, ...] = ()
    apart: float | None = None
    labelled: str | None = None


_log = logging.getLogger(__name__)

# Parts of the stride within which a place is looked for, one after the other.
_REACHES = (1.0, 1.0, 1.0, 0.5, 0.5, 0.25)


@dataclass(frozen=True, slots=True)
class TissueGrid:
    """Shares of tissue of all tiles of a grid, and what a tile without annotation needs.

    Attributes:
        shares: Shape (rows, columns).
        least: Least share.
    """

    shares: NDArray[np.float32]
    least: float

    def has_enough(self, column: float, row: float) -> bool:
        """Return True if a tile between the grid's has, interpolated linearly, enough tissue."""
        rows, columns = self.shares.shape
        column, row = min(max(column, 0.0), columns - 1.0), min(max(row, 0.0), rows - 1.0)
        x, y = int(column), int(row)
        u, v = column - x, row - y
        upper, lower = self.shares[y], self.shares[min(y + 1, rows - 1)]
        right = min(x + 1, columns - 1)
        above = upper[x] * (1 - u) + upper[right] * u
        below = lower[x] * (1 - u) + lower[right] * u
        return bool(above * (1 - v) + below * v >= self.least)


class SlidePixels:
    """The pixels of a slide at one resolution, through a cache or not; for several threads.

    Args:
        slide: The slide's file.
        frame: Its pixels at that resolution.
        slides: Lends the slide where the cache does not hold a box.
        cache: Holds pixels of that frame, in the slide's own colours; None reads the slide.
    """

    def __init__(
        self, slide: Path, frame: Frame, slides: SlidePool, cache: TileCache | None
    ) -> None:
        self.slide, self.frame, self.cache = slide, frame, cache
        self._slides = slides
        self._filling = defaultdict[Shard, Lock](Lock)

    def read(self, box: Box) -> Region:
        """Read a box, and write the shards in which it lies to the cache where they are missing.

        Raises:
            PathosegError: The slide cannot be opened, or the cache not read or written.
        """
        if self.cache is None:
            with self._slides.borrow(self.slide) as slide:
                return read_region(slide, self.frame, box)
        region = self.cache.read(box)
        while region is None:
            for shard in self.cache.shards(box):
                self.fill(shard)
            region = self.cache.read(box)
        return region

    def fill(self, shard: Shard) -> None:
        """Write a shard to the cache unless it is there."""
        assert self.cache is not None
        # Threads of one process wait for the first; other processes may do the same work again.
        with self._filling[shard]:
            if self.cache.has(shard):
                return
            with self._slides.borrow(self.slide) as slide:
                region = read_region(slide, self.frame, self.cache.box(shard))
            self.cache.write(shard, region)


class SlideTiles:
    """Tiles of a slide that hold tissue or annotation, and something known, in the grid's order.

    May be read by several threads. The first tile that cannot be read whole is told of in the log.
    Without a cache every tile is read from the slide each time.

    Args:
        pixels: The slide at the resolution of the tiles.
        grid: Tiles over its frame.
        indices: The tiles of the grid that are kept, ascending.
        class_pixels: Their pixels per class, shape (tiles, classes), background first.
        labels: What is known of the slide.
        classes: The classes of the masks.
        tissue: Of the grid's tiles; None where tiles are read on the grid alone.
        context: The network's other inputs, and the slide at the resolution of each.
        apart: As in `TileOptions`.
        labelled: As in `TileOptions`.
        sparse: What nobody outlined is unknown, so background is annotation too, such as pen ink.

    Attributes:
        labelled: As the argument.
        ratios: Name of each of these inputs → pixels of the tile that one of its is wide.
        stain: Applied to every image, where one is set.
        grid_pixels: Pixels per class of all tiles of the grid, also those that are not kept.
    """

    def __init__(
        self,
        pixels: SlidePixels,
        grid: TileGrid,
        indices: NDArray[np.int64],
        class_pixels: NDArray[np.int64],
        labels: Labels,
        classes: ClassTable,
        tissue: TissueGrid | None = None,
        context: Sequence[tuple[ModelInput, SlidePixels]] = (),
        apart: float | None = None,
        labelled: str | None = None,
        sparse: bool = False,
    ) -> None:
        self.slide, self.frame, self.cache = pixels.slide, pixels.frame, pixels.cache
        self.grid, self.indices, self.class_pixels = grid, indices, class_pixels
        self.labels, self.classes = labels, classes
        self.stain: StainNormaliser | None = None
        self.grid_pixels = class_pixels.sum(axis=0)
        self._pixels, self._tissue, self._context = pixels, tissue, context
        self._apart, self._sparse = apart, sparse
        self.labelled = labelled
        mpp = pixels.frame.mpp.x
        self.ratios = {each.name: each.ratio(mpp) for each, _ in context}
        self._first_damage = Lock()  # taken by who tells of it
        self._step = math.lcm(*self.ratios.values())  # 1 without context

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def has_objects(self) -> bool:
        """Return True if tiles have an object plane."""
        return self._apart is not None

    def box(self, position: int) -> Box:
        """Return the place of tile `position` (0 … len - 1) in pixels of the frame."""
        return self.grid.box(int(self.indices[position]))

    def off_slide(self, home: Callable[[int], Box]) -> dict[str, tuple[ModelInput, int, float]]:
        """Find what of the network's other inputs lies off the slide, where it is white.

        Args:
            home: Returns the place of a tile: `box`, or `home` in training.

        Returns:
            By name the input, how many tiles have some of it off the slide, and the sum over all
            tiles of the share that does.
        """
        found = {}
        for each, pixels in self._context:
            size, mpp = pixels.frame.size, self.frame.mpp.x
            whole, shares = Box(0, 0, size.width, size.height), list[float]()
            for position in range(len(self)):
                inside = each.around(home(position), mpp).intersection(whole)
                shares.append(1 - (inside.size.pixels if inside else 0) / each.size**2)
            found[each.name] = each, sum(share > 0 for share in shares), sum(shares)
        return found

    def read(self, position: int) -> Tile:
        """Read a tile and its labels.

        The shards in which it lies are written to the cache if they are missing there.

        Args:
            position: From 0 to len - 1.

        Raises:
            PathosegError: The slide cannot be opened, or the cache not read or written.
        """
        box = self.box(position)
        return self._tile(box, self.labels.rasterise(box, self.frame, self.classes))

    def read_near(
        self, position: int, rng: np.random.Generator, accept: Callable[[NDArray[np.uint8]], bool]
    ) -> Tile:
        """A tile at a random place up to half a stride from the grid's.

        A place is taken if its mask is accepted and, unless it holds annotation, enough of it is
        tissue; after several that are not, the grid's own. Where the frame holds a tile, the place
        lies inside of it, also the grid's; else the frame lies anywhere in the tile.

        Args:
            position: As for `read`.
            rng: The only source of chance.
            accept: Of a mask; true for that of the grid's tile.

        Raises:
            PathosegError: As `read`.
        """
        box, mask = self._place_near(position, rng, accept)
        return self._tile(box, mask)

    def shards(self, name: str = IMAGE) -> list[Shard]:
        """The shards of the cache that tiles can lie in, or what another input shows around them.

        Args:
            name: That of the input.
        """
        cache = self._pixels_of(name).cache
        if cache is None:
            return []
        found = set[Shard]()
        for position in range(len(self)):
            found.update(cache.shards(self._surroundings(position, name)))
        return sorted(found)

    def fill(self, threads: int = 1, name: str = IMAGE) -> Generator[Shard]:
        """Write the missing ones of `shards` to the cache and yield each when it is there.

        Args:
            threads: Shards written at once, at about 20 MB of memory each.
            name: As for `shards`.

        Raises:
            PathosegError: There is no cache, the slide cannot be opened or the disk is full.
        """
        if self.cache is None:
            raise PathosegError(
                f"The tiles of {self.slide} have no cache to fill.", "Name its folder."
            )
        pixels, shards = self._pixels_of(name), self.shards(name)
        with ThreadPoolExecutor(threads, thread_name_prefix="fill") as workers:
            try:
                for shard, _ in zip(shards, workers.map(pixels.fill, shards), strict=True):
                    yield shard
            finally:
                workers.shutdown(cancel_futures=True)

    def count_damaged(self) -> int:
        """Count the tiles of which the cache has pixels, or another input's, as unread."""
        found = 0
        for position in range(len(self)):
            box = self.box(position)
            places = [(self._pixels, box)]
            places += [
                (pixels, each.around(box, self.frame.mpp.x)) for each, pixels in self._context
            ]
            found += any(pixels.cache and pixels.cache.has_unread(at) for pixels, at in places)
        return found

    def _tell_of_damage(self) -> None:
        """Log, once, that pixels of the slide could not be read."""
        if self._first_damage.acquire(blocking=False):
            _log.warning(
                "%s is damaged: pixels of its tiles cannot be read, and are not learnt from.",
                self.slide,
            )

    def _tile(self, box: Box, mask: NDArray[np.uint8]) -> Tile:
        region, mpp = self._pixels.read(box), self.frame.mpp.x
        context, around, objects = {}, None, None
        for each, pixels in self._context:
            place = each.around(box, mpp)
            seen = pixels.read(place)
            context[each.name] = self._stained(seen)
            if each.name == self.labelled:
                around = self.labels.rasterise(place, pixels.frame, self.classes)
                if seen.unread is not None:
                    around[seen.unread] = IGNORE
        if self._apart is not None:
            objects = self.labels.objects(box, self.frame, self.classes, mask, self._apart)
        image = self._stained(region)
        if region.unread is None:
            return Tile(image, mask, 0, context, objects, around)
        self._tell_of_damage()
        mask[region.unread] = IGNORE
        if objects is not None:
            objects[region.unread] = IGNORE
        return Tile(image, mask, int(region.unread.sum()), context, objects, around)

    def _stained(self, region: Region) -> NDArray[np.uint8]:
        return self.stain.apply(region.pixels) if self.stain else region.pixels

    def _place_near(
        self, position: int, rng: np.random.Generator, accept: Callable[[NDArray[np.uint8]], bool]
    ) -> tuple[Box, NDArray[np.uint8]]:
        home = self.home(position)
        stride, tissue = self.grid.stride, self._tissue
        assert tissue is not None, "tiles that lie on the grid alone"
        for part in _REACHES:
            # Uniform before it is moved inside, so that the frame's edges are seen half as often as
            # its middle, and not almost never.
            across, down = (int(part * side / 2) for side in (stride.width, stride.height))
            shift_x, shift_y = rng.integers((-across, -down), (across, down), endpoint=True)
            box = self._moved_inside(home, int(shift_x), int(shift_y))
            mask = self.labels.rasterise(box, self.frame, self.classes)
            annotated = (mask != IGNORE) & (self._sparse | (mask != BACKGROUND))
            if accept(mask) and (
                tissue.has_enough(box.x / stride.width, box.y / stride.height) or annotated.any()
            ):
                return box, mask
        return home, self.labels.rasterise(home, self.frame, self.classes)

    def home(self, position: int) -> Box:
        """Return the place near which a training tile lies, in pixels of the frame.

        At random places, the grid's moved inside the frame; else the grid's.
        """
        box = self.box(position)
        return box if self._tissue is None else self._moved_inside(box)

    def _moved_inside(self, box: Box, right: int = 0, down: int = 0) -> Box:
        """Return `box` moved by (right, down) pixels, clamped so that it lies inside the frame.

        Where the frame is smaller than the box, the box covers it. Last, x and y are rounded
        towards 0 to multiples of `_step`, where the pixels of all inputs coincide.
        """
        size = self.frame.size
        across, along = size.width - box.width, size.height - box.height
        x = min(max(box.x + right, min(0, across)), max(0, across))
        y = min(max(box.y + down, min(0, along)), max(0, along))
        x, y = (int(at / self._step) * self._step for at in (x, y))
        return Box(x, y, box.width, box.height)

    def _pixels_of(self, name: str) -> SlidePixels:
        return {IMAGE: self._pixels, **{each.name: at for each, at in self._context}}[name]

    def _surroundings(self, position: int, name: str) -> Box:
        """All that a tile can show, or another input around it, in pixels of that input."""
        first = last = self.home(position)
        if self._tissue is not None:
            across, down = (side // 2 for side in (self.grid.stride.width, self.grid.stride.height))
            home = first
            first, last = (self._moved_inside(home, sign * across, sign * down) for sign in (-1, 1))
        for each, _ in self._context:
            if each.name == name:
                first, last = (each.around(box, self.frame.mpp.x) for box in (first, last))
        return Box(first.x, first.y, last.right - first.x, last.bottom - first.y)


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
    """The tiles of a slide that hold enough tissue, or anything that somebody outlined.

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
    for each in options.context:
        if grid.stride.width % each.ratio(frame.mpp.x):
            raise PathosegError(
                f"Tiles of {options.tile} px with an overlap of {options.overlap} px do not lie "
                f"on pixels of the input `{each.name}`, {each.ratio(frame.mpp.x)} px wide.",
                "Choose a [tiles] overlap that this number divides.",
            )
    if options.cache is None:
        counts = count_tiles(grid, frame, labels, classes)
    else:
        folder = options.cache / slide.name
        counts = count_tiles_once(folder, grid, frame, labels, annotations, classes)
    shares = np.array([tissue.share(box, frame) for box in grid], np.float32)
    known = counts.any(axis=1)
    enough = shares >= options.min_tissue
    sparse = annotations.unlabelled == "ignore"
    indices = np.flatnonzero(known & (enough | sparse | counts[:, 1:].any(axis=1)))
    around = None
    if options.offsets == "random":
        around = TissueGrid(shares.reshape(grid.rows, grid.columns), options.min_tissue)

    def pixels(at: Frame) -> SlidePixels:
        cache = None
        if options.cache is not None:
            key = TileCacheKey(slide, Fingerprint.of(slide), at, options.codec)
            cache = TileCache.open(options.cache, key)
        return SlidePixels(slide, at, slides, cache)

    context = []
    if options.context:
        with slides.borrow(slide) as opened:
            size, mpp = opened.size, opened.mpp
        context = [(each, pixels(Frame.at(size, mpp, each.mpp))) for each in options.context]
    tiles = SlideTiles(
        pixels(frame),
        grid,
        indices,
        counts[indices],
        labels,
        classes,
        tissue=around,
        context=context,
        apart=options.apart,
        labelled=options.labelled,
        sparse=sparse,
    )
    tiles.grid_pixels = counts.sum(axis=0)
    return tiles


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
