"""A trained model that predicts pictures in memory, for a user's own program."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.config import Config, InferConfig
from pathoseg.device import pick_device
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box
from pathoseg.inference.publish import object_finder
from pathoseg.inference.segmenter import Segmenter
from pathoseg.models.bundle import Bundle, load_bundle
from pathoseg.models.bundle_identity import bundle_id
from pathoseg.outputs.stitch import object_planes
from pathoseg.slides.image_reader import ArraySlide
from pathoseg.slides.slide import model_frame
from pathoseg.tiles.tile_options import TissueOptions


@dataclass(frozen=True)
class Prediction:
    """The prediction of a picture.

    Attributes:
        classes: Shape (h, w), uint8: the index in `LoadedModel.classes` of the most probable class.
        probabilities: Shape (classes, h, w), float32; they add up to 1.
        objects: Shape (h, w), int32: the number of each pixel's object, from 1; 0 where there is
            none. None unless the model separates objects.
        object_classes: Shape (objects,), uint8: at n - 1 the class of object n, as an index in
            `LoadedModel.classes`. None unless the model separates objects.
    """

    classes: NDArray[np.uint8]
    probabilities: NDArray[np.float32]
    objects: NDArray[np.int32] | None = None
    object_classes: NDArray[np.uint8] | None = None


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
            Classes and probabilities of the picture's own pixels, and the objects that `infer`
            would find with its default options. Of a model that classifies tiles, those of its
            tiles: shapes (rows, columns) and (classes, rows, columns).

        Raises:
            PathosegError: The array is no picture, or is too coarse for the model.
        """
        if not isinstance(image, np.ndarray):
            raise PathosegError(
                f"predict takes an array of numpy, not {type(image).__name__}.",
                "Convert the picture first: np.asarray(picture.convert('RGB')).",
            )
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise PathosegError(
                f"predict takes RGB pixels of shape (h, w, 3) and type uint8, not shape "
                f"{image.shape} and type {image.dtype}.",
                "Convert the picture first, for example by PIL's convert('RGB').",
            )
        if not (isinstance(mpp, int | float | np.number) and 0 < mpp < np.inf):
            raise PathosegError(
                f"predict cannot take mpp = {mpp!r}.", "Give the microns per pixel of the picture."
            )
        picture, shape, scale = ArraySlide(image, mpp), image.shape[:2], self.mpp / mpp
        maps = self._segmenter.maps(picture)
        found = maps[: len(self.classes)]
        if self.card.model.task != "classify" and found.shape[1:] != shape:
            found = _of_picture(found, shape, scale)
        prediction = Prediction(found.argmax(0).astype(np.uint8), found)
        if not self._segmenter.separates:
            return prediction
        objects, classes = self._separate(picture, maps)
        nearest = (
            np.minimum(((np.arange(pixels) + 0.5) / scale).astype(int), side - 1)
            for pixels, side in zip(shape, objects.shape, strict=True)
        )
        return replace(prediction, objects=objects[np.ix_(*nearest)], object_classes=classes)

    def _separate(
        self, picture: ArraySlide, maps: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return the objects of a picture at the model's resolution, as `Prediction` has them."""
        finder = object_finder(model_frame(picture, self.mpp), InferConfig())
        objects, classes = np.zeros(maps.shape[1:], np.int32), list[int]()
        whole = Box(0, 0, maps.shape[2], maps.shape[1])
        for found in finder.add(object_planes(torch.from_numpy(maps)).numpy()):
            numbers = np.where(found.labels > 0, found.labels + len(classes), 0)
            objects[found.box.within(whole)] += numbers  # no pixel is in two objects
            classes += found.class_index.tolist()
        return objects, np.array(classes, np.uint8)


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
