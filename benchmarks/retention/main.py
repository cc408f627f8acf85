"""Asks how far from the least the choice of what is kept is, and how long it takes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.offload.subject import SHARES
from benchmarks.retention.measured import measured
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.graph.traced import trace
from pathoseg.parallel.planning.memory_model import MemoryModel
from pathoseg.parallel.retention.policy_options import AllowedPolicies, retain
from pathoseg.parallel.retention.policy_search import Chooser
from pathoseg.parallel.retention.stage_liveness import StageFacts, stage_facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--hardware", default="h200", help="by which layers and copies are priced")
    parser.add_argument(
        "--measure", action="store_true", help="run what is recomputed, on this CPU, instead"
    )
    options = parser.parse_args()
    figures = (
        {"device": "cpu", **dict(measured(options.quick))}
        if options.measure
        else _predicted(options.quick, options.hardware)
    )
    print("", *(f"{name:28} {value}" for name, value in figures.items()), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _predicted(quick: bool, name_of_hardware: str) -> dict[str, float | str]:
    hardware = load_hardware(name_of_hardware)
    networks: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "unet64": (lambda: UNet(2, width=8 if quick else 64), 1024),
        "resnet110_v2": (lambda: ResNetV2(2, depth=20 if quick else 110), 1024),
    }
    if not quick:
        networks["resnet1001_v2"] = (lambda: ResNetV2(2, depth=1001), 512)
    print(f"By the figures of {hardware.name}, float32, one tile a microbatch.\n")
    print("| network | in flight | cap | time to keep all | bound | above it | chosen in |")
    print("|---|---|---|---|---|---|---|")
    figures: dict[str, float | str] = {"hardware": hardware.name}
    gaps, taken = [], []
    for name, (make, side) in networks.items():
        with torch.device("meta"):
            graph = trace(make(), torch.empty(1, 3, side, side))
        costs = cost_model(hardware)
        times = [costs.time(layer) for layer in graph.layers]
        layers = range(len(graph.layers))
        seconds = [each.forward for each in times], [each.backward for each in times]
        facts = stage_facts(graph, layers, MemoryModel(graph).by_layer(layers), seconds)
        chooser = Chooser(facts, hardware.host, AllowedPolicies())
        for in_flight in (1, 4):
            for share in SHARES:
                begin = time.perf_counter()
                cap = _need(facts, in_flight) * share // 100
                choice = chooser.choose(cap, in_flight)
                taken.append(time.perf_counter() - begin)
                row = f"| {name} | {in_flight} | {share} % |"
                if choice is None:
                    print(f"{row} none fits | | | {taken[-1]:.1f} s |", flush=True)
                    continue
                keep = sum(facts.forward.values()) + sum(facts.backward.values())
                chosen = chooser.seconds(choice, in_flight) / keep
                bound = chooser.bound(cap, in_flight) / keep
                gaps.append(chosen / bound - 1)
                figures[f"time_{name}_{in_flight}_{share}pct"] = chosen
                print(
                    f"{row} {chosen:.3f} | {bound:.3f} | {gaps[-1]:.1%} | {taken[-1]:.1f} s |",
                    flush=True,
                )
    return figures | {"largest_gap": max(gaps), "slowest_choice_s": max(taken)}


def _need(facts: StageFacts, in_flight: int) -> int:
    everything = retain(facts, ActivationPolicy())
    return everything.peak + (in_flight - 1) * everything.kept


if __name__ == "__main__":
    main()
