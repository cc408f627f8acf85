"""Finds, measures and writes the objects of planes, as `infer` does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from synthetic import Texture, bands, draw_cells, layout

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import InferConfig
from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.inference.publish import object_finder
from pathoseg.outputs.object_files import ObjectWriter
from pathoseg.outputs.objects import FoundObjects
from pathoseg.tiles.stain import stain_densities

CLASSES = ClassTable(("one", "two"), ((200, 0, 0), (0, 0, 200)))
Figures = dict[str, float]


def post_process(
    planes: Iterable[NDArray[np.uint8]],
    frame: Frame,
    read: Callable[[Box], NDArray[np.uint8]],
    folder: Path,
) -> Figures:
    """Write objects.geojson and objects.csv.

    Args:
        planes: Bands of the mask from top to bottom; making them is not timed.
        frame: The mask's.
        read: Returns the slide's pixels of a box of the mask.
        folder: Exists.

    Returns:
        `objects` written; `wall_s`, and in processor time `find_s` (separating and outlining),
        `read_s` (pixels and their stains) and `write_s` (measuring and writing).
    """
    finder, spent = object_finder(frame, InferConfig()), [0.0, 0.0, 0.0]
    wall = 0.0
    with ObjectWriter(folder / "objects.geojson", folder / "objects.csv", CLASSES, frame) as writer:
        for band in planes:
            began, at = time.perf_counter(), time.process_time()
            for found in map(FoundObjects.trimmed, finder.add(band)):
                times = [at, time.process_time()]
                inside = found.labels > 0
                stains = np.full((*inside.shape, 2), np.nan, np.float32)
                stains[inside] = stain_densities(read(found.box)[inside])
                times.append(time.process_time())
                writer.add(found, stains)
                times.append(at := time.process_time())
                spent = [sum(each) for each in zip(spent, np.diff(times).tolist(), strict=True)]
            spent[0] += time.process_time() - at
            wall += time.perf_counter() - began
    names = ("find_s", "read_s", "write_s")
    return {
        "objects": writer.written.total(),
        "wall_s": wall,
        **dict(zip(names, spent, strict=True)),
    }


def peak_mib() -> float:
    """Return the largest memory that this process held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def main() -> None:
    """`ours.py FOLDER COUNT WIDTH`: writes about COUNT objects, and prints the figures as JSON."""
    folder, count, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    cells, texture = draw_cells(rng), Texture(rng)
    chosen = layout(count, width, cells, rng)
    height = len(chosen) * cells.planes.shape[-1]
    frame = Frame(Size(width, height), 2.0, 2.0, Mpp(0.5, 0.5))

    def read(box: Box) -> NDArray[np.uint8]:
        return texture.read(box.x, box.y, box.width, box.height)

    figures = post_process(bands(cells, chosen), frame, read, folder)
    figures |= {
        "drawn": 4 * chosen.size,
        "touching_share": float(cells.touching[chosen].mean()) / 4,
        "peak_mib": peak_mib(),
        "geojson_mib": (folder / "objects.geojson").stat().st_size / 2**20,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
