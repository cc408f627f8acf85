"""Random changes of a tile and its mask, each a function of the generator it is given."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.tiles.stain import jitter_stains
from pathoseg.tiles.tile_options import AugmentOptions

Image = NDArray[np.uint8]

_BEND = 128  # pixels between the knots of elastic displacements


class Augmentation:
    """Varies tiles; may be called by several threads.

    Args:
        options: What is varied and how much.
    """

    def __init__(self, options: AugmentOptions) -> None:
        self._options = options
        self._photometric = threading.local()

    def __call__(self, image: Image, mask: Image, rng: np.random.Generator) -> tuple[Image, Image]:
        """A changed copy of a tile.

        Args:
            image: RGB, shape (height, width, 3).
            mask: Class indices, shape (height, width).
            rng: The only source of chance: equal states give equal tiles.

        Returns:
            Image and mask of the same shapes. Mask values are never mixed, and 255 where the tile
            was moved away; the image is mirrored there. Quarter turns are left out where the tile
            is not square.
        """
        options = self._options
        if options.flip:
            image, mask = _flip(image, mask, rng)
        if rng.random() < options.warp:
            image, mask = _warp(image, mask, options, rng)
        if options.stain:
            image = jitter_stains(image, options.stain, rng)
        if options.colour or options.blur or options.noise:
            image = self._change_light(image, rng)
        return image, mask

    def _change_light(self, image: Image, rng: np.random.Generator) -> Image:
        # An albumentations pipeline holds its own generators, so each thread has one.
        pipeline = getattr(self._photometric, "pipeline", None)
        if pipeline is None:
            pipeline = self._photometric.pipeline = _light_pipeline(self._options)
        pipeline.set_random_seed(int(rng.integers(2**31)))
        return np.asarray(pipeline(image=image)["image"], dtype=np.uint8)


def _flip(image: Image, mask: Image, rng: np.random.Generator) -> tuple[Image, Image]:
    turns = int(rng.integers(4)) if mask.shape[0] == mask.shape[1] else 2 * int(rng.integers(2))
    mirror = bool(rng.integers(2))
    image, mask = np.rot90(image, turns), np.rot90(mask, turns)
    if mirror:
        image, mask = image[:, ::-1], mask[:, ::-1]
    return np.ascontiguousarray(image), np.ascontiguousarray(mask)


def _warp(
    image: Image, mask: Image, options: AugmentOptions, rng: np.random.Generator
) -> tuple[Image, Image]:
    """Scales, rotates, shifts and bends in one interpolation."""
    height, width = mask.shape
    x, y = _sources(height, width, options, rng)
    warped = cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)
    labels = cv2.remap(
        mask, x, y, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=IGNORE
    )
    return np.asarray(warped, dtype=np.uint8), np.asarray(labels, dtype=np.uint8)


def _sources(
    height: int, width: int, options: AugmentOptions, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the source position of each pixel: x and y, shape (height, width) each."""
    scale = 1 + options.scale * rng.uniform(-1, 1)
    angle = math.radians(options.rotate) * rng.uniform(-1, 1)
    shift_x, shift_y = options.shift * rng.uniform(-1, 1, 2)
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    across = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    down = (np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2))[:, None]
    x = np.float32(cos) * across - np.float32(sin) * down
    y = np.float32(sin) * across + np.float32(cos) * down
    x += np.float32((width - 1) / 2 + shift_x * width)
    y += np.float32((height - 1) / 2 + shift_y * height)
    if options.elastic:
        knots = (math.ceil(height / _BEND) + 1, math.ceil(width / _BEND) + 1, 2)
        steps = rng.normal(0, options.elastic, knots).astype(np.float32)
        bend = cv2.resize(steps, (width, height), interpolation=cv2.INTER_CUBIC)
        x += bend[..., 0]
        y += bend[..., 1]
    return x, y


def _light_pipeline(options: AugmentOptions) -> Any:
    """Colour, blur and noise by albumentations; seeded before each use."""
    # Before the import, which would otherwise ask the network for a newer version. And the import
    # stands here because it takes a second that segmenting a slide need not wait for.
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    # It asks the network for updates when it is imported.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    share = options.colour
    around = (1 - share, 1 + share)
    return albumentations.Compose(
        [
            albumentations.ColorJitter(
                brightness=around,
                contrast=around,
                saturation=around,
                hue=(-share / 5, share / 5),
                p=float(share > 0),
            ),
            albumentations.GaussianBlur(blur_limit=0, sigma_limit=(0.5, 1.5), p=options.blur),
            albumentations.GaussNoise(std_range=(0.01, 0.03), p=options.noise),
        ]
    )
