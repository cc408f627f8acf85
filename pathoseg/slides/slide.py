"""The Slide protocol, and `open_slide`, which picks the reader that fits a file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pathoseg.geometry import Box, Level, Mpp, Size


class Slide(Protocol):
    """A pyramid of RGB pixels with a known resolution.

    Coordinates are pixels of the slide's own frame: where the file has bounds (MRXS), (0, 0) is
    their corner, as in QuPath. One object serves one thread at a time.

    Attributes:
        path: The file.
        vendor: Who wrote it ("aperio", "hamamatsu", "ome", "image"…).
        levels: Stored resolutions, level 0 first.
        mpp: Microns per level-0 pixel.
        origin: Where the frame's (0, 0) lies in the file's uncropped level 0: (0, 0) mostly.
    """

    @property
    def path(self) -> Path: ...
    @property
    def vendor(self) -> str: ...
    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def mpp(self) -> Mpp: ...
    @property
    def origin(self) -> tuple[int, int]: ...

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
