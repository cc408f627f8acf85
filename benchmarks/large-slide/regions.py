"""Writes the mask and the outlines of a slide full of small regions, as `infer` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.qupath_geojson import GeoJsonWriter
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.mask_tiff import write_mask
from pathoseg.outputs.polygons import RegionTracer, write_regions

WIDTH = 24_000
"""Side of the mask: 96,000 px of a slide of 0.25 µm, at 1 µm."""

_PITCH = 24  # pixels from nucleus to nucleus
_BAND = 384
_CLASSES = ClassTable(("one", "two"), ((200, 0, 0), (0, 0, 200)))


def main() -> None:
    """`regions.py FOLDER COUNT`: writes about COUNT regions, and prints how many it wrote."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    height = round(count / (WIDTH // _PITCH)) * _PITCH
    frame = Frame(Size(WIDTH, height), 4.0, 4.0, Mpp(1.0, 1.0))
    tracer, written = RegionTracer(simplify=0.5, min_pixels=10), 0
    with GeoJsonWriter(folder / "regions.geojson", _CLASSES) as writer:

        def seen() -> Iterator[NDArray[np.uint8]]:
            nonlocal written
            for band in _bands(height):
                written += write_regions(writer, tracer.add(band), frame).total()
                yield band

        write_mask(folder / "mask.ome.tiff", frame.size, frame.mpp, seen(), _CLASSES)
        written += write_regions(writer, tracer.close(), frame).total()
    print(written)


def _bands(height: int) -> Iterator[NDArray[np.uint8]]:
    """Discs of several sizes, half of them across the edges of bands."""
    rng = np.random.default_rng(0)
    y, x = np.ogrid[:_PITCH, :_PITCH]
    distance = np.hypot(y - 11.5, x - 11.5)
    discs = np.stack([(distance < radius) * (1 + radius % 2) for radius in range(5, 10)])
    rows = np.zeros((0, WIDTH), np.uint8)
    given = 0
    while given < height:
        while len(rows) < _BAND + _PITCH:
            kinds = rng.integers(0, len(discs), WIDTH // _PITCH)
            more = np.concatenate(discs[kinds], axis=1).astype(np.uint8)
            rows = np.concatenate([rows, more])
        # The first band ends in the middle of a row of discs, and so do others.
        end = min(_BAND - _PITCH // 2 if given == 0 else _BAND, height - given)
        yield rows[:end]
        rows, given = rows[end:], given + end


if __name__ == "__main__":
    main()
