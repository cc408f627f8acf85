"""Asks what CPU time augmenting a tile takes, beside what albumentations offers for it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
import albumentations as A
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from pathoseg.tiles.stain import Method, StainNormaliser
from pathoseg.tiles.tile_options import AugmentOptions
from pathoseg.tiles.transform import Augmentation

TILE = 512
NOTHING: dict[str, Any] = {"flip": False, "warp": 0, "stain": 0, "colour": 0, "blur": 0, "noise": 0}
STEPS: dict[str, dict[str, Any]] = {
    "flip": {"flip": True},
    "warp": {"warp": 1},
    "stain": {"stain": 0.1},
    "colour": {"colour": 0.1},
    "blur": {"blur": 1},
    "noise": {"noise": 1},
}
PEERS = {
    "albumentations_d4": A.Compose([A.D4(p=1)]),
    "albumentations_affine": A.Compose([A.Affine(scale=(0.9, 1.1), rotate=(-15, 15), p=1)]),
    "albumentations_elastic": A.Compose([A.ElasticTransform(alpha=50, sigma=8, p=1)]),
    "albumentations_hestain": A.Compose([A.HEStain(p=1)]),
}
METHODS: tuple[Method, ...] = ("macenko", "reinhard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    image, mask = tile()
    ways = ours(image, mask) | peers(image, mask)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(3 if options.quick else 12):
        for name, way in ways.items():
            for seed in range(5 * number, 5 * number + 5):
                start = time.process_time()
                way(seed)
                times[name].append(time.process_time() - start)
    figures = {f"{name}_ms": 1e3 * statistics.median(taken) for name, taken in times.items()}
    figures["default_mean_ms"] = 1e3 * statistics.mean(times["default"])
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def tile() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blurred noise in the colours of H&E, and a mask of its dark parts."""
    noise = np.random.default_rng(0).integers(0, 256, (TILE, TILE), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3)), dtype=float)
    share = (soft - soft.min()) / np.ptp(soft)
    purple, pink = np.array([90, 50, 140]), np.array([235, 190, 220])
    image = purple + share[..., None] * (pink - purple)
    return image.astype(np.uint8), (share < 0.5).astype(np.uint8)


def ours(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> dict[str, Callable[[int], object]]:
    ways: dict[str, Callable[[int], object]] = {}
    choices = {name: {**NOTHING, **step} for name, step in STEPS.items()}
    choices["default"] = {}
    for name, options in choices.items():
        augmentation = Augmentation(AugmentOptions(**options))
        ways[name] = partial(_vary, augmentation, image, mask)
    for method in METHODS:
        normaliser = StainNormaliser.fit(image, method, Path("tile"))
        ways[method] = partial(_normalise, normaliser, image)
    return ways


def _vary(
    augmentation: Augmentation, image: NDArray[np.uint8], mask: NDArray[np.uint8], seed: int
) -> object:
    return augmentation(image, mask, np.random.default_rng(seed))


def _normalise(normaliser: StainNormaliser, image: NDArray[np.uint8], _: int) -> object:
    return normaliser.apply(image)


def peers(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> dict[str, Callable[[int], object]]:
    return {name: partial(_pipe, pipeline, image, mask) for name, pipeline in PEERS.items()}


def _pipe(pipeline: Any, image: NDArray[np.uint8], mask: NDArray[np.uint8], _: int) -> object:
    return pipeline(image=image, mask=mask)


if __name__ == "__main__":
    main()
