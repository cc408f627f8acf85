"""Batches of tiles for training: seeded, resumable, and the same on any number of ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.annotations.coverage import counted
from pathoseg.device import Images
from pathoseg.errors import PathosegError
from pathoseg.geometry import IMAGE
from pathoseg.tiles.class_pixels import class_counts
from pathoseg.tiles.tiles import SlideTiles, Tile, tile_labels
from pathoseg.tiles.transform import Around, Augmentation

# What a random stream is for, so that no two of them begin alike.
_ORDER, _CHANGES, _PLACE = 0, 1, 2
_NOTICED = 0.9  # part of a class's even share below which it is held back


class Sample(NamedTuple):
    """A tile of a step, varied.

    Attributes:
        image: RGB, shape (height, width, 3).
        mask: Class indices, shape (height, width).
        context: The network's other inputs by name.
        objects: Colours of objects, shape (height, width); None where they are not learnt.
        around: Class indices of one of `context`, as `Tile.around`.
    """

    image: NDArray[np.uint8]
    mask: NDArray[np.uint8]
    context: Mapping[str, NDArray[np.uint8]]
    objects: NDArray[np.uint8] | None
    around: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class SampleId:
    """One sample of an epoch: a tile at a place in the order.

    Attributes:
        position: Place in the epoch, counted over all ranks.
        slide: Number of the slide in the set.
        tile: Position of the tile in its slide's tiles.
    """

    position: int
    slide: int
    tile: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step.

    Attributes:
        images: RGB, shape (n, height, width, 3).
        masks: Class indices, shape (n, height, width), 255 ignored.
        samples: Where they come from.
        context: The network's other inputs by name, RGB, shape (n, size, size, 3).
        objects: Colours of objects (`Labels.objects`), shape (n, height, width), 0 where
            `masks` is 0 and 255 where it is 255; None where objects are not learnt.
        around: Class indices of one of `context`, shape (n, size, size); None where they are not
            learnt.
    """

    images: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    samples: tuple[SampleId, ...]
    context: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    objects: NDArray[np.uint8] | None = None
    around: NDArray[np.uint8] | None = None

    def inputs(self, part: slice) -> Images:
        """Return the input of some samples, or their inputs by name where there are several."""
        images = self.images[part]
        if not self.context:
            return images
        return {IMAGE: images, **{name: seen[part] for name, seen in self.context.items()}}

    def labels(self, part: slice) -> LabelPlanes:
        """Return the labels of some samples."""
        others = (None if each is None else each[part] for each in (self.objects, self.around))
        return LabelPlanes(self.masks[part], *others)


class LabelPlanes(NamedTuple):
    """Labels of some tiles: `masks`, `objects` and `around` as in `Batch`."""

    masks: NDArray[np.uint8]
    objects: NDArray[np.uint8] | None = None
    around: NDArray[np.uint8] | None = None


def stacked(tiles: Sequence[Tile]) -> Images:
    """Return the images of tiles (n, height, width, 3), by name where the network has several."""
    images = np.stack([tile.image for tile in tiles])
    names = tiles[0].context
    if not names:
        return images
    context = {name: np.stack([tile.context[name] for tile in tiles]) for name in names}
    return {IMAGE: images, **context}


