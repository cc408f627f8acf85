"""Asks where labels lie, how much of the truth they can give back, and what making them takes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image

from pathoseg.annotations.annotation import Annotation, ClassTable, Labels
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.reading import read_labels
from pathoseg.geometry import Box, Frame, Mpp, Size

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PATHOSEG_DATA", ROOT.parent / "shared" / "data")) / "monuseg-train"
NATIVE, COARSE = Mpp(0.25, 0.25), 0.5
CELL = 64  # level-0 pixels around each ellipse
TABLE = ClassTable(("nucleus", "tissue"), ((255, 0, 0), (0, 255, 0)))
RULES: tuple[Literal["majority", "centre"], ...] = ("majority", "centre")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer outlines, images and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    side = 24 if options.quick else 64
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        areas = ellipses(side, np.random.default_rng(0))
        for name, make in sources(areas, Size(side * CELL, side * CELL), Path(folder)).items():
            for rule in RULES:
                x, y = shift(make(rule), areas, side)
                figures |= {f"shift_x_{name}_{rule}": x, f"shift_y_{name}_{rule}": y}
            figures |= {f"{key}_{name}": value for key, value in cost(make, side, options).items()}
    if DATA.is_dir():
        masks = sorted((DATA / "masks").glob("*.png"))[: 5 if options.quick else None]
        for rule in RULES:
            scores = [best_dice(mask, rule) for mask in masks]
            figures[f"best_dice_{rule}"] = statistics.mean(scores)
        figures |= real_outlines(options.quick)
    else:
        print(f"without MoNuSeg: there is no {DATA} (set PATHOSEG_DATA)")
    for key, value in figures.items():
        print(f"{key:32} {value:9.4f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def ellipses(side: int, rng: np.random.Generator) -> list[shapely.Polygon]:
    """One turned ellipse, as large as a nucleus, somewhere in each of side × side cells."""
    areas = []
    for row, column in product(range(side), repeat=2):
        circle = shapely.Point(0, 0).buffer(1)
        ellipse = shapely.affinity.scale(circle, *rng.uniform(8, 18, 2))
        turned = shapely.affinity.rotate(ellipse, rng.uniform(0, 180))
        x, y = (np.array([column, row]) + 0.5) * CELL + rng.uniform(-8, 8, 2)
        areas.append(shapely.affinity.translate(turned, x, y))
    return areas


def sources(
    areas: list[shapely.Polygon], slide: Size, folder: Path
) -> dict[str, Callable[[Literal["majority", "centre"]], Labels]]:
    """The same ellipses in a large outline of another class, and as a mask at level 0."""
    around = Annotation(shapely.box(-1, -1, slide.width + 1, slide.height + 1), "tissue")
    outlines = [around, *(Annotation(area, "nucleus") for area in areas)]
    path = folder / "slide.geojson"

    def drawn(rule: Literal["majority", "centre"]) -> Labels:
        return PolygonLabels(path, outlines, slide, AnnotationOptions(labels=rule))

    frame = Frame.at(slide, NATIVE, NATIVE.x)
    image = folder / "slide_mask.png"
    whole = Box(0, 0, frame.size.width, frame.size.height)
    Image.fromarray(drawn("majority").rasterise(whole, frame, TABLE)).save(image)
    return {
        "outlines": drawn,
        "mask": lambda rule: MaskLabels(image, slide, AnnotationOptions(labels=rule)),
    }


def shift(labels: Labels, areas: list[shapely.Polygon], side: int) -> tuple[float, float]:
    """Measure how labels at 0.5 µm are displaced: the mean error of the centroids of ellipses.

    Args:
        labels: The ellipses, one in each of side × side cells.
        areas: The same ellipses as polygons, in level-0 pixels, row by row.
        side: Cells a side.

    Returns:
        Displacement to the right and down, in pixels of 0.5 µm.
    """
    frame = Frame.at(Size(side * CELL, side * CELL), NATIVE, COARSE)
    mask = labels.rasterise(Box(0, 0, frame.size.width, frame.size.height), frame, TABLE)
    cell = CELL // 2
    cells = (mask == 1).reshape(side, cell, side, cell).swapaxes(1, 2).reshape(-1, cell, cell)
    along = np.arange(cell) + 0.5
    count = cells.sum(axis=(1, 2))
    found = np.stack([cells.sum(axis=1) @ along, cells.sum(axis=2) @ along]) / count
    corner = np.stack(np.divmod(np.arange(side * side), side))[::-1] * cell
    truth = np.array([(area.centroid.x, area.centroid.y) for area in areas]).T / 2
    x, y = (found + corner - truth).mean(axis=1).tolist()
    return x, y


def cost(
    make: Callable[[Literal["majority", "centre"]], Labels], side: int, options: argparse.Namespace
) -> dict[str, float]:
    """Megapixels a second of tiles of 512 px, by rule in turn; MiB that the whole takes at once."""
    frame = Frame.at(Size(side * CELL, side * CELL), NATIVE, COARSE)
    width, height = frame.size.width, frame.size.height
    tiles = [Box(x, y, 512, 512) for y in range(0, height, 512) for x in range(0, width, 512)]
    labels = {rule: make(rule) for rule in RULES}
    figures = {}
    for rule, one in labels.items():
        started = time.process_time()
        one.rasterise(Box(0, 0, 1, 1), frame, TABLE)
        figures[f"first_s_{rule}"] = time.process_time() - started
    times: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(2 if options.quick else 7):
        for rule, one in labels.items():
            started = time.process_time()
            for box in tiles:
                one.rasterise(box, frame, TABLE)
            times[rule].append(time.process_time() - started)
    for rule, one in labels.items():
        figures[f"mpx_per_s_{rule}"] = len(tiles) * 512**2 / 1e6 / statistics.median(times[rule])
        tracemalloc.start()
        one.rasterise(Box(0, 0, width, height), frame, TABLE)
        figures[f"peak_mib_{rule}"] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
    return figures


def best_dice(path: Path, rule: Literal["majority", "centre"]) -> float:
    """Dice of a mask at 0.25 µm with its own labels at 0.5 µm, each pixel of which is 2 × 2."""
    with Image.open(path) as image:
        truth: NDArray[np.bool_] = np.asarray(image) > 0
    slide = Size(truth.shape[1], truth.shape[0])
    frame = Frame.at(slide, NATIVE, COARSE)
    labels = MaskLabels(path, slide, AnnotationOptions(mask="binary", labels=rule))
    box = Box(0, 0, frame.size.width, frame.size.height)
    found = labels.rasterise(box, frame, TABLE).repeat(2, axis=0).repeat(2, axis=1)[: len(truth)]
    back = found[:, : truth.shape[1]] == 1
    return 2 * float((back & truth).sum()) / float(back.sum() + truth.sum())


def real_outlines(quick: bool) -> dict[str, float]:
    """Time the labels of MoNuSeg's outlines at 0.5 µm, each image whole, the rules in turn.

    Returns:
        Milliseconds an image, by the name of the figure.
    """
    files = sorted((DATA / "annotations_xml").glob("*.xml"))[: 3 if quick else None]
    slide = Size(1000, 1000)
    frame = Frame.at(slide, NATIVE, COARSE)
    times: dict[str, list[float]] = {rule: [] for rule in RULES}
    for path, rule in product(files, RULES):
        options = AnnotationOptions(labels=rule, unclassified="nucleus")
        labels = read_labels(path, slide, (0, 0), options)
        table = ClassTable(tuple(labels.classes()), ((9, 9, 9),) * len(labels.classes()))
        labels.rasterise(Box(0, 0, 1, 1), frame, table)
        started = time.process_time()
        labels.rasterise(Box(0, 0, frame.size.width, frame.size.height), frame, table)
        times[rule].append(time.process_time() - started)
    return {f"monuseg_ms_{rule}": 1000 * statistics.median(times[rule]) for rule in RULES}


if __name__ == "__main__":
    main()
