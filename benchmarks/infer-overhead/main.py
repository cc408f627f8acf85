"""Times `pathoseg infer` on a slide against the bare forward passes of the same tiles."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pathoseg.device import MEAN, STD, pick_device
from pathoseg.host_memory import share_one_heap
from pathoseg.inference.segmenter import default_overlap
from pathoseg.models.build import build_model, edge_reach, tile_multiple
from pathoseg.models.bundle import Bundle, load_bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs.report import read_summary
from pathoseg.workflows.infer import infer

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_data" / "sample_06.svs"


def main() -> None:
    share_one_heap()  # as `infer` does, which on the command line is the first to compute
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path, default=SAMPLE)
    parser.add_argument("--assume-mpp", type=float, default=0.5)
    parser.add_argument("--tile", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiles of 256 px at 2 µm")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tile, mpp = (256, 2.0) if options.quick else (options.tile, 0.5)
    rounds = 2 if options.quick else options.rounds
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bundle = _bundle(Path(folder) / "model", tile, mpp)
        flags = {"data": {"assume_mpp": options.assume_mpp}}
        walls, bares, tiles = [], [], 0
        for number in range(rounds):
            out = Path(folder) / f"results-{number}"
            began = time.perf_counter()
            infer(
                [options.slide], bundle, out, None, flags, resume=False, factory=None, arguments=[]
            )
            walls.append(time.perf_counter() - began)
            summary = read_summary(next(out.glob("*/summary.json")))
            tiles = summary.tiles.done
            bares.append(_bare(bundle, tile, tiles))
    overhead = statistics.median(walls) / statistics.median(bares)
    print(f"{options.slide.name}, {tiles} tiles of {tile} px, {os.cpu_count()} cores")
    print("| | median s | all |\n|---|---|---|")
    for name, seconds in (("infer", walls), ("bare forward", bares)):
        each = ", ".join(f"{value:.2f}" for value in seconds)
        print(f"| {name} | {statistics.median(seconds):.2f} | {each} |")
    print(f"overhead {overhead:.3f}")
    if options.json:
        device = str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
        figures = {"overhead": overhead, "tiles": tiles, "device": device}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


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


def _bare(bundle: Path, tile: int, tiles: int) -> float:
    device = pick_device()
    layout = torch.channels_last  # as `infer` has it
    model = load_bundle(bundle)[0].to(device)
    model.to(memory_format=layout)  # type: ignore[call-overload]  # not in torch's stub
    inputs = torch.rand(1, 3, tile, tile, device=device).contiguous(memory_format=layout)
    with torch.inference_mode():
        began = time.perf_counter()
        for _ in range(tiles):
            model(inputs).cpu()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
