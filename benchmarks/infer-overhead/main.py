"""Times `pathoseg infer` on a slide against the bare forward passes of its tissue."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pathoseg.device import MEAN, STD, device_name, pick_device
from pathoseg.host_memory import LARGE, keep_freed_memory, share_one_heap
from pathoseg.inference.infer_options import default_overlap
from pathoseg.models.build import build_model, edge_reach, tile_multiple
from pathoseg.models.bundle import Bundle, load_bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides.slide import model_frame, open_slide
from pathoseg.tiles.grid import TileGrid
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import find_tissue
from pathoseg.workflows.infer import InferArguments, infer

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_data" / "sample_06.svs"
SIDES = (256, 512, 1024, 2048)
_TRIED = 2**20  # pixels by which the sides are compared, at least one tile
_HOPELESS = 1.5  # times the fewest pixels: no side makes up for so much


@dataclass
class Times:
    """Seconds on the wall and on cores of each round."""

    wall: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)

    def take(self, work: Callable[[], object]) -> None:
        wall, cores = time.perf_counter(), time.process_time()
        work()
        self.wall.append(time.perf_counter() - wall)
        self.cores.append(time.process_time() - cores)


def main() -> None:
    share_one_heap()  # as `infer` does, which on the command line is the first to compute
    keep_freed_memory(LARGE)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path, default=SAMPLE)
    parser.add_argument("--assume-mpp", type=float, default=0.5)
    parser.add_argument("--tile", type=int, default=1024, help="what the model was trained at")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 µm, four rounds, trained at 256 px")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trained, mpp = (256, 2.0) if options.quick else (options.tile, 0.5)
    rounds = 4 if options.quick else options.rounds
    torch.manual_seed(0)
    counts = _tissue_tiles(options.slide, options.assume_mpp, mpp)
    ours, bare = Times(), Times()
    with tempfile.TemporaryDirectory() as folder:
        bundle = _bundle(Path(folder) / "model", trained, mpp)
        model, _ = load_bundle(bundle)
        model.to(pick_device(), memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its stub
        side = _best_side(model, counts)
        flags = {"data": {"assume_mpp": options.assume_mpp}}
        for number in range(rounds):
            out = Path(folder) / f"results-{number}"
            ours.take(partial(infer, InferArguments([options.slide], bundle, out, None, flags)))
            bare.take(partial(_forward, model, side, counts[side]))
    overhead, of_cores = (
        statistics.median(a) / statistics.median(b)
        for a, b in ((ours.wall, bare.wall), (ours.cores, bare.cores))
    )
    print(f"{options.slide.name}, {counts[side]} tiles of {side} px, {os.cpu_count()} cores")
    print("| | median s | all | of cores |\n|---|---|---|---|")
    for name, times in (("infer", ours), ("bare forward", bare)):
        each = ", ".join(f"{value:.2f}" for value in times.wall)
        cores = ", ".join(f"{value:.2f}" for value in times.cores)
        print(f"| {name} | {statistics.median(times.wall):.2f} | {each} | {cores} |")
    print(f"overhead {overhead:.3f}, of cores {of_cores:.3f}")
    if options.json:
        figures = {
            "overhead": overhead,
            "overhead_cores": of_cores,
            "tiles": counts[side],
            "side": side,
            "device": device_name(pick_device()),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _tissue_tiles(slide: Path, assume_mpp: float, mpp: float) -> dict[int, int]:
    """Side → how many tiles of it, side by side, hold tissue."""
    with open_slide(slide, assume_mpp) as opened:
        tissue, frame = find_tissue(opened, TissueOptions()), model_frame(opened, mpp)
        return {
            side: sum(tissue.share(box, frame) > 0 for box in TileGrid.cover(frame.size, side))
            for side in SIDES
            if side <= max(SIDES[0], frame.size.width, frame.size.height)
        }


def _bundle(folder: Path, tile: int, mpp: float) -> Path:
    """The default U-Net with fresh weights: what it answers does not change how long it takes."""
    config = ModelConfig("unet", "segment", classes=2)
    model = build_model(config)
    multiple = tile_multiple(model)
    card = Bundle(
        model=config,
        class_names=("region",),
        class_colours=((200, 0, 0),),
        mpp=mpp,
        tile=tile,
        overlap=default_overlap(tile, multiple, edge_reach(model)),
        mean=MEAN,
        std=STD,
        multiple=multiple,
    )
    save_bundle(folder, model.state_dict(), card)
    return folder


def _best_side(model: nn.Module, counts: dict[int, int]) -> int:
    """The side of tile at which all tissue takes least time, by a few passes of each."""
    fewest = min(side**2 * count for side, count in counts.items())
    seconds = {}
    for side, count in counts.items():
        if side**2 * count > _HOPELESS * fewest:
            continue
        passes = min(count, max(1, _TRIED // side**2))
        _forward(model, side, 1)
        times = Times()
        for _ in range(3):
            times.take(partial(_forward, model, side, passes))
        # Of cores, which other jobs disturb less; but a GPU's time shows on the wall alone.
        taken = times.wall if pick_device().type != "cpu" else times.cores
        seconds[side] = min(taken) / passes * count
    return min(seconds, key=seconds.__getitem__)


def _forward(model: nn.Module, side: int, count: int) -> None:
    inputs = torch.rand(1, 3, side, side, device=pick_device())
    inputs = inputs.contiguous(memory_format=torch.channels_last)  # as `infer` has it
    with torch.inference_mode():
        for _ in range(count):
            model(inputs).cpu()


if __name__ == "__main__":
    main()
