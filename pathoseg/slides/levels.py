"""Stored levels with their exact downsamples, free of the rounding in their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from pathoseg.geometry import Level, Size


def exact_levels(sizes: Sequence[Size]) -> tuple[Level, ...]:
    """The levels of these sizes, level 0 first."""
    return tuple(Level(size, _exact_downsample(sizes[0], size)) for size in sizes)


def _exact_downsample(level0: Size, level: Size) -> float:
    """Level-0 pixels per pixel of a level.

    A level of 749 pixels made from 2999 by halving twice has pixels 4 wide, though
    2999 / 749 is 4.004. Halving (or dividing by any factor) with rounding, down to any level,
    stays within one pixel of the exact size, so a whole number that explains both sides to
    within a pixel is the truth; elsewhere the mean of the two ratios is the best guess.
    """
    ratio = (level0.width / level.width + level0.height / level.height) / 2
    whole = max(1, round(ratio))
    off = max(abs(level0.width / whole - level.width), abs(level0.height / whole - level.height))
    return float(whole) if off < 1 else max(1.0, ratio)
