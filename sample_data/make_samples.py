"""Writes the sample slides: synthetic, seeded Aperio pyramids with QuPath outlines beside them."""

from __future__ import annotations

import argparse
import csv
import json
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from aperio_svs import Level, cut, shrink, write_svs
from mosaic import write_mosaic
from nuclei import nuclei_collection
from scene import MPP, Region, make_scene
from shapely import transform
from shapely.geometry import mapping
from texture import Stain, paint

CLASS_COLOURS = {"gland": (46, 139, 87), "tumour": (200, 30, 60)}

BLUE, GREEN, BLACK, RED = (0.1, 0.22, 0.6), (0.1, 0.5, 0.3), (0.12, 0.12, 0.14), (0.75, 0.1, 0.15)


@dataclass(frozen=True)
class Sample:
    """One slide: whose it is, what it is for, its size in pixels and its look."""

    name: str
    patient: str
    split: str
    width: int
    height: int
    stain: Stain


SAMPLES = (
    Sample("sample_01", "P1", "train", 3072, 2560, Stain(1.0, 1.0, 0.0, (243, 243, 241), BLUE)),
    Sample("sample_02", "P1", "train", 3072, 2560, Stain(1.05, 0.9, 0.02, (242, 242, 240), GREEN)),
    Sample("sample_03", "P2", "train", 3001, 2507, Stain(0.8, 1.1, 0.06, (238, 236, 236), BLACK)),
    Sample("sample_04", "P3", "train", 3072, 2560, Stain(1.25, 0.8, -0.08, (246, 246, 246), RED)),
    Sample("sample_05", "P4", "val", 2560, 2560, Stain(0.9, 0.85, 0.04, (240, 241, 243), BLUE)),
    Sample("sample_06", "P5", "test", 3072, 2560, Stain(1.1, 1.0, -0.04, (244, 243, 239), BLACK)),
)


def write_samples(folder: Path) -> None:
    """Every slide of SAMPLES with its outlines, and `slides.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, sample in enumerate(SAMPLES, start=1):
        write_sample(sample, seed, folder)
    with (folder / "slides.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("slide", "patient", "split"))
        writer.writerows((f"{s.name}.svs", s.patient, s.split) for s in SAMPLES)


def write_sample(sample: Sample, seed: int, folder: Path) -> None:
    """`<name>.svs`, `<name>.geojson`, and `nuclei/<name>.geojson`."""
    rng = np.random.default_rng(seed)
    scene = make_scene(sample.width, sample.height, rng)
    image = paint(scene, sample.stain, rng)
    levels = [image, shrink(image, 4), shrink(image, 16)]
    write_svs(
        folder / f"{sample.name}.svs",
        [Level(level.shape[1], level.shape[0], cut(level)) for level in levels],
        thumbnail=shrink(image, 8),
        title=sample.name,
        mpp=MPP,
    )
    collection = {
        "type": "FeatureCollection",
        "features": [_feature(region, rng) for region in scene.regions],
    }
    (folder / f"{sample.name}.geojson").write_text(json.dumps(collection) + "\n")
    (folder / "nuclei").mkdir(exist_ok=True)
    compact = json.dumps(nuclei_collection(scene), separators=(",", ":"))
    (folder / "nuclei" / f"{sample.name}.geojson").write_text(compact + "\n")


def _feature(region: Region, rng: np.random.Generator) -> dict[str, object]:
    """A region as QuPath writes it; level-0 pixels, to a hundredth."""
    rounded = transform(region.geometry, lambda points: points.round(2))
    return {
        "type": "Feature",
        "id": str(uuid.UUID(bytes=rng.bytes(16), version=4)),
        "geometry": mapping(rounded),
        "properties": {
            "objectType": "annotation",
            "classification": {
                "name": region.class_name,
                "color": CLASS_COLOURS[region.class_name],
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder, or with --size the file to write")
    parser.add_argument("--size", type=int, help="write one slide with sides of SIZE pixels")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="with --size: paste annotated tiles of DIR instead of painted ones",
    )
    given = parser.parse_args()
    if given.size is None:
        if given.source is not None:
            parser.error("--from belongs to --size")
        write_samples(given.out or Path(__file__).parent)
    elif given.out is None or given.size < 1:
        parser.error("--size needs a positive number of pixels and --out FILE")
    else:
        write_mosaic(given.out, given.size, given.source)


if __name__ == "__main__":
    main()
