"""Plain PNG, JPEG and BMP images, and arrays, as slides of one level, held in memory whole."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.BmpImagePlugin import BmpImageFile
from PIL.Image import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Level, Size
from pathoseg.slides.colour import on_white
from pathoseg.slides.resolution import MICRONS_PER_INCH, slide_mpp, tagged_mpp
from pathoseg.slides.slide_file import SlideFile, reason

# First bytes -> decoder. Decoders are called directly, not through PIL.Image.open, whose guard
# against bombs is a global that refuses images well below ours.
_DECODERS: dict[re.Pattern[bytes], type[ImageFile]] = {
    re.compile(rb"\x89PNG\r\n\x1a\n"): PngImageFile,
    re.compile(rb"\xff\xd8\xff"): JpegImageFile,
    re.compile(rb"BM.{4}\0{4}", re.DOTALL): BmpImageFile,
}
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
_MOST_PIXELS = 400_000_000
_CROP_PIXELS = 64_000_000  # PIL warns of larger crops


def is_image(head: bytes) -> bool:
    """Return True if the first bytes of a file are those of a PNG, JPEG or BMP."""
    return _decoder(head) is not None


def _decoder(head: bytes) -> type[ImageFile] | None:
    return next((kind for magic, kind in _DECODERS.items() if magic.match(head)), None)


class ImageSlide(SlideFile[Image]):
    """A plain image, decoded when opened; one that cannot be decoded whole is refused.

    Its pixels lie as they are stored. EXIF orientation turns nothing, because masks and outlines
    are made on the stored pixels.
    """

    def _open(self) -> Image:
        image = self._undecoded()
        try:
            self._check(image)
            image.load()
        except PathosegError:
            image.close()
            raise
        except MemoryError as error:  # no damage, so that its pixels are not unread
            image.close()
            raise PathosegError(
                f"{self.path} is decoded whole, and does not fit into memory.",
                "Convert it to a tiled pyramid, for example OME-TIFF.",
            ) from error
        except Exception as error:  # PIL's decoders raise of all kinds over malformed files
            image.close()
            raise UnreadableError(
                f"{self.path} cannot be decoded: {reason(error)}.",
                "Copy it again from where it came.",
            ) from error
        return image

    def _undecoded(self) -> ImageFile:
        try:
            with self.path.open("rb") as file:
                decoder = _decoder(file.read(16))
            if decoder is None:
                raise ValueError("it begins like none of them")
            return decoder(self.path)
        except Exception as error:  # for headers SyntaxError, struct.error, ValueError…
            raise PathosegError(
                f"{self.path} is no whole PNG, JPEG or BMP image: {reason(error)}.",
                "Copy it again from where it came.",
            ) from error

    def _check(self, image: Image) -> None:
        """Refuses, before it is decoded, what has too many pixels or pixels of no clear colour."""
        size = Size(*image.size)
        if image.mode not in _MODES:
            raise PathosegError(
                f"{self.path} holds pixels of Pillow's mode {image.mode}, which are neither 8-bit "
                "gray nor colour.",
                "Export it as 8-bit RGB.",
            )
        if not 0 < size.pixels <= _MOST_PIXELS:
            raise PathosegError(
                f"{self.path} claims {size.width} × {size.height} pixels; a plain image may have "
                f"{_MOST_PIXELS / 1e6:.0f} megapixels.",
                "Convert it to a tiled pyramid, for example OME-TIFF.",
            )

    def _read_header(self, assume_mpp: float | None) -> None:
        image = self._opened()
        self.vendor = "image"
        self.levels = (Level(Size(*image.size), 1.0),)
        self.held_pixels = self.size.pixels
        across, down = image.info.get("dpi", (None, None))
        stated = tagged_mpp(across, down, MICRONS_PER_INCH)
        self.mpp = slide_mpp(self.path, stated, None, assume_mpp)

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """See `Slide.read_level`."""
        image = self._opened()
        pixels = np.empty((box.height, box.width, 3), np.uint8)
        rows = max(1, _CROP_PIXELS // box.width)
        for top in range(0, box.height, rows):
            bottom = min(top + rows, box.height)
            part = image.crop((box.x, box.y + top, box.right, box.y + bottom))
            pixels[top:bottom] = on_white(part)
        return pixels


class ArraySlide(SlideFile[Image]):
    """A picture in memory as a slide of one level.

    Args:
        pixels: Shape (h, w, 3), RGB, uint8; not copied.
        mpp: Microns per pixel.
    """

    def __init__(self, pixels: NDArray[np.uint8], mpp: float) -> None:
        self._pixels = pixels
        super().__init__(Path("picture"), mpp)

    def _open(self) -> Image:
        raise AssertionError("a picture in memory has no file")

    def _read_header(self, assume_mpp: float | None) -> None:
        height, width, _ = self._pixels.shape
        self.vendor = "array"
        self.levels = (Level(Size(width, height), 1.0),)
        self.mpp = slide_mpp(self.path, None, None, assume_mpp)

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """See `Slide.read_level`."""
        return self._pixels[box.y : box.bottom, box.x : box.right]
