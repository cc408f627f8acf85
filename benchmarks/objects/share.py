"""Times the forward passes of a slide beside the post-processing of its real nuclei."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tifffile
import torch
from numpy.typing import NDArray
from ours import CLASSES, Figures, post_process
from synthetic import HEIGHT_LEVELS

from pathoseg.config_file import load_config
from pathoseg.geometry import Box
from pathoseg.inference.segmenter import Segmenter
from pathoseg.interruption import Interruption
from pathoseg.models.build import build_model, tile_multiple
from pathoseg.models.bundle import Bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import model_frame, open_slide

MPP = 0.5
Picture = NDArray[np.uint8]


def main() -> None:
    """`share.py MONUSEG SIDE ROUNDS`: a slide of SIDE² of its images; prints figures as JSON."""
    data, side, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forward, objects, figures = list[float](), list[float](), Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = write_slide(folder / "slide.tif", data, side)
        planes = true_planes(numbers)
        segmenter, spent = segmenter_of_width_16()
        with open_slide(folder / "slide.tif", None) as slide:
            frame, plan = model_frame(slide, MPP), segmenter.plan(slide)

            def read(box: Box) -> Picture:
                return read_region(slide, frame, box).pixels

            for _ in range(rounds):
                spent.clear()
                for _ in segmenter.rows(plan, Interruption("")):
                    pass
                forward.append(sum(spent))
                bands = np.split(planes, range(512, planes.shape[1], 512), axis=1)
                figures = post_process(map(np.ascontiguousarray, bands), frame, read, folder)
                objects.append(figures["find_s"] + figures["read_s"] + figures["write_s"])
    print(
        json.dumps(
            {
                "share_nuclei": len(np.unique(numbers)) - 1,
                "share_objects": figures["objects"],
                "share_mpx": planes[0].size / 1e6,
                "forward_s": statistics.median(forward),
                "postprocess_s": statistics.median(objects),
            }
        )
    )


def write_slide(path: Path, data: Path, side: int) -> NDArray[np.int32]:
    """Write images side by side as a slide of JPEG tiles at 0.25 µm.

    Args:
        path: Where to write.
        data: Holds `images` and, for some of them, `instances`.
        side: Images along each side; they repeat where there are fewer.

    Returns:
        The number of each pixel's nucleus, from 1; 0 where there is none.
    """
    masks = sorted((data / "instances").glob("*.png"))
    chosen = [masks[place % len(masks)] for place in range(side**2)]
    pictures = [tifffile.imread(data / "images" / f"{mask.stem}.tif")[..., :3] for mask in chosen]
    numbers, last = list[NDArray[np.int32]](), 0
    for mask in chosen:
        values = np.asarray(cv2.imread(str(mask), cv2.IMREAD_UNCHANGED), np.int32)
        numbers.append(np.where(values > 0, values + last, 0))
        last = int(numbers[-1].max(initial=last))

    def joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
        rows = [np.concatenate(parts[at : at + side], axis=1) for at in range(0, side**2, side)]
        return np.concatenate(rows)

    tifffile.imwrite(
        path,
        joined(pictures),
        tile=(256, 256),
        photometric="rgb",
        compression="jpeg",
        resolution=(40_000, 40_000),
        resolutionunit="CENTIMETER",
    )
    return joined(numbers)


def true_planes(numbers: NDArray[np.int32]) -> Picture:
    """Return the planes of a perfect answer at 0.5 µm, shape (3, rows, columns)."""
    coarse = numbers[::2, ::2].astype(np.float32)
    kernel = np.ones((3, 3), np.uint8)
    core = (coarse > 0) & (cv2.erode(coarse, kernel) == cv2.dilate(coarse, kernel))
    depth = cv2.distanceTransform(core.astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE) + 0.5
    inside = coarse > 0
    height = np.where(inside, (depth * HEIGHT_LEVELS).round().clip(max=248), 0)
    return np.stack([inside, height, inside * 230.0]).astype(np.uint8)


def segmenter_of_width_16() -> tuple[Segmenter, list[float]]:
    """Return a segmenter with fresh weights, and a list that gets the processor time of passes."""
    model = ModelConfig("unet", "objects", len(CLASSES), width=16)
    network, spent = build_model(model).eval(), list[float]()
    card = Bundle(
        model,
        CLASSES.names,
        CLASSES.colours,
        mpp=MPP,
        tile=256,
        overlap=64,
        mean=(0.7, 0.5, 0.7),
        std=(0.2, 0.2, 0.2),
        multiple=tile_multiple(network),
    )
    logits_inside: Any = network.logits_inside

    def timed(*inputs: Any) -> Any:
        began = time.thread_time()
        logits = logits_inside(*inputs)
        spent.append(time.thread_time() - began)
        return logits

    network.__dict__["logits_inside"] = timed  # what the segmenter asks of a window
    return Segmenter(network, card, load_config(None, {"tissue": {"method": "all"}})), spent


if __name__ == "__main__":
    main()
