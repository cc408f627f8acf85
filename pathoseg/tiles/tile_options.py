"""Options of tissue detection and augmentation, without a heavy import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pathoseg.errors import PathosegError


@dataclass(frozen=True, slots=True)
class TissueOptions:
    """Options of tissue detection.

    Attributes:
        method: "auto" finds it, "all" takes the whole slide.
        threshold: Difference from the background that makes tissue: optical density of colour on
            bright slides, share of full brightness on dark ones; None measures it.

    Raises:
        PathosegError: A value is out of range.
    """

    method: Literal["auto", "all"] = "auto"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.method not in ("auto", "all"):
            raise PathosegError(
                f"[tissue] method = {self.method!r} is unknown.", 'Use "auto" or "all".'
            )
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise PathosegError(
                f"[tissue] threshold = {self.threshold} finds nothing.",
                "Use a small positive number such as 0.04, or leave it out.",
            )


_LARGEST = {
    "warp": 1.0,
    "scale": 0.9,
    "rotate": 180.0,
    "shift": 0.5,
    "elastic": 32.0,
    "stain": 0.9,
    "colour": 0.9,
    "blur": 1.0,
    "noise": 1.0,
}


@dataclass(frozen=True, slots=True)
class AugmentOptions:
    """Options of augmentation; 0 leaves a step out.

    Attributes:
        flip: Mirror and turn by quarters, all eight ways equally often.
        warp: Share of tiles that are scaled, rotated, shifted and bent.
        scale: Largest change of size, as a share.
        rotate: Largest turn in degrees.
        shift: Largest shift as a share of the tile's side.
        elastic: Standard deviation in pixels of random displacements, interpolated smoothly
            (Ronneberger et al. 2015, section 3.1). They are side / (⌈side / 128⌉ + 1) pixels
            apart: 64 in tiles of 128 px, 114 in tiles of 1,024.
        stain: Strength of the change of hematoxylin, eosin and DAB.
        colour: Largest change of brightness, contrast and saturation, as a share; hue changes by
            up to a fifth of it.
        blur: Share of tiles that are blurred (deviation up to 1.5 px).
        noise: Share of tiles that get Gaussian noise (deviation up to 3 % of white).
    """

    flip: bool = True
    warp: float = 0.5
    scale: float = 0.1
    rotate: float = 15.0
    shift: float = 0.05
    elastic: float = 6.0
    stain: float = 0.1
    colour: float = 0.1
    blur: float = 0.1
    noise: float = 0.1

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if not 0 <= value <= largest:
                raise PathosegError(
                    f"[augment] {name} = {value} is not between 0 and {largest:g}.",
                    "Set it to 0 to leave that step out.",
                )
