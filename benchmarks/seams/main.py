"""Measures what predicting in tiles changes, by norm and overlap, against a whole pass."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.device import pick_device, to_input
from pathoseg.geometry import Box, Frame
from pathoseg.inference.infer_options import default_margin
from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import load_bundle
from pathoseg.outputs.stitch import TilePrediction, stitch
from pathoseg.slides.region import read_region
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.train import train

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="training of each norm")
    parser.add_argument("--quick", action="store_true", help="15 seconds of training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, float | str] = {"device": str(pick_device())}
    print("| norm | overlap | weightless margin | classes that differ | largest difference |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for norm in ("batch", "group", "instance"):
            flags: dict[str, dict[str, Any]] = {
                "data": {"slides": str(SAMPLES)},
                "model": {"norm": norm},
                "train": {"time_limit": 15.0 if options.quick else options.seconds},
            }
            run = train(TrainingArguments(SAMPLES / "demo.toml", flags, Path(folder) / norm))
            for overlap in (0, 16, 32, 64, 96):
                margin, differ, largest = _seam(run / "model", overlap)
                print(f"| {norm} | {overlap} | {margin} | {differ:.4%} | {largest:.2g} |")
                figures[f"differ_{norm}_{overlap}"] = differ
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _seam(bundle: Path, overlap: int) -> tuple[int, float, float]:
    """Margin, share of pixels whose class differs, largest difference of a probability."""
    model, card = load_bundle(bundle)
    model.to(pick_device())
    with open_slide(SAMPLES / "sample_06.svs") as slide:
        frame = Frame.at(slide.size, slide.mpp, card.mpp)
        size = frame.size.rounded_up(card.multiple)
        pixels = read_region(slide, frame, Box(0, 0, size.width, size.height)).pixels
    grid = TileGrid.cover(size, card.tile, overlap, card.multiple)

    def chances(image: NDArray[np.uint8]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(to_input(image[None], card.mean, card.std, pick_device()))
        answer: torch.Tensor = logits[0].softmax(0)
        return answer

    def tiles() -> Iterator[TilePrediction]:
        for index, box in enumerate(grid):
            tile = np.full((box.height, box.width, 3), 255, np.uint8)
            part = pixels[box.y : box.bottom, box.x : box.right]
            tile[: part.shape[0], : part.shape[1]] = part
            yield index, chances(tile), None

    margin = default_margin(overlap, edge_reach(model))
    bands = list(stitch(grid, tiles(), len(card.class_names) + 1, margin, lambda p: p))
    tiled, whole = np.concatenate(bands, axis=1), chances(pixels).cpu().numpy()
    differ = float((tiled.argmax(0) != whole.argmax(0)).mean())
    return margin, differ, float(np.abs(tiled - whole).max())


if __name__ == "__main__":
    main()
