"""Averages over cells of whole pixels."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def averages(pixels: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """The means of cells of so many pixels, rounded where pixels are whole numbers."""
    if (width, height) == (1, 1):
        return pixels
    if (width, height) == (2, 2):  # what Pillow gives, in a quarter of the time
        size = pixels.shape[1] // 2, pixels.shape[0] // 2
        return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return np.array(Image.fromarray(pixels).reduce((width, height)))
