"""Paints a scene as haematoxylin and eosin: stain amounts per pixel, then Beer-Lambert's law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rasterio.features import rasterize
from scene import MPP, Scene
from scipy.ndimage import gaussian_filter
from shapely.geometry.base import BaseGeometry

Field = NDArray[np.float32]

HAEMATOXYLIN = np.array([0.56, 0.72, 0.41], np.float32)
EOSIN = np.array([0.22, 0.80, 0.56], np.float32)
"""Optical density in red, green and blue of one unit of stain."""


@dataclass(frozen=True)
class Stain:
    """The colours of one laboratory's stains and of one scanner.

    Attributes:
        haematoxylin: Amount relative to the average laboratory.
        eosin: The same for eosin.
        hue: Added to eosin's density in blue: above 0 more orange, below 0 more violet.
        glass: Red, green and blue of empty glass, 0 to 255.
        ink: Red, green and blue that the pen lets through, 0 to 1.
    """

    haematoxylin: float
    eosin: float
    hue: float
    glass: tuple[int, int, int]
    ink: tuple[float, float, float]


def covered(
    shapes: Sequence[BaseGeometry], width: int, height: int, value: int = 1
) -> NDArray[np.uint8]:
    """`value` where a pixel's centre lies in a shape, else 0; shape (height, width)."""
    mask = np.zeros((height, width), np.uint8)
    filled = [(shape, value) for shape in shapes if not shape.is_empty]
    if filled:
        rasterize(filled, out=mask)
    return mask


def paint(scene: Scene, stain: Stain, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The scene as RGB pixels, shape (height, width, 3)."""
    width, height = scene.width, scene.height

    def soft(shapes: Sequence[BaseGeometry], sigma: float) -> Field:
        return _blurred(covered(shapes, width, height).astype(np.float32), sigma)

    tissue = soft([scene.tissue], 3) * (1 - soft(scene.clearings, 1.5))
    epithelium = soft([region.geometry for region in scene.regions], 1.5)

    grain = _noise(height, width, 3, rng)
    patchy = 1 + 0.15 * _noise(height, width, 300, rng)
    fibres = _fibres(height, width, rng)
    eosin = (0.28 + 0.28 * fibres) * (1 - epithelium) + (0.38 + 0.03 * grain) * epithelium
    haematoxylin = 0.07 * (1 - epithelium) + 0.16 * epithelium
    nuclei = _nuclei(scene)
    haematoxylin += nuclei * (0.75 + 0.10 * grain)
    eosin *= 1 - 0.4 * np.minimum(nuclei, 1)
    del nuclei, grain, epithelium, fibres

    thickness = tissue * patchy * (1 + _fold(scene))
    haematoxylin *= thickness * stain.haematoxylin
    eosin *= thickness * stain.eosin
    eosin_density = EOSIN + np.array([0, 0, stain.hue], np.float32)

    light = np.empty((height, width, 3), np.uint8)
    slope = np.linspace(1.0, 0.985, width, dtype=np.float32)
    ink = 0.9 * soft([scene.pen.buffer(35 / MPP)], 4)
    blur = _spot(scene)
    for channel in range(3):
        density = haematoxylin * HAEMATOXYLIN[channel] + eosin * eosin_density[channel]
        density += blur * (_blurred(density, 3) - density)
        seen = stain.glass[channel] * slope * np.exp(-density)
        seen *= 1 - ink * (1 - stain.ink[channel])
        light[..., channel] = np.clip(seen, 0, 255).round()
    return light


def _blurred(field: Field, sigma: float) -> Field:
    blurred: Field = gaussian_filter(field, sigma)
    return blurred


def _noise(height: int, width: int, scale: float, rng: np.random.Generator) -> Field:
    """Smooth noise of unit variance at its knots, which lie `scale` pixels apart."""
    knots = (math.ceil(height / scale) + 3, math.ceil(width / scale) + 3)
    coarse = Image.fromarray(rng.standard_normal(knots, np.float32))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def _fibres(height: int, width: int, rng: np.random.Generator) -> Field:
    """Wavy bundles of collagen, 0 to 1: the contour lines of a tilted, rumpled surface."""
    y, x = np.ogrid[:height, :width]
    bundles = np.zeros((height, width), np.float32)
    for wavelength, direction in ((26, 1.2), (11, 0.9)):
        surface = (np.cos(direction) * x + np.sin(direction) * y).astype(np.float32) / wavelength
        surface += 1.5 * _noise(height, width, 220, rng) + 0.4 * _noise(height, width, 45, rng)
        bundles += _noise(height, width, 60, rng) * np.sin(2 * np.pi * surface)
    return (0.5 + 0.4 * bundles).clip(0, 1)


def _nuclei(scene: Scene) -> Field:
    """Amount of chromatin per pixel: soft-edged ellipses, the darker one where two overlap."""
    amount = np.zeros((scene.height, scene.width), np.float32)
    for x, y, length, breadth, angle, strength in scene.nuclei:
        reach = math.ceil(max(length, breadth)) + 2
        left, top = max(0, int(x) - reach), max(0, int(y) - reach)
        patch = amount[top : int(y) + reach + 1, left : int(x) + reach + 1]
        rows, columns = np.ogrid[top : top + patch.shape[0], left : left + patch.shape[1]]
        dx, dy = columns + 0.5 - x, rows + 0.5 - y
        along = (dx * math.cos(angle) + dy * math.sin(angle)) / length
        across = (dy * math.cos(angle) - dx * math.sin(angle)) / breadth
        inside = np.clip((1 - np.hypot(along, across)) * breadth / 1.5 + 0.5, 0, 1)
        np.maximum(patch, strength * inside, out=patch)
    return amount


def _fold(scene: Scene) -> Field:
    """Extra thickness: where the section lies double, everything counts twice."""
    band = covered([scene.fold.buffer(14 / MPP)], scene.width, scene.height)
    return 0.9 * _blurred(band.astype(np.float32), 5)


def _spot(scene: Scene) -> Field:
    """Return the defocus of each pixel, 0 (sharp) to 1, shape (height, width).

    It is 1 up to 100 µm from the spot's centre, and falls to 0 at 200 µm.
    """
    y, x = np.ogrid[: scene.height, : scene.width]
    distance = np.hypot(x - scene.blur.x, y - scene.blur.y) * MPP
    return np.clip(2 - distance / 100, 0, 1).astype(np.float32)
