"""Opens the PNG and TIFF files of masks, and refuses those that cannot be one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from pathoseg.errors import PathosegError, not_permitted
from pathoseg.geometry import Size
from pathoseg.platform_support import find_file

MASK_SUFFIXES = (".png", ".tif", ".tiff")

_LARGEST = 400_000_000
_INDEX_MODES = {"1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N"}


def open_mask(path: Path) -> ImageFile:
    """Open a mask without decoding it.

    Raises:
        PathosegError: It is no PNG or TIFF.
    """
    # Not Image.open: its bound is a global, below ours, and it would try 40 other formats.
    kind = PngImageFile if path.suffix.lower() == ".png" else TiffImageFile
    with told(path, Exception):  # Pillow's parsers raise nearly everything
        return kind(path)


def decoded(path: Path) -> tuple[NDArray[Any], list[int]]:
    """Return the values of a mask, shape (height, width), and its palette, empty without one.

    Raises:
        PathosegError: It cannot be decoded.
    """
    with open_mask(path) as image, told(path, Exception):  # Pillow's decoders likewise
        values, palette = np.asarray(image), image.getpalette() or []
    # One bit a pixel is read as bool, whose values would name the classes.
    return values.astype(np.uint8) if values.dtype == np.bool_ else values, palette


def refuse_other_images(path: Path, image: ImageFile, slide_size: Size, is_tiled: bool) -> None:
    """Refuse an image that cannot be the mask of a slide.

    Args:
        path: Its file.
        image: The opened file.
        slide_size: Level-0 pixels of the slide.
        is_tiled: True if it is read tile by tile; its size is then not limited.

    Raises:
        PathosegError: It is above 400 megapixels, has several channels or pages, or another aspect.
    """
    size = Size(*image.size)
    if size.pixels > _LARGEST and not is_tiled:
        raise PathosegError(
            f"{path} has {size.width} × {size.height} px; a mask may have {_LARGEST:,} pixels.",
            "Save it smaller (any size with the slide's aspect will do), or, if it holds classes, "
            "as an 8-bit tiled TIFF.",
        )
    if image.mode not in _INDEX_MODES:
        raise PathosegError(
            f"{path} holds {image.mode} pixels, not one class index or object number per pixel.",
            "Save it as an 8-, 16- or 32-bit greyscale image of whole numbers, or with a palette.",
        )
    if not _same_aspect(size, slide_size):
        raise PathosegError(
            f"{path} has {size.width} × {size.height} px, another shape than its slide "
            f"({slide_size.width} × {slide_size.height} px).",
            "Use the mask of this slide, covering all of it.",
        )
    if isinstance(image, TiffImageFile) and _has_planes(image):
        raise PathosegError(
            f"{path} has several pages of {size.width} × {size.height} px; a mask has one.",
            "Write one page of class indices: 0 for background, 1 for the first class, and so on.",
        )


def _has_planes(image: TiffImageFile) -> bool:
    """Return True if a later page has the size of the first; smaller ones are overviews."""
    size = image.size
    # It has no more, or one that Pillow does not know, such as GDAL's of where there is data.
    with suppress(Exception):
        for number in count(1):
            image.seek(number)
            if image.size == size:
                return True
    return False


def mask_files(folder: Path, stems: Iterable[str]) -> list[Path]:
    """Find the masks of these names, with a suffix in small letters or else in capitals."""
    names = [f"{stem}{inner}" for stem in stems for inner in ("", ".ome")]
    for suffixes in (MASK_SUFFIXES, map(str.upper, MASK_SUFFIXES)):
        # Small letters and capitals are the same files on some systems.
        wanted = [f"{name}{suffix}" for suffix in suffixes for name in dict.fromkeys(names)]
        if found := [file for name in wanted if (file := find_file(folder, name))]:
            return found
    return []


def class_mask(path: Path) -> Path | None:
    """Find the mask of the classes beside one of object numbers: `X_classes.png` of `X_mask.png`.

    Raises:
        PathosegError: There are several.
    """
    stem = path.stem.removesuffix(".ome").removesuffix("_mask")
    found = mask_files(path.parent, [f"{stem}_classes"])
    if len(found) > 1:
        raise PathosegError(
            f"{path} has several masks of classes: {', '.join(map(str, found))}.",
            "Keep the one that counts.",
        )
    return found[0] if found else None


@contextmanager
def told(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a decoder into that of a mask that cannot be read."""
    try:
        yield
    except PermissionError:
        raise not_permitted(path) from None
    except errors as error:
        raise PathosegError(
            f"{path} cannot be read as a mask: {type(error).__name__}: {error}.",
            "Save it again as PNG or TIFF; values must be kept, so not as JPEG.",
        ) from error


def _same_aspect(mask: Size, slide: Size) -> bool:
    """Return True if the mask is the slide at one scale, with sides rounded up or down."""
    return abs(mask.width * slide.height - mask.height * slide.width) <= slide.width + slide.height
