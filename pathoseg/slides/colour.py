"""Turns what files store (gray, palettes, 16 bits, transparency) into RGB on white."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_UNSPECIFIED, _PREMULTIPLIED, _STRAIGHT = 0, 1, 2


def on_white(image: Image.Image) -> NDArray[np.uint8]:
    """The RGB pixels of a PIL image, shape (height, width, 3); transparent ones are white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            white = Image.new("RGB", image.size, "white")
            white.paste(image, mask=image)
            image = white
    return np.array(image.convert("RGB"))


@dataclass(frozen=True)
class SampleLayout:
    """The meaning of the samples of a TIFF's pixels, by the numbers of TIFF 6.0's tags.

    Attributes:
        photometric: PhotometricInterpretation, 6 (YCbCr) where the decoder gives YCbCr.
        bits: Bits of one sample that its values use; cameras store 12 in 16.
        samples: Samples of a pixel.
        extra: ExtraSamples.
        palette: ColorMap, shape (3, 2**bits), 16 bits a value.

    Raises:
        ValueError: The samples have no clear meaning as 8-bit colours.
    """

    photometric: int
    bits: int
    samples: int
    extra: Sequence[int] = ()
    palette: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        colours = 3 if self.photometric == _RGB else 1
        if self.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE):
            problem = f"its colour space (photometric {self.photometric}) is not read here"
        elif self.samples - colours not in (0, 1):
            problem = f"it holds {self.samples} channels, not colours"
        elif self.bits > 8 and (self.photometric != _RGB or self.bits > 16):
            # which of 65,536 grays should be black and white, the file does not say
            problem = f"its {self.bits}-bit values have no set range as 8-bit colours"
        elif self.photometric == _PALETTE and self.palette is None:
            problem = "it has no colours for its palette"
        else:
            return
        raise ValueError(problem)

    def to_rgb(self, pixels: NDArray[Any]) -> NDArray[np.uint8]:
        """RGB on white, shape (height, width, 3), of samples of shape (height, width, samples)."""
        if self.photometric == _PALETTE:
            assert self.palette is not None
            shift = 8 if self.palette.max(initial=0) > 255 else 0  # some write 8-bit palettes
            table: NDArray[np.uint8] = (self.palette >> shift).astype(np.uint8).T
            return np.take(table, pixels[..., 0], axis=0)
        pixels = self._to_8_bit(pixels)
        if self.photometric == _WHITE_IS_ZERO:
            pixels = pixels.copy()
            pixels[..., 0] = 255 - pixels[..., 0]
        colours = 3 if self.photometric == _RGB else 1
        rgb = np.broadcast_to(pixels[..., :colours], (*pixels.shape[:2], 3))
        kind = self.extra[0] if self.samples > colours and self.extra else _UNSPECIFIED
        if kind == _UNSPECIFIED:
            return np.ascontiguousarray(rgb)
        alpha = pixels[..., colours:].astype(np.uint16)
        if kind == _PREMULTIPLIED:
            mixed: NDArray[Any] = np.minimum(rgb + (255 - alpha), 255)
        else:
            mixed = (rgb * alpha + 255 * (255 - alpha) + 127) // 255
        return mixed.astype(np.uint8)

    def _to_8_bit(self, pixels: NDArray[Any]) -> NDArray[np.uint8]:
        if self.bits > 8:
            pixels = np.minimum(pixels >> (self.bits - 8), 255)
        elif self.bits < 8:
            pixels = pixels.astype(np.uint16) * 255 // (2**self.bits - 1)
        return pixels.astype(np.uint8, copy=False)
