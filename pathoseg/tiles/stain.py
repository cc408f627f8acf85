"""Colours of stained tissue as affine maps between logarithms of light: normalisation, jitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import Slide
from pathoseg.tiles.tissue import Tissue

Method = Literal["macenko", "reinhard"]
Matrix = NDArray[np.float64]

_GLASS = 0.15  # optical density below which a pixel holds no stain (Macenko et al. 2009)
_FEWEST_PIXELS = 1000
_SAMPLED_BOXES = 16
_SAMPLED_EVERY = 4

# What Macenko's method brings slides to: hematoxylin and eosin (columns) in optical density of
# red, green and blue, and their strengths (99th percentiles), as in the authors' own program.
_STAINS = np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]])
_STRENGTHS = np.array([1.9705, 1.0308])

# Light to the eye's cones, and the axes l, alpha, beta of their logarithms (Reinhard et al. 2001).
_CONES = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
_AXES = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt([[3], [6], [2]])
# What Reinhard's method brings slides to, along these axes: medians over the tissue of MoNuSeg's
# 30 training images, which come from 18 hospitals.
_MEANS = np.array([-1.33, -0.12, 0.054])
_DEVIATIONS = np.array([0.56, 0.112, 0.019])

# Hematoxylin, eosin and DAB (rows) in optical density (Ruifrok and Johnston 2001, table 1).
_HED = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
_HED /= np.linalg.norm(_HED, axis=1, keepdims=True)

_STRIP = 2**16  # pixels whose logarithms are held at once, to stay in a core's cache
_LOGS = np.log((np.arange(256) + 1) / 256).astype(np.float32)  # of each value's light


class TooLittleStainError(PathosegError):
    """Too few pixels of a slide are stained, or all in one colour."""


@dataclass(frozen=True, slots=True)
class StainNormaliser:
    """An affine map of the colours of one slide to a reference that is the same for all slides.

    Attributes:
        affine: Shape (3, 4), applied to the logarithms of light in `basis`.
        basis: Shape (3, 3), applied to red, green and blue light.
    """

    affine: Matrix
    basis: Matrix

    @classmethod
    def fit(cls, pixels: NDArray[np.uint8], method: Method, path: Path) -> Self:
        """The normaliser of the slide that `pixels` are of.

        Args:
            pixels: RGB, shape (…, 3); glass among them is passed over.
            method: "macenko" moves the two stain vectors and their strengths (Macenko et al. 2009)
                and leaves glass white; "reinhard" moves mean and deviation of each axis of colour
                (Reinhard et al. 2001), those of glass as well.
            path: The slide, for the error.

        Raises:
            TooLittleStainError: The pixels hold too little tissue, or but one colour.
        """
        logs = np.log((pixels.reshape(-1, 3).astype(np.float64) + 1) / 256)
        stained = logs[(logs < -_GLASS).all(axis=1)]
        affine = None
        if len(stained) >= _FEWEST_PIXELS:
            affine = _macenko(stained) if method == "macenko" else _reinhard(stained)
        if affine is None:
            raise TooLittleStainError(
                f"{path} has too little stained tissue for stain normalisation.",
                "Leave the slide out, or work without normalisation ([tiles] stain).",
            )
        return cls(affine, np.eye(3) if method == "macenko" else _CONES)

    def apply(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return an image (height, width, 3), uint8 RGB, in the colours of the reference."""
        return _map_logs(image, self.affine, self.basis)


def sample_pixels(
    slide: Slide, frame: Frame, boxes: Sequence[Box], every: int = _SAMPLED_EVERY**2
) -> NDArray[np.uint8]:
    """Read pixels to fit a normaliser to, of up to 16 boxes spread evenly over `boxes`.

    Args:
        slide: The slide.
        frame: The resolution at which boxes are read.
        boxes: In pixels of `frame`.
        every: One pixel of so many is taken.

    Returns:
        RGB, shape (n, 3), without unread ones.

    Raises:
        UnreadableError: None of the boxes can be read.
    """
    chosen = np.linspace(0, len(boxes) - 1, min(len(boxes), _SAMPLED_BOXES)).round().astype(int)
    parts = [np.empty((0, 3), dtype=np.uint8)]
    for number in chosen:
        region = read_region(slide, frame, boxes[number])
        read = slice(None) if region.unread is None else ~region.unread
        parts.append(region.pixels[read].reshape(-1, 3)[::every])
    return np.concatenate(parts)


