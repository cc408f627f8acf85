"""Draws a mask over a thumbnail of its slide, as a PNG with a legend."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pathoseg.annotations.annotation import (
    BACKGROUND,
    IGNORE,
    UNREAD_COLOUR,
    ClassTable,
    Colour,
)
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.atomic import replaced

_LONGEST_SIDE = 2000
_OPACITY = 0.35
_STRIP = 256


def thumbnail_frame(slide: Size, native: Mpp, longest_side: int = _LONGEST_SIDE) -> Frame:
    """Return the frame of a thumbnail, never finer than the slide.

    Args:
        slide: Level-0 pixels.
        native: Their resolution.
        longest_side: Most pixels of it.
    """
    longest = max(slide.width * native.x, slide.height * native.y)
    return Frame.at(slide, native, max(native.mean, longest / longest_side))


class MaskThumbnail:
    """A mask seen in another frame of its slide: each pixel has the value at its centre.

    Args:
        mask: The frame of the bands.
        thumbnail: The frame wanted.

    Attributes:
        pixels: Class indices of shape (height, width) of `thumbnail`.
    """

    def __init__(self, mask: Frame, thumbnail: Frame) -> None:
        self.pixels = np.full((thumbnail.size.height, thumbnail.size.width), BACKGROUND, np.uint8)
        step_x, step_y = thumbnail.scale_x / mask.scale_x, thumbnail.scale_y / mask.scale_y
        self._rows = _centres(thumbnail.size.height, step_y, mask.size.height)
        self._columns = _centres(thumbnail.size.width, step_x, mask.size.width)
        self._top = 0

    def add(self, band: NDArray[np.uint8]) -> None:
        """Take the mask's next rows: class indices, shape (rows, width)."""
        first, last = np.searchsorted(self._rows, [self._top, self._top + len(band)])
        rows = self._rows[first:last] - self._top
        self.pixels[first:last] = band[rows[:, None], self._columns]
        self._top += len(band)


def _centres(count: int, step: float, limit: int) -> NDArray[np.int64]:
    """The mask pixel under each thumbnail pixel's centre; the last ones may lie past the edge."""
    return np.minimum(((np.arange(count) + 0.5) * step).astype(np.int64), limit - 1)


def write_overlay(
    path: Path, image: NDArray[np.uint8], mask: NDArray[np.uint8], classes: ClassTable
) -> None:
    """Write regions in their colours, outlined, over the slide; unread parts are hatched.

    Args:
        path: Replaced whole.
        image: Shape (height, width, 3).
        mask: Class indices of shape (height, width).
        classes: Names and colours.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    names = [_in_ascii(name, index) for index, name in enumerate(classes.names, start=1)]
    entries = list(zip(names, classes.colours, strict=True))
    if (mask == IGNORE).any():
        entries.append(("unread", UNREAD_COLOUR))
    picture = Image.fromarray(_blended(image, mask, classes))
    legend = _legend(entries, picture.width)
    size = max(picture.width, legend.width), picture.height + legend.height
    page = Image.new("RGB", size, "white")
    page.paste(picture, (0, 0))
    page.paste(legend, (0, picture.height))
    with replaced(path) as draft:
        page.save(draft, "PNG", compress_level=1)  # twice as fast, a twelfth larger


def overlay_layer(mask: NDArray[np.uint8], classes: ClassTable) -> NDArray[np.uint8]:
    """Draw the regions of `mask` as a layer to lay over a picture.

    Args:
        mask: Class indices of shape (height, width).
        classes: Names and colours.

    Returns:
        RGBA of shape (height, width, 4): outlines opaque, areas faint, 255 hatched.
    """
    clear, opaque = _clear_and_opaque(mask)
    alpha = np.where(opaque, 255, round(255 * _OPACITY)).astype(np.uint8)
    alpha[clear] = 0
    return np.dstack([classes.palette()[mask], alpha])


def _blended(
    image: NDArray[np.uint8], mask: NDArray[np.uint8], classes: ClassTable
) -> NDArray[np.uint8]:
    palette, (clear, opaque) = classes.palette(), _clear_and_opaque(mask)
    blend = np.empty_like(image)
    for top in range(0, len(image), _STRIP):  # colours of all of it would double what is held
        rows = slice(top, top + _STRIP)
        colours = np.take(palette, mask[rows], axis=0)
        cv2.addWeighted(colours, _OPACITY, image[rows], 1 - _OPACITY, 0, blend[rows])
        cv2.copyTo(colours, opaque[rows].view(np.uint8), blend[rows])
        cv2.copyTo(image[rows], clear[rows].view(np.uint8), blend[rows])
    return blend


def _clear_and_opaque(mask: NDArray[np.uint8]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where the slide alone shows, and where colours cover it; elsewhere both show."""
    framed = np.pad(mask, 1, mode="edge")
    neighbours = (framed[:-2, 1:-1], framed[2:, 1:-1], framed[1:-1, :-2], framed[1:-1, 2:])
    clear, opaque = mask == BACKGROUND, np.zeros(mask.shape, bool)
    for neighbour in neighbours:
        opaque |= mask != neighbour
    unread = mask == IGNORE
    if unread.any():
        y, x = np.ogrid[: mask.shape[0], : mask.shape[1]]
        hatch = (x + y) % 8 < 3
        opaque[unread] = hatch[unread]
        clear[unread] = ~hatch[unread]
    opaque &= ~clear
    return clear, opaque


def _in_ascii(name: str, index: int) -> str:
    """The name without accents: Pillow's own font, the only one sure to be there, lacks them.

    Where other letters would be lost, it is the number of the class.
    """
    signs = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    plain = "".join(sign for sign in signs if not unicodedata.combining(sign))
    if any(sign.isalpha() and not sign.isascii() for sign in plain):
        return f"class {index}"
    return plain.encode("ascii", "replace").decode()


def _legend(entries: list[tuple[str, Colour]], width: int) -> Image.Image:
    """A square and a name for each class, in as many lines as the width needs."""
    height = min(28, max(12, width // 60))
    font = ImageFont.load_default(height)
    gap = height // 2
    places, x, y, right = [], gap, gap, 0
    for name, _ in entries:
        entry = 2 * gap + height + round(font.getlength(name))
        if x > gap and x + entry > width:
            x, y = gap, y + height + gap
        places.append((x, y))
        x += entry + gap
        right = max(right, x)
    legend = Image.new("RGB", (max(right, 1), y + height + gap), "white")
    draw = ImageDraw.Draw(legend)
    for (name, colour), (x, y) in zip(entries, places, strict=True):
        draw.rectangle((x, y, x + height, y + height), fill=colour)
        middle = y + height / 2
        draw.text((x + height + gap, middle), name, fill="black", font=font, anchor="lm")
    return legend
