"""Writes pyramids as Aperio's scanners do: tiled JPEG levels, a thumbnail, label and macro."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tifffile import TiffWriter

Pixels = NDArray[np.uint8]

TILE = 256
"""Side of a tile in pixels."""

QUALITY = 80
"""Quality of the JPEG tiles."""


@dataclass(frozen=True)
class Level:
    """One resolution: its size in pixels and its encoded tiles, row by row."""

    width: int
    height: int
    tiles: Iterable[bytes]


def encode(tile: Pixels) -> bytes:
    """A tile of shape (TILE, TILE, 3) as a JPEG with halved chroma."""
    return bytes(imagecodecs.jpeg8_encode(tile, level=QUALITY, subsampling="420"))


def cut(image: Pixels) -> Iterator[bytes]:
    """The encoded tiles of an image, those at its edges filled up by repeating it."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % TILE), (0, -width % TILE), (0, 0)), mode="edge")
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            yield encode(padded[top : top + TILE, left : left + TILE])


def shrink(image: Pixels, factor: int) -> Pixels:
    """Means of `factor`² pixels; like Aperio, what does not fill a last pixel is dropped."""
    height, width = (side // factor * factor for side in image.shape[:2])
    return np.asarray(Image.fromarray(image[:height, :width]).reduce(factor))


def write_svs(
    path: Path, levels: list[Level], thumbnail: Pixels, title: str, mpp: float, big: bool = False
) -> None:
    """Writes the levels in their order with a thumbnail, a label that says `title`, and a macro.

    Args:
        path: The file, overwritten.
        levels: Level 0 first.
        thumbnail: The whole slide, small.
        title: What the slide is called.
        mpp: Microns per level-0 pixel.
        big: Write BigTIFF, for files that may pass 4 GiB.
    """
    full = f"{levels[0].width}x{levels[0].height}"
    facts = f"AppMag = {10 / mpp:g}|Filename = {title}|Date = 01/01/26|MPP = {mpp:.4f}"
    macro = np.full((200, 600, 3), 245, np.uint8)
    macro[20:180, 180:580] = np.asarray(Image.fromarray(thumbnail).resize((400, 160)))
    with TiffWriter(path, bigtiff=big) as tiff:
        for index, level in enumerate(levels):
            size = f"{level.width}x{level.height}"
            shown = f"[0,0 {full}] ({TILE}x{TILE})" + (f" -> {size}" if index else "")
            tiff.write(
                iter(level.tiles),
                shape=(level.height, level.width, 3),
                dtype=np.uint8,
                tile=(TILE, TILE),
                photometric="ycbcr",
                subsampling=(2, 2),
                compression="jpeg",
                description=(
                    f"Aperio Image Library v12.0.15\r\n{full} {shown} JPEG/RGB Q={QUALITY}|{facts}"
                ),
                metadata=None,
                software=False,
            )
            if index == 0:
                small = f"{thumbnail.shape[1]}x{thumbnail.shape[0]}"
                _strip(tiff, thumbnail, f"{full} -> {small} - |{facts}", 0)
        _strip(tiff, _label(title), "label 200x200", 1)
        _strip(tiff, macro, "macro 600x200", 9)


def _strip(tiff: TiffWriter, image: Pixels, text: str, subfile_type: int) -> None:
    """An associated image: one strip, which is how readers tell it from a level."""
    tiff.write(
        image,
        rowsperstrip=image.shape[0],
        photometric="rgb",
        compression="lzw",
        predictor=True,
        description=f"Aperio Image Library v12.0.15\r\n{text}",
        subfiletype=subfile_type,
        metadata=None,
        software=False,
    )


def _label(title: str) -> Pixels:
    label = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(label).text((20, 90), title, fill="black")
    return np.asarray(label)
