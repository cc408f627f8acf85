"""Asks how large a tile trains under a cap of memory: all kept, planned, and planned on 8 ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.cost import cost_model
from pathoseg.parallel.planning.hardware import Hardware, load_hardware
from pathoseg.parallel.planning.patterns import Ways
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.priced import Priced
from pathoseg.parallel.planning.task import Task

_LARGEST = 8192
_NONE = Ways(offload=False, recompute=False)
_RANKS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="narrow networks, 1 GiB, coarse sides")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--hardware", default="v100", help="by which plans are made")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware)
    memory, step = (2**30, 256) if options.quick else (2**34, 64)
    networks: dict[str, Callable[[], nn.Module]] = {
        "unet64": lambda: UNet(2, width=8 if options.quick else 64),
        "resnet110_v2": lambda: ResNetV2(2, depth=29 if options.quick else 110),
    }
    print(f"Predicted for ranks of {memory / 2**30:g} GiB of a {hardware.name}, float32, AdamW.\n")
    print("| network | way | largest tile | seconds a tile | in host memory |")
    print("|---|---|---|---|---|")
    figures: dict[str, float | str] = {"hardware": hardware.name, "memory_gib": memory / 2**30}
    for name, make in networks.items():
        tasks = {
            "none": Task(1, memory, _RANKS, ways=_NONE),
            "planned": Task(1, memory, _RANKS),
            f"planned_{_RANKS}_ranks": Task(_RANKS, memory, _RANKS),
        }
        sides = range(step, _LARGEST + 1, step)
        for way, task in tasks.items():
            side, best = _largest(make, sides, hardware, task)
            figures[f"largest_tile_{name}_{way}"] = side
            if best is None:
                print(f"| {name} | {way} | none | | |")
                continue
            sides = range(side, _LARGEST + 1, step)
            seconds, host = best.seconds / best.batch, max(best.host_memory) / 2**30
            figures[f"seconds_a_tile_{name}_{way}"] = seconds
            print(f"| {name} | {way} | {side} px | {seconds:.3g} | {host:.2f} GiB |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _largest(
    make: Callable[[], nn.Module], sides: Sequence[int], hardware: Hardware, task: Task
) -> tuple[int, Plan | None]:
    """The largest side that fits, by bisection, and its plan; 0 where none does."""
    low, high, best = -1, len(sides), None
    while high - low > 1:
        middle = (low + high) // 2
        with torch.device("meta"):
            traced = Traced(make(), torch.empty(1, 3, sides[middle], sides[middle]))
        found = plan([Priced(traced.graph, cost_model(hardware), hardware)], task)
        if found:
            low, best = middle, found[0]
        else:
            high = middle
    return (sides[low] if low >= 0 else 0), best


if __name__ == "__main__":
    main()
