"""The Slide protocol, and `open_slide`, which picks the reader that fits a file."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Frame, Level, Mpp, Size
from pathoseg.slides.direct_reader import directly
from pathoseg.slides.image_reader import ImageSlide, is_image
from pathoseg.slides.openslide_reader import OpenSlideSlide, scanner_format
from pathoseg.slides.tiff_reader import TiffSlide, is_tiff
from pathoseg.slides.zarr_folder import is_zarr


class Slide(Protocol):
    """A pyramid of RGB pixels with a known resolution.

    Coordinates are pixels of the slide's own frame: where the file has bounds (MRXS), (0, 0) is
    their corner, as in QuPath. One object serves one thread at a time; a `copy.copy` or pickle of
    it opens the file anew.

    Attributes:
        path: The file.
        vendor: Who wrote it ("aperio", "hamamatsu", "ome", "image"…).
        levels: Stored resolutions, level 0 first.
        reduced: Resolutions that are not stored, but read in less time than the stored one that
            they come from; `read_level` counts them on from the stored ones.
        mpp: Microns per level-0 pixel.
        origin: Where the frame's (0, 0) lies in the file's uncropped level 0: (0, 0) mostly.
        held_pixels: Pixels that are decoded at once, and stay while it is open, where those are a
            whole picture or most of it: readers should take turns. 0 of others.
        warnings: What the user should know of the file: "it holds 3 scenes…".
    """

    @property
    def path(self) -> Path: ...
    @property
    def vendor(self) -> str: ...
    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def reduced(self) -> tuple[Level, ...]: ...
    @property
    def mpp(self) -> Mpp: ...
    @property
    def origin(self) -> tuple[int, int]: ...
    @property
    def held_pixels(self) -> int: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> Size:
        """Pixels of level 0."""
        ...

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        """The pixels of `box`, given in pixels of `level` and wholly inside it.

        Returns:
            Array of shape (height, width, 3), RGB; transparent pixels are white.

        Raises:
            UnreadableError: The file cannot deliver them; later reads may succeed.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_slide(path: Path, assume_mpp: float | None = None) -> Slide:
    """Open a slide with the reader that its content asks for, whatever its name.

    Args:
        path: The file, or the folder of an OME-Zarr slide.
        assume_mpp: Microns per level-0 pixel where the file states none; never overrules it.

    Raises:
        PathosegError: There is no such file, no reader fits, the file is damaged beyond reading
            anything, or its resolution is unknown.
    """
    slide: Slide
    if is_zarr(path):
        # A second to import, and few slides need it.
        from pathoseg.slides.zarr_reader import ZarrSlide

        slide = ZarrSlide(path, assume_mpp)
    else:
        slide = _open_file(path, assume_mpp)
    try:
        _read_somewhere(slide)
    except UnreadableError:
        slide.close()
        raise
    return slide


def is_picture(path: Path) -> bool:
    """Return True if a file is a plain image, which is decoded whole when it is opened."""
    try:
        return is_image(_head(path)) and scanner_format(path) is None  # MIRAX begins as a JPEG
    except PathosegError:
        return False


def _open_file(path: Path, assume_mpp: float | None) -> Slide:
    head = _head(path)
    slide: Slide
    if scanner_format(path) is not None:
        slide = directly(OpenSlideSlide(path, assume_mpp))
    elif is_tiff(head):
        slide = directly(TiffSlide(path, assume_mpp))
    elif is_image(head):
        slide = ImageSlide(path, assume_mpp)
    else:
        raise PathosegError(
            f"{path} is in no format that pathoseg reads.",
            "Give a scanner's file (svs, ndpi, mrxs, scn, bif, DICOM…), a TIFF, PNG, JPEG or BMP, "
            "or a folder that is OME-Zarr.",
        )
    return slide


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError as error:
        raise PathosegError(f"{path} does not exist.", "Check the path.") from error
    except IsADirectoryError as error:
        raise PathosegError(f"{path} is a directory.", "Name a slide in it.") from error
    except OSError as error:
        raise PathosegError(
            f"{path} cannot be read: {error.strerror}.", "Check its permissions and its disk."
        ) from error
    if not head:
        raise PathosegError(f"{path} is empty.", "Copy it again from where it came.")
    return head


def _read_somewhere(slide: Slide) -> None:
    """Raise UnreadableError unless a pixel of the first, the middle or the last corner reads.

    A file of which nothing decodes is thus refused when opened, not after hours of unread tiles.
    """
    width, height = slide.size.width, slide.size.height
    spots = [(0, 0), (width // 2, height // 2), (width - 1, height - 1)]
    while True:
        try:
            slide.read_level(0, Box(*spots.pop(0), 1, 1))
        except UnreadableError:
            if not spots:
                raise
        else:
            return


def model_frame(slide: Slide, mpp: float) -> Frame:
    """The frame of a slide at a model's resolution.

    Raises:
        PathosegError: The slide is more than twice coarser than the model sees.
    """
    if slide.mpp.mean > 2 * mpp:
        raise PathosegError(
            f"{slide.path} has {slide.mpp.mean:.4g} µm per pixel, more than twice the {mpp:g} µm "
            "of the model: the detail it needs was never scanned.",
            f"Train at --mpp {ceil(50 * slide.mpp.mean) / 100:g} or coarser, or use a finer scan.",
        )
    return Frame.at(slide.size, slide.mpp, mpp)
