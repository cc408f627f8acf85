"""Tissue detection on a thumbnail, with the share of tissue of any box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from pathoseg.geometry import Box, Frame, Mpp, Size
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import Slide
from pathoseg.tiles.tile_options import TissueOptions

_THUMBNAIL_MPP = 8.0
_MOST_PIXELS = 4_000_000
_LEAST_SIDE = 64
_ROUNDING = 1e-6  # pixels of the thumbnail

# Sizes of what is looked at and cleaned away.
_GRAIN_UM = 6.0  # smoothing before anything is measured
_EDGE_UM = 16.0  # smoothing of the outline
_PEN_UM = 20.0  # half the width of the thinnest pen stroke
_SPECK_MM2 = 0.01  # smaller pieces of tissue are dirt
_GAP_MM2 = 0.02  # smaller pieces of glass belong to the tissue around them
_BLANK = 30  # grey levels that separate the brightest from the darkest spot of a blank image
_FIELD_MM2 = 0.1  # smaller images are no slides but fields of view cut from tissue

Colours = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Tissue:
    """The tissue of one slide.

    Attributes:
        mask: Shape (rows, columns), true where there is tissue; covers the slide exactly.
        slide_size: Level-0 pixels of the slide.
        mpp: Microns per level-0 pixel.
    """

    mask: Mask
    slide_size: Size
    mpp: Mpp

    @property
    def area_mm2(self) -> float:
        """The area of the tissue in mm²."""
        return self.slide_size.pixels * self.mpp.pixel_mm2 * float(self.mask.mean())

    def share(self, box: Box, frame: Frame) -> float:
        """The part of a box that is tissue, 0 to 1, in constant time.

        Args:
            box: In pixels of `frame`; only what lies inside the slide counts.
            frame: Any frame of this slide.
        """
        x, y, width, height = frame.to_level0(box)
        rows, columns = self.mask.shape
        across, down = columns / self.slide_size.width, rows / self.slide_size.height
        left, right = _clamped(x * across, columns), _clamped((x + width) * across, columns)
        top, bottom = _clamped(y * down, rows), _clamped((y + height) * down, rows)
        area = (right - left) * (bottom - top)
        if area <= 0:
            return 0.0
        tissue = (
            self._tissue_above_left(right, bottom)
            - self._tissue_above_left(left, bottom)
            - self._tissue_above_left(right, top)
            + self._tissue_above_left(left, top)
        )
        # What is left of sums in the millions where there is no tissue is rounding.
        return _clamped(tissue / area, 1) if tissue > _ROUNDING else 0.0

    def pixels(self, box: Box, frame: Frame) -> Mask:
        """Return which pixels of a box have their centre in tissue, shape (height, width).

        Args:
            box: In pixels of `frame`, inside its extent.
            frame: Any frame of this slide.
        """
        rows, columns = self.mask.shape
        down = frame.scale_y * rows / self.slide_size.height
        across = frame.scale_x * columns / self.slide_size.width
        y = ((np.arange(box.y, box.bottom) + 0.5) * down).astype(np.int64)
        x = ((np.arange(box.x, box.right) + 0.5) * across).astype(np.int64)
        found: Mask = self.mask[np.minimum(y, rows - 1)][:, np.minimum(x, columns - 1)]
        return found

    @cached_property
    def _sums(self) -> NDArray[np.int32]:
        """Integral image: entry (y, x) counts the tissue pixels above row y, left of column x."""
        return np.pad(self.mask.cumsum(0, np.int32).cumsum(1, np.int32), ((1, 0), (1, 0)))

    def _tissue_above_left(self, x: float, y: float) -> float:
        """Mask pixels of tissue above and left of a point; linear in between, hence exact."""
        rows, columns = self.mask.shape
        column, row = min(int(x), columns - 1), min(int(y), rows - 1)
        (a, b), (c, d) = self._sums[row : row + 2, column : column + 2].tolist()
        u, v = x - column, y - row
        return float((a * (1 - u) + b * u) * (1 - v) + (c * (1 - u) + d * u) * v)


def _clamped(value: float, most: float) -> float:
    return min(max(value, 0.0), most)


def find_tissue(slide: Slide, options: TissueOptions) -> Tissue:
    """Find tissue on a thumbnail of about 8 µm per pixel.

    On a bright slide, tissue is what has colour: more of it than the glass, in optical density,
    so that grey things (edges of glass, shadows, black ink) are none; strokes of coloured ink are
    taken out by hue and flatness. On a dark slide, tissue is what is brighter than the dark.
    What cannot be read counts as tissue, so that it is tried and reported, never passed over.
    """
    if options.method == "all":
        return Tissue(np.ones((1, 1), np.bool_), slide.size, slide.mpp)
    frame = _thumbnail(slide)
    region = read_region(slide, frame, Box(0, 0, frame.size.width, frame.size.height))
    mask = _tissue_mask(region.pixels, frame.mpp.mean, options.threshold)
    if region.unread is not None:
        mask |= region.unread
    return Tissue(mask, slide.size, slide.mpp)


def _thumbnail(slide: Slide) -> Frame:
    """A frame whose pixels cover the slide exactly, so that no padding is taken for glass."""
    width, height = slide.size.width * slide.mpp.x, slide.size.height * slide.mpp.y
    mpp = max(
        min(_THUMBNAIL_MPP, min(width, height) / _LEAST_SIDE),
        math.sqrt(width * height / _MOST_PIXELS),
        slide.mpp.mean,
    )
    size = Size(max(1, round(width / mpp)), max(1, round(height / mpp)))
    return Frame(
        size,
        slide.size.width / size.width,
        slide.size.height / size.height,
        Mpp(width / size.width, height / size.height),
    )


def _tissue_mask(pixels: NDArray[np.uint8], mpp: float, threshold: float | None) -> Mask:
    """Tissue of an RGB image of shape (rows, columns, 3)."""
    if threshold is None and pixels[..., 0].size * mpp**2 * 1e-6 < _FIELD_MM2:
        return np.full(pixels.shape[:2], np.ptp(pixels, axis=(0, 1)).max() > _BLANK)
    sigma = _GRAIN_UM / mpp
    smooth = ndimage.gaussian_filter(pixels, (sigma, sigma, 0), output=np.float32, mode="nearest")
    if _is_dark(smooth):
        return _cleaned(_brighter_than_dark(smooth, threshold), mpp)
    glass = _glass(smooth)
    if glass is None:
        return np.ones(pixels.shape[:2], np.bool_)
    density = _optical_density(smooth, glass)
    return _cleaned(_coloured(density, threshold) & ~_ink(density, mpp), mpp)


def _optical_density(smooth: Colours, glass: Colours) -> Colours:
    """Return the optical density relative to glass, written into `smooth` to save memory."""
    smooth += 1
    smooth /= glass + 1
    np.log(smooth, out=smooth)
    np.clip(smooth, -5, 0, out=smooth)
    return np.negative(smooth, out=smooth)


def _is_dark(smooth: Colours) -> bool:
    """Return True for fluorescence: mostly dark, and nowhere glass."""
    light = smooth.mean(axis=2)
    return bool(np.median(light) < 50 and np.percentile(light, 95) < 180)


def _brighter_than_dark(smooth: Colours, threshold: float | None) -> Mask:
    light = smooth.max(axis=2) / 255
    dark = np.percentile(light, 1)
    if threshold is None:
        noise = np.percentile(light, 10) - dark
        threshold = float(np.clip(2 * noise, 0.015, 0.05))
    bright: Mask = light > dark + threshold
    return bright


def _glass(smooth: Colours) -> Colours | None:
    """The colour of empty glass, shape (3,): the brightest that flat, pale places share.

    None where nothing looks like glass: all of the image is tissue.
    """
    light = smooth.mean(axis=2)
    slope = np.hypot(ndimage.sobel(light, 0), ndimage.sobel(light, 1)) / 8
    pale = (light > 180) & (np.ptp(smooth, axis=2) < 16) & (slope < 2)
    # Pure white is mostly what the scanner left out: glass, where there is any, lies below.
    for likely in (pale & (light < 253), pale):
        if likely.mean() > 0.005:
            break
    else:
        return None
    counts = np.bincount((light[likely] / 4).astype(np.int64))
    brightest = int(np.flatnonzero(counts >= 0.05 * counts.sum()).max()) * 4 + 2
    likely &= np.abs(light - brightest) < 6
    return np.array([np.median(smooth[..., channel][likely]) for channel in range(3)], np.float32)


def _coloured(density: Colours, threshold: float | None) -> Mask:
    """Return the pixels with more colour than glass; on a grey slide, the darker ones."""
    strength = np.sqrt(np.einsum("ijk,ijk->ij", density, density))
    least = density.min(axis=2)
    colour = np.sqrt(sum((density[..., channel] - least) ** 2 for channel in range(3)))
    if colour.max() < 0.01:
        colour = strength
    if threshold is None:
        on_glass = colour[strength < 0.05]
        middle = np.median(on_glass) if on_glass.size else 0.0
        noise = np.median(np.abs(on_glass - middle)) if on_glass.size else 0.0
        threshold = float(np.clip(middle + 8 * noise, 0.03, 0.08))
    coloured: Mask = (colour > threshold) & (colour > 0.15 * strength)
    return coloured


def _ink(density: Colours, mpp: float) -> Mask:
    """Strokes of coloured marker: dense and flat, in hues that no common stain has.

    Every stain of tissue takes green light; blue and green ink take red light above all, red ink
    takes green and blue alike. Black ink has no colour and never comes this far.
    """
    red, green, blue = np.moveaxis(density, 2, 0)
    cold = (red > 1.18 * green) & (red > 0.9)
    warm = (green > 1.2) & (blue > 0.72 * green) & (red < 0.22 * green)
    likely: Mask = cold | warm
    if not likely.any():
        return likely
    strength = density.sum(axis=2)
    radius = _PEN_UM / mpp
    ripple = strength - ndimage.gaussian_filter(strength, radius / 2, mode="nearest")
    rough = np.sqrt(ndimage.gaussian_filter(ripple**2, radius / 2, mode="nearest"))
    core = _within(likely & (rough < 0.25 * strength), -radius)
    return _within(core, 3 * radius)


def _within(mask: Mask, reach: float) -> Mask:
    """The mask grown by `reach` pixels, or where negative, shrunk."""
    if reach < 0:
        return ~_within(~mask, -reach)
    if not mask.any():
        return mask
    near: Mask = ndimage.distance_transform_edt(~mask) <= reach
    return near


def _cleaned(mask: Mask, mpp: float) -> Mask:
    """The mask with an even outline, without specks and gaps."""
    pixel_mm2 = mpp**2 * 1e-6
    share = ndimage.gaussian_filter(mask.astype(np.float32), _EDGE_UM / mpp, mode="nearest")
    even = _without_small(share > 0.5, _SPECK_MM2 / pixel_mm2)
    if not even.any():
        return even
    return ~_without_small(~even, _GAP_MM2 / pixel_mm2)


def _without_small(mask: Mask, least: float) -> Mask:
    """The connected pieces of at least so many pixels."""
    pieces, _ = ndimage.label(mask)
    large = np.bincount(pieces.ravel()) >= least
    large[0] = False
    kept: Mask = large[pieces]
    return kept
