"""Writes slides on which the class of a gland depends on what lies 500 µm away, and on it alone.

A gland is `inflamed` in a ring around an infiltrate of lymphocytes, `resting` in one around a group
of vessels; its nearest wall is 240 µm from them at least. They are scanned at 2.5 µm: each gland is
some 50 pixels across.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from aperio_svs import Level, cut, shrink, write_svs
from scene import HUBS, MPP, make_hub_scene
from shapely import transform
from shapely.geometry import mapping
from texture import Stain, paint

SCANNED = 5
"""Painted pixels along one of the slide, which is 2.5 µm wide."""

SIZE = (5120, 3072)
"""Painted pixels: 2,560 × 1,536 µm, with two hubs."""

SPLITS = {"train": 12, "test": 4}
"""Slides of each."""


def write_cued(folder: Path) -> None:
    """Writes the slides of SPLITS with their outlines, and `slides.csv`, where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, str]] = []
    for split, count in SPLITS.items():
        for number in range(count):
            # Every pair of classes as often as the others.
            classes = [tuple(HUBS)[number >> bit & 1] for bit in range(2)]
            name = f"{split}_{number:02}"
            _write(folder / name, classes, np.random.default_rng([len(rows), 2021]))
            rows.append((f"{name}.svs", name, split))
    with (folder / "slides.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("slide", "patient", "split"))
        writer.writerows(rows)


def _write(stem: Path, classes: Sequence[str], rng: np.random.Generator) -> None:
    scene = make_hub_scene(classes, *SIZE, rng)
    glass = (243, 243, 241)
    stain = Stain(rng.uniform(0.85, 1.15), rng.uniform(0.85, 1.15), 0.0, glass, (1.0, 1.0, 1.0))
    image = shrink(paint(scene, stain, rng), SCANNED)
    levels = [image, shrink(image, 4)]
    write_svs(
        stem.with_suffix(".svs"),
        [Level(level.shape[1], level.shape[0], cut(level)) for level in levels],
        thumbnail=shrink(image, 4),
        title=stem.name,
        mpp=MPP * SCANNED,
    )
    features = [
        {
            "type": "Feature",
            "geometry": mapping(transform(region.geometry, lambda at: (at / SCANNED).round(2))),
            "properties": {
                "objectType": "annotation",
                "classification": {"name": region.class_name},
            },
        }
        for region in scene.regions
    ]
    collection = {"type": "FeatureCollection", "features": features}
    stem.with_suffix(".geojson").write_text(json.dumps(collection) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    write_cued(parser.parse_args().out)


if __name__ == "__main__":
    main()
