"""A small slide made of an array, its labels, and what cuts it into tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import shapely
from numpy.typing import NDArray

from pathoseg.annotations.annotation import Annotation, ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.errors import UnreadableError
from pathoseg.geometry import Box, Frame, Level, Mpp, Size
from pathoseg.slides.slide import Slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.tiles.tiles import SlideTiles, TileOptions, cut_tiles

CLASSES = ClassTable(("tumor", "stroma"), ((255, 0, 0), (0, 255, 0)))


class ArraySlide:
    """One level of pixels in memory; fails where it is broken, and when two threads read it."""

    vendor = "array"
    origin = (0, 0)
    reduced: tuple[Level, ...] = ()
    warnings: tuple[str, ...] = ()
    held_pixels = 0

    def __init__(self, path: Path, pixels: NDArray[np.uint8], broken: Box | None = None) -> None:
        self.path, self._pixels, self._broken = path, pixels, broken
        self.size = Size(pixels.shape[1], pixels.shape[0])
        self.levels = (Level(self.size, 1.0),)
        self.mpp = Mpp(0.5, 0.5)
        self.closed = False
        self._reading = threading.Lock()

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        assert not self.closed
        assert self._reading.acquire(blocking=False), "two threads read one slide"
        try:
            if self._broken is not None and box.intersection(self._broken):
                raise UnreadableError(f"{self.path} is broken.", "Scan it again.")
            return self._pixels[box.y : box.bottom, box.x : box.right]
        finally:
            self._reading.release()

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Everywhere:
    """Tissue on the whole slide, or on a share of it everywhere."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def share(self, box: Box, frame: Frame) -> float:
        return self._share


@dataclass
class Bench:
    """A slide of 300 × 200 px at 0.5 µm with two regions, and what it takes to cut it."""

    path: Path
    pixels: NDArray[np.uint8]
    labels: PolygonLabels
    broken: Box | None = None
    opened: list[ArraySlide] = field(default_factory=list)

    classes = CLASSES

    @property
    def frame(self) -> Frame:
        return Frame.at(Size(300, 200), Mpp(0.5, 0.5), 0.5)

    def open(self, path: Path) -> Slide:
        slide = ArraySlide(path, self.pixels, self.broken)
        self.opened.append(slide)
        return slide

    def cut(self, tissue: float = 1.0, **options: Any) -> SlideTiles:
        return cut_tiles(
            self.path,
            self.frame,
            self.labels,
            AnnotationOptions(),
            CLASSES,
            Everywhere(tissue),
            TileOptions(**{"tile": 64, **options}),
            SlidePool(self.open),
        )


def bench(folder: Path, name: str = "slide.svs", seed: int = 0) -> Bench:
    path, note = folder / name, folder / f"{name}.geojson"
    path.write_bytes(np.random.default_rng(seed).bytes(200_000))
    note.write_text("{}")
    regions = [
        Annotation(shapely.box(10, 10, 60, 40), "tumor"),
        Annotation(shapely.box(200, 100, 290, 190), "stroma"),
    ]
    pixels = np.random.default_rng(seed).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    return Bench(path, pixels, PolygonLabels(note, regions, Size(300, 200)))


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    """Makes benches in the test's folder, of any name and seed."""
    return lambda name="slide.svs", seed=0: bench(tmp_path, name, seed)
