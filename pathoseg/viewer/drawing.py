"""Draws a part of a slide or of a mask as the JPEG or PNG that the page lays over the others."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pathoseg.annotations.annotation import BACKGROUND, IGNORE, Colour
from pathoseg.geometry import Box, Frame, Size
from pathoseg.outputs.mask_reader import MaskReader
from pathoseg.slides.region import Region

Style = Literal["filled", "outlines"]
Palette = NDArray[np.uint8]

MARGIN = 2  # pixels around a tile on which its outlines depend
GREY: Colour = (110, 110, 110)
DIFFERENCES: dict[str, Colour] = {
    "predicted only": (230, 60, 50),
    "annotated only": (45, 110, 235),
    "another class": (240, 170, 20),
}
_HATCH, _STROKE = 12, 4  # pixels from line to line, and of a line
_QUALITY = 90
_TOLERANCE = 1.02  # a level this much too coarse still serves, as in slides.region
# Purple, blue, green, yellow: the eye reads the order of their brightness (after viridis).
_RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)])


def jpeg(region: Region, box: Box) -> bytes:
    """Encode pixels of a slide; what is unread is hatched.

    Args:
        region: The pixels.
        box: Position of the pixels, so that hatches continue across tiles.
    """
    pixels = region.pixels
    if region.unread is not None:
        lines = region.unread & hatched(box)
        pixels = np.where(region.unread[..., None], np.uint8(235), pixels)
        pixels[lines] = GREY
    encoded = cv2.imencode(
        ".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY]
    )[1]
    return encoded.tobytes()


def hatched(box: Box) -> NDArray[np.bool_]:
    """Return where the lines of a hatch lie in a box, which go on in its neighbours."""
    y, x = np.ogrid[box.y : box.bottom, box.x : box.right]
    lines: NDArray[np.bool_] = (x + y) % _HATCH < _STROKE
    return lines


def png(indices: NDArray[np.uint8], palette: Palette) -> bytes:
    """Encode indices with their colours.

    Args:
        indices: Shape (height, width).
        palette: RGBA of each index, shape (256, 4).
    """
    image = Image.fromarray(indices)
    image.putpalette(palette[:, :3].tobytes())  # makes it mode P
    file = io.BytesIO()
    image.save(file, "PNG", transparency=palette[:, 3].tobytes(), compress_level=1)
    return file.getvalue()


def class_palette(colours: Collection[Colour]) -> Palette:
    """The palette of class indices: background is clear, 255 grey."""
    palette = np.zeros((256, 4), np.uint8)
    palette[1 : 1 + len(colours), :3] = np.reshape(list(colours), (-1, 3))
    palette[1 : 1 + len(colours), 3] = 255
    palette[IGNORE] = (*GREY, 255)
    return palette


def difference_palette() -> Palette:
    """The palette of `differences`."""
    return class_palette(DIFFERENCES.values())


def probability_palette() -> Palette:
    """The palette of shares of 255: 0 is clear, colours get brighter, then more opaque, to 255."""
    share = np.linspace(0, 1, 256)
    stops = np.linspace(0, 1, len(_RAMP))
    palette = np.empty((256, 4))
    for channel in range(3):
        palette[:, channel] = np.interp(share, stops, _RAMP[:, channel])
    palette[:, 3] = 255 * np.minimum(1, share * 4)
    return palette.round().astype(np.uint8)


def sampled(mask: MaskReader, whole: Frame, frame: Frame, box: Box, channel: int = 0) -> Palette:
    """Return the mask's value at the centre of each pixel of a box.

    It comes from the coarsest level that is no coarser than asked for.

    Args:
        mask: An open pyramid.
        whole: The frame of its level 0 in the slide.
        frame: The frame of the box.
        box: May reach outside the mask: there the value is that of the nearest pixel.
        channel: Index of the channel.

    Returns:
        Shape (height, width).

    Raises:
        PathosegError: The file is damaged there.
    """
    steps = frame.scale_x / whole.scale_x, frame.scale_y / whole.scale_y
    level = 0
    while level + 1 < len(mask.levels) and 2 ** (level + 1) <= min(steps) * _TOLERANCE:
        level += 1
    size = mask.levels[level]
    x = _centres(box.x, box.width, steps[0] / 2**level, size.width)
    y = _centres(box.y, box.height, steps[1] / 2**level, size.height)
    part = Box(int(x[0]), int(y[0]), int(x[-1] - x[0]) + 1, int(y[-1] - y[0]) + 1)
    return mask.read(level, part, channel)[np.ix_(y - part.y, x - part.x)]


def _centres(start: int, count: int, step: float, limit: int) -> NDArray[np.int64]:
    """The mask's pixels under the centres of pixels of a frame that are `step` of its own wide."""
    centres = np.floor((np.arange(start, start + count) + 0.5) * step).astype(np.int64)
    inside: NDArray[np.int64] = centres.clip(0, limit - 1)
    return inside


def shown(
    mask: NDArray[np.uint8], box: Box, classes: Collection[int], style: Style
) -> NDArray[np.uint8]:
    """Choose what is drawn of class indices.

    Args:
        mask: Class indices of `box` with `MARGIN` pixels more on each side.
        box: The part to draw.
        classes: The indices to draw; 255 draws a hatch.
        style: "outlines" draws two pixels along each border of a class, on its own side.

    Returns:
        Indices for `class_palette`, of the shape of `box`.
    """
    inner = mask[MARGIN:-MARGIN, MARGIN:-MARGIN]
    wanted = np.zeros(256, bool)
    wanted[[index for index in classes if index != BACKGROUND]] = True
    drawn = wanted[inner]
    if style == "outlines":
        kernel = np.ones((2 * MARGIN + 1, 2 * MARGIN + 1), np.uint8)
        border = (cv2.dilate(mask, kernel) != mask) | (cv2.erode(mask, kernel) != mask)
        drawn &= border[MARGIN:-MARGIN, MARGIN:-MARGIN]
    drawn = np.where(inner == IGNORE, wanted[IGNORE] & hatched(box), drawn)
    return np.where(drawn, inner, np.uint8(BACKGROUND))


def differences(
    prediction: NDArray[np.uint8], truth: NDArray[np.uint8], classes: Collection[int]
) -> NDArray[np.uint8]:
    """Compare class indices of the same shape.

    Args:
        prediction: 255 is unread.
        truth: 255 is not known.
        classes: A pixel counts where either is one of these.

    Returns:
        1, 2, 3 for `DIFFERENCES` in their order; 0 where both agree or one is 255.
    """
    wanted = np.zeros(256, bool)
    wanted[[index for index in classes if index not in (BACKGROUND, IGNORE)]] = True
    known = (prediction != IGNORE) & (truth != IGNORE) & (prediction != truth)
    differ = known & (wanted[prediction] | wanted[truth])
    kind = np.where(truth == BACKGROUND, 1, np.where(prediction == BACKGROUND, 2, 3))
    return np.where(differ, kind, 0).astype(np.uint8)


def halved(size: Size, times: int) -> Size:
    """The size of a picture that was halved so often, rounded up."""
    return Size(-(-size.width // 2**times), -(-size.height // 2**times))
