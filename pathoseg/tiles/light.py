"""Colour, blur and noise are albumentations', of which two are computed faster here."""

from __future__ import annotations

import os
from typing import Any

# Before the import, which would otherwise ask the network for a newer version.
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
import albumentations
import cv2
import numpy as np
from albucore import sz_lut
from numpy.typing import NDArray

from pathoseg.tiles.tile_options import AugmentOptions

Image = NDArray[np.uint8]

_STRIP = 2**15  # pixels of noise made at once, to stay in a core's cache


def light_pipeline(options: AugmentOptions) -> Any:
    """Colour, blur and noise; to be seeded before each use, and for one thread.

    Its images are changed in place.
    """
    share = options.colour
    around = (1 - share, 1 + share)
    return albumentations.Compose(
        [
            ColourJitter(
                brightness=around,
                contrast=around,
                saturation=around,
                hue=(-share / 5, share / 5),
                p=float(share > 0),
            ),
            albumentations.GaussianBlur(blur_limit=0, sigma_limit=(0.5, 1.5), p=options.blur),
            Noise(std_range=(0.01, 0.03), p=options.noise),
        ]
    )


class ColourJitter(albumentations.ColorJitter):  # type: ignore[misc]  # it has no types
    """The same pixels as its parent's, in place and in memory that is kept.

    The parent takes fresh memory for each of ten steps, whose pages cost more than the steps.
    """

    def apply(
        self,
        img: Image,
        brightness: float,
        contrast: float,
        saturation: float,
        hue: float,
        order: list[int],
        **params: Any,
    ) -> Image:
        kept = getattr(self, "_kept", None)
        if kept is None or kept.shape != img.shape:
            kept = self._kept = np.empty_like(img)
            self._gray = np.empty(img.shape[:2], np.uint8)
        gray, values = self._gray, np.arange(256, dtype=np.float32)
        for step in order:
            if step == 0:
                _look_up(img, values * np.float32(brightness))
            elif step == 1:
                total = cv2.sumElems(cv2.cvtColor(img, cv2.COLOR_RGB2GRAY, dst=gray))[0]
                _look_up(img, values * contrast + total / gray.size * (1 - contrast))
            elif step == 2 and saturation != 1:
                cv2.cvtColor(img, cv2.COLOR_RGB2GRAY, dst=gray)
                cv2.cvtColor(gray, cv2.COLOR_GRAY2RGB, dst=kept)
                cv2.addWeighted(img, saturation, kept, 1 - saturation, 0, dst=img)
            elif step == 3 and hue != 0:
                cv2.cvtColor(img, cv2.COLOR_RGB2HSV, dst=kept)
                cv2.extractChannel(kept, 0, dst=gray)
                _look_up(gray, np.mod(np.arange(256, dtype=np.int16) + 180 * hue, 180))
                cv2.insertChannel(gray, kept, 0)
                cv2.cvtColor(kept, cv2.COLOR_HSV2RGB, dst=img)
        return img


class Noise(albumentations.GaussNoise):  # type: ignore[misc]  # it has no types
    """The same pixels as its parent's, in place and strip by strip."""

    def get_params_dependent_on_data(
        self, params: dict[str, Any], data: dict[str, Any]
    ) -> dict[str, Any]:
        sigma = self.py_random.uniform(*self.std_range)
        self.py_random.uniform(*self.mean_range)  # which is 0
        return {"sigma": sigma, "seed": int(self.random_generator.integers(0, 2**16))}

    def apply(self, img: Image, sigma: float, seed: int, **params: Any) -> Image:
        cv2.setRNGSeed(seed)  # of this thread
        rows = max(1, _STRIP // img.shape[1])
        for top in range(0, len(img), rows):
            strip = img[top : top + rows]
            noise = np.empty(strip.shape, np.float32)
            cv2.randn(noise, np.zeros(3), np.full(3, sigma, np.float32))
            noise *= 255
            # Cut towards 0, as the parent does.
            cv2.add(strip, noise.astype(np.int16), dst=strip, dtype=cv2.CV_8U)
        return img


def _look_up(image: Image, values: NDArray[Any]) -> None:
    sz_lut(image, np.clip(values, 0, 255).astype(np.uint8), inplace=True)