def stacked_labels(tiles: Sequence[Tile]) -> LabelPlanes:
    """Return the labels of tiles, without those of their context."""
    masks = np.stack([tile.mask for tile in tiles])
    objects = [tile.objects for tile in tiles if tile.objects is not None]
    return LabelPlanes(masks, np.stack(objects) if objects else None)


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A class that comes up less often than others, as its tiles are few.

    Attributes:
        tiles: How many hold it.
        of: How many there are to learn from.
        even: Share of the draws that would hold it without a limit.
        share: Share that do.
    """

    tiles: int
    of: int
    even: float
    share: float


class TrainingSet:
    """The tiles of many slides in an order that follows from seed and epoch alone.

    All batches are full: an epoch is rounded up to whole batches, with tiles drawn again.

    Args:
        slides: Their tiles, all of one size.
        batch: Tiles a step, over all ranks.
        seed: Not negative; with epoch and position it decides all that is random.
        samples_per_epoch: Tiles drawn an epoch; None means as many as there are.
        balance: "none" draws every tile before any comes again. "class" gives every class the
            same number of draws, from tiles that hold a pixel of it; tiles of background alone
            count as one more class.
        balance_limit: By "class", no tile is drawn more than this many times as often as "none"
            would draw it; what a class loses by that, the others gain.
        min_cover: For tile classification: leaves out tiles that nothing labels (`tile_labels`)
            and balances by label. None for segmentation.
        offsets: "random" tiles lie near those of the grid, a place drawn for each sample of each
            epoch; such a tile holds the class that is rarest of those in the grid's tile, or where
            tiles are classified has its label.
        augmentation: Changes each tile at random.
        threads: Readers.

    Attributes:
        held_back: By class index (no background), the effect of `balance_limit`, for classes whose
            share of the draws it lowers.

    Raises:
        PathosegError: There is no tile.
    """

    def __init__(
        self,
        slides: Sequence[SlideTiles],
        batch: int,
        seed: int,
        samples_per_epoch: int | None = None,
        balance: Literal["none", "class"] = "none",
        balance_limit: float = math.inf,
        min_cover: float | None = None,
        offsets: Literal["grid", "random"] = "grid",
        augmentation: Augmentation | None = None,
        threads: int = 1,
    ) -> None:
        self.slides, self.batch, self.seed = slides, batch, seed
        self._min_cover, self._offsets = min_cover, offsets
        self._augmentation, self._threads = augmentation, threads
        self._tiles = [(s, t) for s, tiles in enumerate(slides) for t in range(len(tiles))]
        groups = _groups(slides, balance, min_cover) if self._tiles else {}
        self._groups = list(groups.values())
        if not self._groups:
            raise PathosegError(
                f"None of the {len(self._tiles)} tiles of {len(slides)} slides can be learnt from.",
                "Annotate regions that lie on the slides, or lower [tiles] min_tissue.",
            )
        # Of each slide, the class that a tile near the grid's must hold too.
        self._wanted = _rarest(slides, min_cover) if offsets == "random" else []
        usable = len(np.unique(np.concatenate(self._groups)))
        self.steps_per_epoch = math.ceil((samples_per_epoch or usable) / batch)
        self._weights: NDArray[np.float64] | None = None
        self.held_back: dict[int, HeldBack] = {}
        # Readers are threads already; OpenCV's own would take their cores.
        cv2.setNumThreads(1)
        if balance == "class" and balance_limit < math.inf:
            even = _even_weights(self._groups, len(self._tiles))
            self._weights = _limited(even, balance_limit / usable)
            for index, group in groups.items():
                before, after = (float(each[group].sum()) for each in (even, self._weights))
                if index and after < _NOTICED * before:
                    self.held_back[index] = HeldBack(len(group), usable, before, after)

    def order(self, epoch: int) -> tuple[SampleId, ...]:
        """Draw the samples of an epoch in their order: `steps_per_epoch * batch` of them.

        Args:
            epoch: From 0; with the seed, it decides the draw.
        """
        rng = self._rng(_ORDER, epoch)
        count = self.steps_per_epoch * self.batch
        if self._weights is None:
            order = self._in_turns(rng, count)
        else:
            order = self._by_weight(rng, count, self._weights)
        return tuple(
            SampleId(position, *self._tiles[tile]) for position, tile in enumerate(order.tolist())
        )

    def _in_turns(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Tiles of each group in turn; of a group, all before any comes again."""
        # Beginning at any group, so that none has the extra draw in every epoch.
        turns = (np.arange(count) + rng.integers(len(self._groups))) % len(self._groups)
        rng.shuffle(turns)
        order = np.empty(count, dtype=np.int64)
        for number, group in enumerate(self._groups):
            places = np.flatnonzero(turns == number)
            rounds = math.ceil(len(places) / len(group))
            draws = [rng.permutation(group) for _ in range(rounds)]
            order[places] = np.concatenate([*draws, group[:0]])[: len(places)]
        return order

    def _by_weight(
        self, rng: np.random.Generator, count: int, weights: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Each tile as often as its weight says, rounded up or down, spread over the epoch.

        The numbers of draws are a systematic sample: they add up to `count`, and those of the tiles
        that hold the same classes to what their weights say, to within one.
        """
        held = np.zeros(len(weights), np.int64)
        for number, group in enumerate(self._groups):
            held[group] |= 1 << (number % 63)
        order = np.lexsort((rng.permutation(len(weights)), held))
        ends = np.floor(np.cumsum(weights[order]) * count + rng.random()).astype(np.int64)
        ends[-1] = count
        times = np.diff(ends, prepend=0)
        tiles = np.repeat(order, times)
        nth = counted(times)
        when = (nth + rng.random(count)) / np.repeat(times, times)
        return tiles[np.argsort(when, kind="stable")].astype(np.int64)

    def sample(self, epoch: int, sample: SampleId) -> Sample:
        """Read a sample, and vary it as its place in the epoch decides.

        Args:
            epoch: From 0.
            sample: One of that epoch's `order`.

        Raises:
            PathosegError: The slide or the cache cannot be read.
        """
        slide = self.slides[sample.slide]
        if self._offsets == "grid":
            tile = slide.read(sample.tile)
        else:
            wanted = int(self._wanted[sample.slide][sample.tile])
            rng = self._rng(_PLACE, epoch, sample.position)
            tile = slide.read_near(sample.tile, rng, lambda mask: self._holds(mask, wanted))
        if self._augmentation is None:
            return Sample(tile.image, tile.mask, tile.context, tile.objects, tile.around)
        rng = self._rng(_CHANGES, epoch, sample.position)
        context = {
            name: Around(seen, slide.ratios[name], tile.around if name == slide.labelled else None)
            for name, seen in tile.context.items()
        }
        planes, objects = tile.mask, None
        if tile.objects is not None:
            planes = np.stack([tile.mask, tile.objects], axis=-1)
        image, mask, found = self._augmentation.together(tile.image, planes, context, rng)
        if tile.objects is not None:
            mask, objects = mask[..., 0], mask[..., 1]
        around = None if slide.labelled is None else found[slide.labelled].mask
        return Sample(
            image, mask, {name: each.image for name, each in found.items()}, objects, around
        )

    def batches(
        self, epoch: int, first_step: int = 0, rows: Sequence[int] | None = None
    ) -> Generator[Batch]:
        """The batches of an epoch from `first_step` on, read ahead by threads.

        Closing the generator, or an error, ends the threads before it returns.

        Args:
            epoch: From 0.
            first_step: Steps of this epoch already done.
            rows: Which samples of every batch to read, for a rank that needs only those; None
                is all, and there may be none.

        Raises:
            PathosegError: A tile cannot be read, when its batch is due.
        """
        wanted = range(self.batch) if rows is None else rows
        order = self.order(epoch)
        steps = (
            tuple(order[step * self.batch + row] for row in wanted)
            for step in range(first_step, self.steps_per_epoch)
        )
        # Two batches ahead, and work for every thread where batches are small.
        ahead = 2 + self._threads // max(1, len(wanted))
        waiting: deque[tuple[tuple[SampleId, ...], list[Future[Sample]]]] = deque()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="tiles") as readers:

            def begin(samples: tuple[SampleId, ...]) -> None:
                futures = [readers.submit(self.sample, epoch, sample) for sample in samples]
                waiting.append((samples, futures))

            try:
                for samples in islice(steps, ahead):
                    begin(samples)
                while waiting:
                    samples, futures = waiting.popleft()
                    batch = self._gather(samples, futures)
                    for following in islice(steps, 1):
                        begin(following)
                    yield batch
            finally:
                readers.shutdown(cancel_futures=True)

    def _holds(self, mask: NDArray[np.uint8], wanted: int) -> bool:
        """Return True if a mask (h, w) holds the class for which its tile was drawn.

        Where tiles are classified, it has to be the tile's class.
        """
        if self._min_cover is None:
            return bool((mask == wanted).any())
        counts = class_counts(mask[None], len(self.slides[0].classes))
        return int(tile_labels(counts, self._min_cover)[0]) == wanted

    def _gather(self, samples: tuple[SampleId, ...], futures: list[Future[Sample]]) -> Batch:
        tile = self.slides[0].grid.tile
        images = np.empty((len(samples), tile.height, tile.width, 3), dtype=np.uint8)
        masks = np.empty(images.shape[:3], dtype=np.uint8)
        objects = np.empty_like(masks) if self.slides[0].has_objects else None
        for row, future in enumerate(futures):
            read = future.result()
            images[row], masks[row] = read.image, read.mask
            if objects is not None:
                objects[row] = read.objects
        others = [future.result().context for future in futures]
        names = others[0] if others else ()
        context = {name: np.stack([seen[name] for seen in others]) for name in names}
        known = [future.result().around for future in futures]
        around = [each for each in known if each is not None]
        return Batch(images, masks, samples, context, objects, np.stack(around) if around else None)

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=purpose))


def _groups(
    slides: Sequence[SlideTiles], balance: Literal["none", "class"], min_cover: float | None
) -> dict[int | None, NDArray[np.int64]]:
    """Tiles of each class, or all tiles (None), as numbers counted over all slides."""
    counts = np.concatenate([tiles.class_pixels for tiles in slides])
    if min_cover is None:
        holds = counts > 0
        holds[:, 0] &= ~holds[:, 1:].any(axis=1)
    else:
        holds = tile_labels(counts, min_cover)[:, None] == np.arange(counts.shape[1])
    if balance == "none":
        # Not all tiles, as those where everything is ignored teach nothing.
        usable = np.flatnonzero(holds.any(axis=1))
        return {None: usable} if len(usable) else {}
    return {index: np.flatnonzero(holds) for index, holds in enumerate(holds.T) if holds.any()}


def _rarest(slides: Sequence[SlideTiles], min_cover: float | None) -> list[NDArray[np.int64]]:
    """The class of each tile that fewest tiles hold; its label where tiles are classified."""
    groups = _groups(slides, "class", min_cover)
    rarest = np.full(sum(map(len, slides)), IGNORE, np.int64)
    for index, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        rarest[group] = index or 0
    return np.split(rarest, np.cumsum([len(tiles) for tiles in slides])[:-1])


def _even_weights(groups: Sequence[NDArray[np.int64]], tiles: int) -> NDArray[np.float64]:
    """Share of the draws of each tile where every group has the same share."""
    weights = np.zeros(tiles)
    for group in groups:
        weights[group] += 1 / (len(groups) * len(group))
    return weights


def _limited(weights: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """The weights with none above `most`; the others are scaled so that they still add up to 1."""
    limited, free = weights.copy(), weights > 0
    while free.any():
        rest = max(0.0, 1 - most * np.count_nonzero((weights > 0) & ~free))
        limited[free] = weights[free] * (rest / weights[free].sum())
        above = limited > most
        if not (above & free).any():
            break
        limited[above], free = most, free & ~above
    limited /= limited.sum()
    return limited
