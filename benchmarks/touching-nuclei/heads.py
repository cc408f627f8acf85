"""Compares two ways to part touching nuclei: distance to the edge, and HoVer-Net's two distances.

Same network, tiles, augmentation, order of samples and processor time; the heads differ in their
last channels, in what these learn, and in how objects are made of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from main import DEPTHS, MPP, counted, labels_of, separated, split
from numpy.typing import NDArray
from scipy import ndimage

from pathoseg.models.build import build_model, lay_out
from pathoseg.models.losses import height_error
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs.stitch import object_planes
from pathoseg.tiles.tile_options import AugmentOptions
from pathoseg.tiles.transform import Augmentation
from pathoseg.training.tasks import object_height

SIDE, BATCH, RATE = 256, 4, 2e-3
SMALLEST_UM2 = 10.0  # of both heads: what is smaller is left out
MULTIPLE = 16  # of a picture's sides, for the network

Pixels = NDArray[np.uint8]
Maps = NDArray[np.float32]
Numbers = NDArray[np.int32]


class Head(Protocol):
    """The channels beside those of the two classes."""

    @property
    def channels(self) -> int: ...
    @property
    def settings(self) -> Sequence[float]:
        """Values that are tried on the trained images."""
        ...

    def targets(self, colours: Pixels) -> Maps:
        """Return (channels, height, width) of the objects of a tile."""
        ...

    def loss(self, answer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...

    def objects(self, answer: torch.Tensor, setting: float) -> Numbers:
        """Return the numbers of the objects, of logits (2 + channels, height, width)."""
        ...


class Distance:
    """The distance to the object's edge, as pathoseg learns it."""

    channels = 1
    settings = DEPTHS

    def targets(self, colours: Pixels) -> Maps:
        return object_height(colours)[None]

    def loss(self, answer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * height_error(answer[:, 0], targets[:, 0]).mean()

    def objects(self, answer: torch.Tensor, setting: float) -> Numbers:
        maps = torch.cat([answer[:2].softmax(0), answer[2:]])
        return separated(object_planes(maps).numpy(), setting, SMALLEST_UM2)


class HorizontalVertical:
    """Distances to the centroid, across and down (Graham et al., HoVer-Net, 2019, section 3)."""

    channels = 2
    settings = (0.3, 0.4, 0.5, 0.6)

    def targets(self, colours: Pixels) -> Maps:
        """Of each pixel of an object, -1 at the left or upper edge to 1 at the other."""
        maps = np.zeros((2, *colours.shape), np.float32)
        for colour in np.unique(colours[colours > 0]):
            areas, count = ndimage.label(colours == colour)
            for number, place in enumerate(ndimage.find_objects(areas, count), start=1):
                own = areas[place] == number
                for axis, offsets in enumerate(np.nonzero(own)[::-1]):
                    away = (offsets - offsets.mean()).astype(np.float32)
                    away[away < 0] /= max(-away.min(), 1)
                    away[away > 0] /= max(away.max(), 1)
                    maps[axis][place][own] = away
        return maps

    def loss(self, answer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean squared error of the maps, and twice that of their slopes inside objects."""
        inside = (targets != 0).any(1).float()
        slopes = answer.new_zeros(())
        for axis, dimension in ((0, -1), (1, -2)):
            error = _slope(answer[:, axis], dimension) - _slope(targets[:, axis], dimension)
            slopes = slopes + (error**2 * inside).sum() / (inside.sum() + 1)
        return F.mse_loss(answer, targets) + 2 * slopes

    def objects(self, answer: torch.Tensor, setting: float) -> Numbers:
        """Markers where the slopes are small, and a watershed from these (there, section 3.2)."""
        inside = answer[:2].argmax(0).numpy().astype(bool)
        smallest = round(SMALLEST_UM2 / MPP**2)
        edges = np.zeros(inside.shape, np.float32)
        for axis, order in ((0, (1, 0)), (1, (0, 1))):
            slope = cv2.Sobel(_stretched(answer[2 + axis].numpy()), cv2.CV_32F, *order, ksize=21)
            edges = np.maximum(edges, 1 - _stretched(slope))
        edges[~inside] = 0
        energy = cv2.GaussianBlur((1 - edges) * inside, (3, 3), 0)
        marked = ndimage.binary_fill_holes(inside & (edges < setting))
        ellipse = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (5, 5))
        marked = cv2.morphologyEx(marked.astype(np.uint8), cv2.MORPH_OPEN, ellipse)
        markers, _ = ndimage.label(marked)
        sizes = np.bincount(markers.reshape(-1))
        markers[sizes[markers] < 10] = 0
        markers[~inside] = -1
        basins = ndimage.watershed_ift(
            (255 * (1 - energy)).round().astype(np.uint8), markers.astype(np.int32), np.ones((3, 3))
        )
        basins[~inside] = 0
        sizes = np.bincount(basins.clip(0).reshape(-1))
        return np.where(sizes[basins.clip(0)] < smallest, 0, basins.clip(0)).astype(np.int32)


def _slope(maps: torch.Tensor, dimension: int) -> torch.Tensor:
    """Sobel's slope over five pixels, as a difference of shifted maps."""
    weights = torch.tensor([-1.0, -2.0, 0.0, 2.0, 1.0], device=maps.device) / 8
    kernel = weights.reshape((1, 1, 1, 5) if dimension == -1 else (1, 1, 5, 1))
    return F.conv2d(maps[:, None], kernel, padding=(0, 2) if dimension == -1 else (2, 0))[:, 0]


def _stretched(values: NDArray[Any]) -> Maps:
    low, high = values.min(), values.max()
    scaled: Maps = ((values - low) / max(high - low, 1e-6)).astype(np.float32)
    return scaled


HEADS: dict[str, Head] = {"distance": Distance(), "horizontal-vertical": HorizontalVertical()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of a training on two cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    trained, held_out = ([read(*pair) for pair in pairs] for pairs in split("monuseg"))
    figures: dict[str, float] = {}
    for name, head in HEADS.items():
        model, steps = train(head, trained, 2 * 60 * options.minutes, options.seed)
        figures[f"{name}_steps"] = steps
        answers = [predicted(model, image) for image, _ in trained]
        truth = [labels for _, labels in trained]
        quality = {
            setting: counted(truth, [head.objects(each, setting) for each in answers])["pq"]
            for setting in head.settings
        }
        best = max(quality, key=lambda setting: quality[setting])
        found = [head.objects(predicted(model, image), best) for image, _ in held_out]
        scores = counted([labels for _, labels in held_out], found)
        figures[f"{name}_setting"] = best
        figures |= {f"{name}_{key}": round(scores[key], 4) for key in ("aji", "pq", "object_ratio")}
        print(json.dumps(figures, indent=2), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures) + "\n")


def read(image: Path, mask: Path) -> tuple[Pixels, Numbers]:
    return tifffile.imread(image), labels_of(mask)


def train(
    head: Head, images: Sequence[tuple[Pixels, Numbers]], seconds: float, seed: int
) -> tuple[torch.nn.Module, int]:
    """Train until `seconds` of processor time are used; the rate falls to zero over them."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = ModelConfig("unet", "segment", 2 + head.channels, width=16)
    model = build_model(config)
    layout = lay_out(model, config, "cpu")
    optimiser = torch.optim.AdamW(model.parameters(), RATE)
    augment, began, steps = Augmentation(AugmentOptions()), time.process_time(), 0
    while (used := (time.process_time() - began) / seconds) < 1:
        tiles = [
            _tile(images[int(rng.integers(len(images)))], augment, head, rng) for _ in range(BATCH)
        ]
        inputs, classes, maps = (
            torch.from_numpy(np.stack(each)) for each in zip(*tiles, strict=True)
        )
        optimiser.param_groups[0]["lr"] = RATE * (1 - used) ** 0.9
        answer = model(inputs.contiguous(memory_format=layout))
        loss = F.cross_entropy(answer[:, :2], classes) + head.loss(answer[:, 2:], maps)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        steps += 1
    return model.eval(), steps


def _tile(
    of: tuple[Pixels, Numbers], augment: Augmentation, head: Head, rng: np.random.Generator
) -> tuple[Maps, NDArray[np.int64], Maps]:
    image, labels = of
    top, left = (int(rng.integers(side - SIDE)) for side in labels.shape)
    part = np.s_[top : top + SIDE, left : left + SIDE]
    numbers = labels[part]
    # Touching nuclei have numbers that lie near each other, so these differ.
    colours = np.where(numbers > 0, 1 + numbers % 254, 0).astype(np.uint8)
    pixels, changed = augment(image[part], colours, rng)
    changed[changed == 255] = 0  # moved in from beyond the tile
    return (
        _normalised(pixels),
        (changed > 0).astype(np.int64),
        head.targets(changed),
    )


def _normalised(pixels: Pixels) -> Maps:
    normalised: Maps = ((pixels.astype(np.float32) - 127.5) / np.float32(64)).transpose(2, 0, 1)
    return normalised


def predicted(model: torch.nn.Module, image: Pixels) -> torch.Tensor:
    """Logits of a whole image, mirrored at its edges."""
    height, width = image.shape[:2]
    more = [(0, -side % MULTIPLE) for side in (height, width)]
    padded = np.pad(image, [*more, (0, 0)], mode="reflect")
    with torch.inference_mode():
        answer: torch.Tensor = model(torch.from_numpy(_normalised(padded))[None])
    return answer[0, :, :height, :width].float()


if __name__ == "__main__":
    main()
