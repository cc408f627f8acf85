"""Batches of tiles for training: seeded, resumable, and the same on any number of ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.tiles.tiles import SlideTiles, tile_labels
from pathoseg.tiles.transform import Augmentation

# What a random stream is for, so that no two of them begin alike.
_ORDER, _CHANGES = 0, 1

Sample = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class SampleId:
    """Which tile stands where in an epoch.

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
    """

    images: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    samples: tuple[SampleId, ...]


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
        min_cover: For tile classification: leaves out tiles that nothing labels (`tile_labels`)
            and balances by label. None for segmentation.
        augmentation: Changes each tile at random.
        threads: Readers.

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
        min_cover: float | None = None,
        augmentation: Augmentation | None = None,
        threads: int = 1,
    ) -> None:
        self.slides, self.batch, self.seed = slides, batch, seed
        self._augmentation, self._threads = augmentation, threads
        self._tiles = [(s, t) for s, tiles in enumerate(slides) for t in range(len(tiles))]
        self._groups = _groups(slides, balance, min_cover) if self._tiles else []
        if not self._groups:
            raise PathosegError(
                f"None of the {len(self._tiles)} tiles of {len(slides)} slides can be learnt from.",
                "Annotate regions that lie on the slides, or lower [tiles] min_tissue.",
            )
        drawn = samples_per_epoch or len(np.unique(np.concatenate(self._groups)))
        self.steps_per_epoch = math.ceil(drawn / batch)
        # Readers are threads already; OpenCV's own would take their cores.
        cv2.setNumThreads(1)

    def order(self, epoch: int) -> tuple[SampleId, ...]:
        """Which tile comes when in an epoch: `steps_per_epoch * batch` of them."""
        rng = self._rng(_ORDER, epoch)
        count = self.steps_per_epoch * self.batch
        # Beginning at any group, so that none has the extra draw in every epoch.
        turns = (np.arange(count) + rng.integers(len(self._groups))) % len(self._groups)
        rng.shuffle(turns)
        order = np.empty(count, dtype=np.int64)
        for number, group in enumerate(self._groups):
            places = np.flatnonzero(turns == number)
            rounds = math.ceil(len(places) / len(group))
            draws = [rng.permutation(group) for _ in range(rounds)]
            order[places] = np.concatenate([*draws, group[:0]])[: len(places)]
        return tuple(
            SampleId(position, *self._tiles[tile]) for position, tile in enumerate(order.tolist())
        )

    def sample(self, epoch: int, sample: SampleId) -> Sample:
        """Image and mask of a sample of that epoch's `order`.

        Raises:
            PathosegError: The slide or the cache cannot be read.
        """
        tile = self.slides[sample.slide].read(sample.tile)
        if self._augmentation is None:
            return tile.image, tile.mask
        rng = self._rng(_CHANGES, epoch, sample.position)
        return self._augmentation(tile.image, tile.mask, rng)

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

    def _gather(self, samples: tuple[SampleId, ...], futures: list[Future[Sample]]) -> Batch:
        tile = self.slides[0].grid.tile
        images = np.empty((len(samples), tile.height, tile.width, 3), dtype=np.uint8)
        masks = np.empty(images.shape[:3], dtype=np.uint8)
        for row, future in enumerate(futures):
            images[row], masks[row] = future.result()
        return Batch(images, masks, samples)

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=purpose))


def _groups(
    slides: Sequence[SlideTiles], balance: Literal["none", "class"], min_cover: float | None
) -> list[NDArray[np.int64]]:
    """Tiles that are drawn equally often, each group as numbers counted over all slides."""
    counts = np.concatenate([tiles.class_pixels for tiles in slides])
    if min_cover is None:
        holds = counts > 0
        holds[:, 0] &= ~holds[:, 1:].any(axis=1)
    else:
        holds = tile_labels(counts, min_cover)[:, None] == np.arange(counts.shape[1])
    if balance == "none":
        # Not all tiles, as those where everything is ignored teach nothing.
        holds = np.logical_or.reduce(holds, axis=1, keepdims=True)
    return [np.flatnonzero(column) for column in holds.T if column.any()]
