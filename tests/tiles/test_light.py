"""Colour, blur and noise are albumentations' own to the pixel, however they are computed."""

from __future__ import annotations

import albumentations
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pathoseg.tiles.light import light_pipeline
from pathoseg.tiles.tile_options import AugmentOptions


@settings(max_examples=60)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    colour=st.sampled_from([0.0, 0.1, 0.9]),
    blur=st.sampled_from([0.0, 0.5]),
    noise=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**31 - 1),
)
@example(height=300, width=257, colour=0.1, blur=0.0, noise=1.0, seed=3)  # noise in several strips
def test_light_is_as_albumentations_makes_it(
    height: int, width: int, colour: float, blur: float, noise: float, seed: int
) -> None:
    around = (1 - colour, 1 + colour)
    hue = (-colour / 5, colour / 5)
    theirs = albumentations.Compose(
        [
            albumentations.ColorJitter(around, around, around, hue, p=float(colour > 0)),
            albumentations.GaussianBlur(blur_limit=0, sigma_limit=(0.5, 1.5), p=blur),
            albumentations.GaussNoise(std_range=(0.01, 0.03), p=noise),
        ]
    )
    ours = light_pipeline(AugmentOptions(colour=colour, blur=blur, noise=noise))
    rng = np.random.default_rng(seed)
    for number in range(3):  # what a thread keeps from tile to tile changes nothing
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for pipeline in (theirs, ours):
            pipeline.set_random_seed(seed + number)
        expected = theirs(image=image.copy())["image"]
        np.testing.assert_array_equal(ours(image=image)["image"], expected)
