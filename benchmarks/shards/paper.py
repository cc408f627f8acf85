"""Prints simulated steps of strips, of layers one rank after another, and of pipelines."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pathoseg.config import Config
from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.planning.plan import Plan
from pathoseg.training.read_network import ReadNetwork
from pathoseg.training.step_plan import Prices, find

HARDWARE = "v100"
TEAM = 8  # ranks that share a model or a tile; all others are groups of data parallelism
RANKS = (8, 64, 512, 2048)
NETWORKS = (("unet64", 4096), ("resnet110_v2", 8192), ("resnet110_v2", 16384))
TILES = (1, 4)  # a step of each team
WAYS = {"layers": ("mp-basic", 1), "pipeline": ("1f1b", 1), "strips": ("auto", TEAM)}
_UNLIMITED = 2**50  # bytes: what is compared is time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, float | str] = {"simulated_device": HARDWARE}
    print("| network | tile | ranks | tiles | layers, s | pipeline, s | strips, s | over | over |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, side in NETWORKS:
        with torch.device("meta"):
            model = build_model(ModelConfig(name, "segment", classes=2))
        for ranks in RANKS:
            for tiles in TILES:
                seconds = {
                    way: _fastest(model, name, side, ranks, tiles * ranks // TEAM, *how).seconds
                    for way, how in WAYS.items()
                }
                gains = [seconds[way] / seconds["strips"] for way in ("layers", "pipeline")]
                told = " | ".join(f"{value:.2f}" for value in (*seconds.values(), *gains))
                print(
                    f"| {name} | {side} | {ranks} | {tiles * ranks // TEAM} | {told} |", flush=True
                )
                for way, gain in zip(("layers", "pipeline"), gains, strict=True):
                    figures[f"strips_over_{way}_{name}_{side}_{ranks}_{tiles}"] = gain
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _fastest(
    model: torch.nn.Module, name: str, side: int, ranks: int, batch: int, order: str, shards: int
) -> Plan:
    config = Config()
    config = replace(
        config,
        tiles=replace(config.tiles, tile=side),
        model=replace(config.model, name=name),
        train=replace(config.train, batch=batch, microbatch=1),
        parallel=replace(config.parallel, ranks=ranks, order=order, shards=shards),
    )
    if order != "auto":
        config = replace(config, parallel=replace(config.parallel, stages=TEAM))
    prices = Prices(ReadNetwork(model, config, None, "cuda"), load_hardware(HARDWARE))
    found = find(prices, _UNLIMITED, all_ranks=True)
    return found.plans[0]


if __name__ == "__main__":
    main()
