"""Where the centres of a frame's pixels lie on level 0, and which of them lie on the slide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE
from pathoseg.geometry import Box, Frame, Size


def pixel_centres(box: Box, frame: Frame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Level-0 x of the columns, shape (width,), and y of the rows, shape (height,), of `box`."""
    x = (np.arange(box.x, box.right, dtype=np.float64) + 0.5) * frame.scale_x
    y = (np.arange(box.y, box.bottom, dtype=np.float64) + 0.5) * frame.scale_y
    return x, y


def ignore_outside(mask: NDArray[np.uint8], box: Box, frame: Frame, slide_size: Size) -> None:
    """Sets the pixels of `mask` whose centres lie outside the slide to 255."""
    x, y = pixel_centres(box, frame)
    mask[:, (x < 0) | (x >= slide_size.width)] = IGNORE
    mask[(y < 0) | (y >= slide_size.height), :] = IGNORE
