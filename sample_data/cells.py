"""The cells that a mosaic is pasted from: painted cores, or real tiles with their annotations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from aperio_svs import Pixels
from numpy.typing import NDArray
from PIL import Image
from scene import make_scene
from shapely import LineString
from texture import Stain, covered, paint

from pathoseg.annotations.annotation import Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.reading import class_table, find_annotation, read_labels
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.slides.folder import find_slides
from pathoseg.slides.slide import open_slide

CELL = 4096
"""Side of a cell in level-0 pixels."""

MPP = 0.25
"""Microns per level-0 pixel of a mosaic."""

CLASSES = {"gland": 1, "tumour": 2}
STAIN = Stain(1.0, 1.0, 0.0, (243, 243, 241), (1.0, 1.0, 1.0))

_PAINTED = CELL // 2  # scenes are painted at 0.5 µm
_MOST_TILES = 16


@dataclass(frozen=True, eq=False)
class Cell:
    """One square of a mosaic.

    Attributes:
        image: RGB, shape (CELL, CELL, 3).
        mask: Class indices, shape (CELL, CELL).
        tissue: The share of it that is tissue.
    """

    image: Pixels
    mask: NDArray[np.uint8]
    tissue: float


def glass() -> Cell:
    """A cell of empty glass."""
    image = np.broadcast_to(np.array(STAIN.glass, np.uint8), (CELL, CELL, 3))
    return Cell(image, np.zeros((CELL, CELL), np.uint8), 0.0)


def painted_cells(count: int, rng: np.random.Generator) -> list[Cell]:
    """Different sections, each within its cell, as a scanner of 0.25 µm sees them."""
    return [_painted(rng) for _ in range(count)]


def _painted(rng: np.random.Generator) -> Cell:
    scene = dataclasses.replace(make_scene(_PAINTED, _PAINTED, rng), pen=LineString())
    mask = np.zeros((_PAINTED, _PAINTED), np.uint8)
    for region in scene.regions:
        index = CLASSES[region.class_name]
        np.maximum(mask, covered([region.geometry], _PAINTED, _PAINTED, index), out=mask)
    image = Image.fromarray(paint(scene, STAIN, rng))
    return Cell(
        np.asarray(image.resize((CELL, CELL), Image.Resampling.BICUBIC)),
        mask.repeat(2, axis=0).repeat(2, axis=1),
        scene.tissue.area / _PAINTED**2,
    )


def real_cells(folder: Path) -> list[Cell]:
    """A cell for each annotated tile of a folder, at most 16, evenly chosen.

    Of a tile (or slide) the middle is taken, pixel for pixel; one that is smaller than a cell fills
    it with its mirror images. Classes are numbered as `train` does, ignored pixels are 255.

    Raises:
        PathosegError: A tile or its annotation cannot be read, or none is annotated.
    """
    found = find_slides([folder]).values()
    annotated = [(tile, find_annotation(tile, None)) for tile in found]
    pairs = [(tile, annotation) for tile, annotation in annotated if annotation is not None]
    if not pairs:
        raise PathosegError(
            f"No tile in {folder} has an annotation.", "Put X_mask.png or X.geojson beside X.png."
        )
    chosen = np.linspace(0, len(pairs) - 1, min(len(pairs), _MOST_TILES)).round().astype(int)
    tiles = [_read(*pairs[number]) for number in chosen]
    classes = class_table([labels for _, labels, _ in tiles], None)
    cells = []
    for image, labels, frame in tiles:
        box = _middle(frame)
        mask = labels.rasterise(box, frame, classes)
        cells.append(Cell(_mirrored(image), _mirrored(mask), 1.0))
    return cells


def _read(tile: Path, annotation: Path) -> tuple[Pixels, Labels, Frame]:
    with open_slide(tile, MPP) as slide:
        labels = read_labels(annotation, slide.size, slide.origin, AnnotationOptions())
        frame = Frame.at(slide.size, slide.mpp, slide.mpp.mean)
        return slide.read_level(0, _middle(frame)), labels, frame


def _middle(frame: Frame) -> Box:
    width, height = min(CELL, frame.size.width), min(CELL, frame.size.height)
    return Box((frame.size.width - width) // 2, (frame.size.height - height) // 2, width, height)


def _mirrored(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    edges = [(0, CELL - height), (0, CELL - width), (0, 0)]
    return np.pad(pixels, edges[: pixels.ndim], mode="symmetric")
