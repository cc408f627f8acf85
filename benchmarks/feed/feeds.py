"""Runs one feed of augmented tiles in a process of its own and says what an epoch takes.

Called by main.py as `feeds.py JOB`, JOB being JSON with the fields of `Job`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openslide
import shapely
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pathoseg.annotations.annotation import Annotation, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.geometry import Box, Frame
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.dataset import TrainingSet
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.tile_options import AugmentOptions, TissueOptions
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles
from pathoseg.tiles.tissue import find_tissue
from pathoseg.tiles.transform import Augmentation

MPP, TILE, BATCH = 0.5, 1024, 4
CLASSES = ClassTable(("tumour", "stroma"), ((255, 0, 0), (0, 255, 0)))
NOT_INSTALLED = 3

Sample = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        way: "slide", "cache", "dataloader" or "monai"; "fill" makes the cache.
        slide: The slide's file.
        cache: Folder of the cache.
        workers: Reader threads, or worker processes of a DataLoader.
        cores: Number of cores that the process may use.
        tiles: Number of tiles an epoch.
    """

    way: str
    slide: str
    cache: str
    workers: int
    cores: int
    tiles: int


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.cores])
    torch.set_num_threads(1)
    cv2.setNumThreads(1)  # before its first use: a process forked later cannot
    pool = SlidePool(lambda path: open_slide(path, MPP))
    with closing(pool):
        tiles = slide_tiles(job, pool)
        if job.way == "fill":
            for _ in tiles.fill(job.workers):
                pass
            taken = {"tiles": float(len(tiles))}
        elif job.way in ("slide", "cache"):
            taken = timed(ours(tiles, job))
        else:
            taken = timed(theirs(tiles, job))
    print(json.dumps(taken))


def slide_tiles(job: Job, pool: SlidePool) -> SlideTiles:
    """All tissue tiles of the slide at its own resolution, with 400 discs of two classes."""
    path = Path(job.slide)
    with open_slide(path, MPP) as slide:
        frame = Frame.at(slide.size, slide.mpp, MPP)
        tissue = find_tissue(slide, TissueOptions())
        size = slide.size
    rng = np.random.default_rng(0)
    centres = rng.uniform(0, 1, (400, 2)) * (size.width, size.height)
    discs = [
        Annotation(shapely.Point(centre).buffer(rng.uniform(100, 400)), CLASSES.names[number % 2])
        for number, centre in enumerate(centres)
    ]
    note = Path(job.cache) / "discs.geojson"
    note.touch()  # counts of classes are kept beside the cache, by what this file holds
    labels = PolygonLabels(note, discs, size)
    cache = Path(job.cache) if job.way in ("fill", "cache") else None
    options = TileOptions(TILE, offsets="random", cache=cache)
    return cut_tiles(path, frame, labels, AnnotationOptions(), CLASSES, tissue, options, pool)


def timed(epoch: Callable[[int], Iterable[int]]) -> dict[str, float]:
    """The second epoch, from its start to its last batch; the first one warms up.

    Args:
        epoch: Number → sizes of its batches, as they come.
    """
    sum(epoch(0))
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(epoch(1))
    return {
        "tiles": float(count),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,  # without worker processes
    }


def ours(tiles: SlideTiles, job: Job) -> Callable[[int], Iterable[int]]:
    training = TrainingSet(
        [tiles],
        BATCH,
        seed=0,
        samples_per_epoch=job.tiles,
        offsets="random",
        augmentation=Augmentation(AugmentOptions()),
        threads=job.workers,
    )

    def epoch(number: int) -> Iterable[int]:
        for batch in training.batches(number):
            images, masks = torch.from_numpy(batch.images), torch.from_numpy(batch.masks)
            assert len(images) == len(masks)
            yield len(images)

    return epoch


def theirs(tiles: SlideTiles, job: Job) -> Callable[[int], Iterable[int]]:
    positions = np.random.default_rng(0).permutation(np.arange(job.tiles) % len(tiles)).tolist()
    loader: Any
    if job.way == "dataloader":
        dataset = OpenSlideTiles(tiles, positions)
        loader = DataLoader(
            dataset, BATCH, num_workers=job.workers, persistent_workers=job.workers > 0
        )
    else:
        loader = monai_loader(tiles, positions, job.workers)

    def epoch(_: int) -> Iterable[int]:
        for images, masks in loader:
            assert len(images) == len(masks)
            yield len(images)

    return epoch


class Changed:
    """The mask of a tile, and both of them augmented as ours are."""

    def __init__(self, tiles: SlideTiles) -> None:
        self._labels, self._frame = tiles.labels, tiles.frame
        self._augmentation: Augmentation | None = None

    def __call__(self, image: NDArray[np.uint8], box: Box, seed: int) -> tuple[Any, Any]:
        if self._augmentation is None:  # a worker's own, as it is sent to none
            self._augmentation = Augmentation(AugmentOptions())
        mask = self._labels.rasterise(box, self._frame, CLASSES)
        image, mask = self._augmentation(image, mask, np.random.default_rng(seed))
        return torch.from_numpy(image), torch.from_numpy(mask)


class OpenSlideTiles(Dataset[tuple[Any, Any]]):
    """Read tiles as a plain script does: one OpenSlide a worker, `read_region`, Pillow to RGB."""

    def __init__(self, tiles: SlideTiles, positions: Sequence[int]) -> None:
        self._path, self._changed = tiles.slide, Changed(tiles)
        self._boxes = [tiles.box(position) for position in positions]
        self._slide: openslide.OpenSlide | None = None

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._slide is None:
            self._slide = openslide.OpenSlide(self._path)
        box = self._boxes[index]
        image = self._slide.read_region((box.x, box.y), 0, (box.width, box.height)).convert("RGB")
        return self._changed(np.asarray(image), box, index)


def monai_loader(tiles: SlideTiles, positions: Sequence[int], workers: int) -> Any:
    try:
        from monai.data import DataLoader as MonaiLoader
        from monai.data import PatchWSIDataset
    except ImportError:
        raise SystemExit(NOT_INSTALLED) from None
    boxes = [tiles.box(position) for position in positions]
    changed = Changed(tiles)

    def transform(sample: dict[str, Any]) -> tuple[Any, Any]:
        image, number = sample["image"], sample["image"].meta["number"]
        pixels = np.ascontiguousarray(image.numpy().transpose(1, 2, 0))
        return changed(pixels, boxes[number], number)

    data = [
        {"image": str(tiles.slide), "location": (box.y, box.x), "number": number}
        for number, box in enumerate(boxes)
    ]
    dataset = PatchWSIDataset(
        data,
        patch_size=TILE,
        patch_level=0,
        transform=transform,
        include_label=False,
        center_location=False,
        additional_meta_keys=["number"],
        reader="OpenSlide",
    )
    return MonaiLoader(
        dataset, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
    )


if __name__ == "__main__":
    main()