def jitter_stains(
    image: NDArray[np.uint8],
    strength: float,
    rng: np.random.Generator,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Scale and shift the amounts of hematoxylin, eosin and DAB at random.

    Each stain is multiplied by a factor from [1 - strength, 1 + strength], and an amount from
    [-strength, strength] is added (Tellez et al. 2018; their "light" is 0.05, "strong" 0.2).

    Args:
        image: RGB, shape (height, width, 3).
        strength: Half the range of factors and offsets.
        rng: Draws six numbers.
        out: Takes the result; may be `image`.
    """
    factors = 1 + strength * rng.uniform(-1, 1, 3)
    offsets = strength * rng.uniform(-1, 1, 3)
    scale = _HED.T @ np.diag(factors) @ np.linalg.inv(_HED.T)
    return _map_logs(image, np.column_stack([scale, -_HED.T @ offsets]), np.eye(3), out)


def stain_densities(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the optical density of hematoxylin and eosin, by Ruifrok and Johnston's unmixing.

    Args:
        pixels: RGB, shape (..., 3).

    Returns:
        Shape (..., 2); to base 10, of light relative to white (255).
    """
    light = np.maximum(np.arange(256), 1) / 255
    density = -np.log10(light).astype(np.float32)[pixels]
    unmixed: NDArray[np.float32] = density @ np.linalg.inv(_HED)[:, :2].astype(np.float32)
    return unmixed


def _map_logs(
    image: NDArray[np.uint8],
    affine: Matrix,
    basis: Matrix,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Apply an affine map to the logarithms of `basis` times the light of each pixel.

    Light is (value + 1) / 256, so that black has a logarithm and white is 1.
    """
    light = np.column_stack([basis, basis.sum(axis=1)]) / 256
    back = np.column_stack([np.linalg.inv(basis) * 256, [-1, -1, -1]])
    alone = np.array_equal(basis, np.eye(3))  # each colour: its logarithms can be looked up
    out = np.empty(image.shape, np.uint8) if out is None else out
    height, width = image.shape[:2]
    rows = min(height, max(1, _STRIP // width))
    both = np.empty((2, rows, width, 3), np.float32)
    for top in range(0, height, rows):
        strip = slice(top, min(top + rows, height))
        one, other = both[:, : strip.stop - top]
        if alone:
            cv2.LUT(image[strip], _LOGS, dst=one)
        else:
            one[:] = image[strip]
            cv2.log(cv2.transform(one, light, dst=other), dst=one)
        cv2.exp(cv2.transform(one, affine, dst=other), dst=one)
        # Sums, as they round and saturate in one pass.
        if alone:
            cv2.addWeighted(one, 256, one, 0, -1, dst=out[strip], dtype=cv2.CV_8U)
        else:
            cv2.transform(one, back, dst=other)
            cv2.addWeighted(other, 1, other, 0, 0, dst=out[strip], dtype=cv2.CV_8U)
    return out


def _macenko(logs: Matrix) -> Matrix | None:
    """The map of a slide's two stains to those of the reference, shape (3, 4), if it has two."""
    density = -logs
    plane = np.linalg.eigh(np.cov(density.T))[1][:, :0:-1]
    plane *= np.where(plane.sum(axis=0) < 0, -1, 1)
    across, up = (density @ plane).T
    low, high = np.percentile(np.arctan2(up, across), [1, 99])
    stains = plane @ np.array([[np.cos(low), np.cos(high)], [np.sin(low), np.sin(high)]])
    # Hematoxylin, which takes more of the red, comes first.
    stains = stains[:, np.argsort(-stains[0])]
    amounts = np.linalg.pinv(stains)
    strengths = np.percentile(density @ amounts.T, 99, axis=0)
    if (strengths <= 0).any() or np.linalg.matrix_rank(stains, tol=1e-3) < 2:
        return None
    scale = _STAINS @ np.diag(_STRENGTHS / strengths) @ amounts
    return np.column_stack([scale, np.zeros(3)])


def _reinhard(logs: Matrix) -> Matrix | None:
    """The map of a slide's means and deviations to those of the reference, if it has any."""
    seen = np.log(np.exp(logs) @ _CONES.T) @ _AXES.T
    deviations = seen.std(axis=0)
    if (deviations < 1e-6).any():
        return None
    factors = _DEVIATIONS / deviations
    offsets = _MEANS - factors * seen.mean(axis=0)
    return np.column_stack([_AXES.T @ np.diag(factors) @ _AXES, _AXES.T @ offsets])


_STAINED = 0.5  # least share of tissue in a tile that the stain normaliser looks at


def fit_stain(
    slide: Slide, frame: Frame, boxes: Sequence[Box], tissue: Tissue, method: Method
) -> StainNormaliser:
    """Fit a slide's stain on the tiles that are mostly tissue, or on all where none is.

    Args:
        slide: The slide.
        frame: The resolution at which tiles are read.
        boxes: The tiles, in pixels of `frame`.
        tissue: The slide's tissue.
        method: "macenko" or "reinhard".

    Raises:
        TooLittleStainError: There is too little stained tissue.
    """
    stained = [box for box in boxes if tissue.share(box, frame) >= _STAINED] or list(boxes)
    try:
        return StainNormaliser.fit(sample_pixels(slide, frame, stained), method, slide.path)
    except TooLittleStainError:  # a small biopsy may have enough in all pixels
        return StainNormaliser.fit(sample_pixels(slide, frame, stained, 1), method, slide.path)
