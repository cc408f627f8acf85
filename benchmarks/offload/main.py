"""Asks what less activation memory costs: six forms of offload, plans under caps, torch's ways."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.offload.caps import caps
from benchmarks.offload.study import STEPS, study
from benchmarks.offload.subject import DEVICE
from benchmarks.offload.trace import write_trace
from benchmarks.offload.waiting import waiting
from pathoseg.device import device_name
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.cost.hardware import load_hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks and tiles, few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--hardware",
        default="h200" if DEVICE.type == "cuda" else "cpu",
        metavar="NAME|FILE",
        help="what the planner prices by; best a file of `pathoseg calibrate` on this device",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of a step")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of each form in the study (default: 160)"
    )
    parser.add_argument("--side", type=int, help="of the caps' tiles; left out: 1,024 and 2,048")
    parser.add_argument("--part", choices=("study", "caps", "waiting"), help="one of them")
    options = parser.parse_args()
    name = device_name(DEVICE)
    print(f"Device: {name}, torch {torch.__version__}")
    figures: dict[str, float | str] = {"device": name}
    hardware = load_hardware(options.hardware)
    parts: dict[str, Callable[[], Iterable[tuple[str, float]]]] = {
        "study": lambda: study(options.quick, options.steps),
        "caps": lambda: caps(options.quick, hardware, options.side),
        "waiting": lambda: waiting(options.quick, hardware),
    }
    for part in [options.part] if options.part else parts:
        for figure, value in parts[part]():
            figures[figure] = value
            if options.json:  # each time: what is cut off leaves what it has measured
                write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if options.trace:
        write_trace(options.trace, options.quick)


if __name__ == "__main__":
    main()
