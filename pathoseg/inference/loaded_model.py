"""A trained model that predicts pictures in memory, for a user's own program."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import cv2
import numpy as np
from numpy.typing import NDArray

from pathoseg.config import Config
from pathoseg.device import pick_device
from pathoseg.errors import PathosegError
from pathoseg.inference.segmenter import Segmenter
from pathoseg.models.bundle import Bundle, load_bundle
from pathoseg.models.bundle_identity import bundle_id
from pathoseg.slides.image_reader import ArraySlide
from pathoseg.tiles.tile_options import TissueOptions


@dataclass(frozen=True)
class Prediction:
    """The prediction of a picture.

    Attributes:
        classes: Shape (h, w), uint8: the index in `LoadedModel.classes` of the most probable class.
        probabilities: Shape (classes, h, w), float32; they add up to 1.
    """

    classes: NDArray[np.uint8]
    probabilities: NDArray[np.float32]


class LoadedModel:
    """A model on its device.

    Args:
        segmenter: Its network and its card.

    Attributes:
        classes: Names, the background first.
        mpp: Microns per pixel that the network sees.
    """

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self.classes: tuple[str, ...] = ("background", *segmenter.card.class_names)
        self.mpp = segmenter.card.mpp

    @classmethod
    def load(cls, bundle: Path, factory: str | None = None, device: str | None = None) -> Self:
        """Load a bundle onto a device.

        Args:
            bundle: Its folder.
            factory: The user's own network that may be imported, as `module:factory`; or None.
            device: As for `pick_device`.

        Raises:
            PathosegError: The bundle cannot be used, or there is no such device.
        """
        model, card = load_bundle(bundle, factory)
        config = replace(Config(), tissue=TissueOptions(method="all"))
        return cls(Segmenter(model.to(pick_device(device)), card, config, bundle_id(bundle)))

    @property
    def card(self) -> Bundle:
        """The card of the bundle: classes, resolution, tile, normalisation."""
        return self._segmenter.card

    def predict(self, image: NDArray[np.uint8], mpp: float) -> Prediction:
        """Predict a picture as `pathoseg infer` predicts a slide, without looking for tissue.

        Args:
            image: Shape (h, w, 3), RGB, uint8.
            mpp: Microns per pixel of the picture; it is resampled to the model's.

        Returns:
            Classes and probabilities of the picture's own pixels. Of a model that classifies
            tiles, those of its tiles: shapes (rows, columns) and (classes, rows, columns).

        Raises:
            PathosegError: The array is no picture, or is too coarse for the model.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise PathosegError(
                f"predict takes RGB pixels of shape (h, w, 3) and type uint8, not shape "
                f"{image.shape} and type {image.dtype}.",
                "Convert the picture first, for example by PIL's convert('RGB').",
            )
        if not 0 < mpp < np.inf:
            raise PathosegError(
                f"predict cannot take mpp = {mpp}.", "Give the microns per pixel of the picture."
            )
        found = self._segmenter.probabilities(ArraySlide(image, mpp))
        if self.card.model.task != "classify" and found.shape[1:] != image.shape[:2]:
            found = _of_picture(found, image.shape[:2], self.card.mpp / mpp)
        return Prediction(found.argmax(0).astype(np.uint8), found)


def _of_picture(
    planes: NDArray[np.float32], shape: tuple[int, ...], scale: float
) -> NDArray[np.float32]:
    """Interpolate planes at the pixels of a picture; the last row and column may reach beyond it.

    Args:
        planes: Shape (n, h, w), at the model's resolution.
        shape: The picture's height and width.
        scale: Pixels of the picture to one of the model's.
    """
    height, width = (
        max(side, math.ceil(pixels * scale - 1e-6))
        for side, pixels in zip(shape, planes.shape[1:], strict=True)
    )
    whole = np.stack([cv2.resize(each, (width, height)) for each in planes])  # bilinear
    return whole[:, : shape[0], : shape[1]]
