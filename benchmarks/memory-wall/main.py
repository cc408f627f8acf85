"""Asks how large a tile trains under a cap of memory, by prediction and, with --measure, really."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from cases import RANKS, SIDES, WAYS, Case, networks
from torch import nn

from pathoseg.device import device_name, pick_device
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import workspace_of
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts

_BEYOND = (1, 1.25, 1.5, 2, 4, 1024)  # shares of the cap for which a plan is looked for


@dataclass
class Wall:
    """The plans for one network trained in one way, by side of a tile, and the tries of them.

    Attributes:
        plans: By side in pixels, the plan, and whether it keeps to the cap; else it is the plan
            for the smallest multiple of the cap, of those looked at, that has one.
        trained: By side that was tried, seconds a tile, or None where memory ran out.
    """

    plans: dict[int, tuple[Plan, bool]] = field(default_factory=dict)
    trained: dict[int, float | None] = field(default_factory=dict)

    def predicted(self) -> int:
        """The largest side with a plan that fits; 0 where there is none."""
        return max((side for side, (_, fits) in self.plans.items() if fits), default=0)

    def measured(self) -> int:
        """The largest side that trained; 0 where none did."""
        return max((side for side, seconds in self.trained.items() if seconds), default=0)

    def right(self) -> list[bool]:
        """By side that was tried, whether it trained where that was predicted, and only there."""
        return [
            (seconds is not None) == self.plans[side][1] for side, seconds in self.trained.items()
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="narrow networks, less memory")
    parser.add_argument("--measure", action="store_true", help="train what is predicted to fit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--hardware", help="by which plans are made (default: v100, quick: cpu)")
    parser.add_argument("--network", action="append", help="only this one (may be repeated)")
    parser.add_argument("--way", action="append", choices=WAYS, help="likewise")
    parser.add_argument("--side", action="append", type=int, metavar="PX", help="likewise")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a rank (default: 16)")
    parser.add_argument("--batch", type=int, default=8, help="tiles of a step (default: 8)")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on a CPU (default: 1)")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware or ("cpu" if options.quick else "v100"))
    gib = options.memory or (1 / 16 if options.quick else 16)
    ranks = 2 if options.quick else RANKS
    asked = PlanRequest(ranks, int(gib * 2**30), options.batch)
    known, sides = networks(options.quick), sorted(options.side or SIDES)
    print(f"Ranks of {gib:g} GiB ({hardware.name}), steps of {asked.batch} tiles, AdamW.\n")
    print("| network | way | predicted | in host memory | trained | seconds a tile | tries |")
    print("|---|---|---|---|---|---|---|")
    figures: dict[str, float | str] = {"hardware": hardware.name, "memory_gib": gib}
    figures |= {"tiles_a_step": asked.batch, "threads": options.threads}
    right: list[bool] = []
    # A CPU's tensors are in host memory already.
    real = pick_device().type != "cpu" or not options.measure
    offload = hardware.device != "cpu" and real
    for network in options.network or known:
        for way in options.way or WAYS:
            make = known[network]
            wall = _predict(make, way, sides, hardware, asked, offload, options.threads)
            side = wall.predicted()
            figures[f"predicted_tile_{way}_{network}"] = side
            if options.measure:
                _measure(wall, Case(network, options.quick, options.threads), asked.memory)
                right += wall.right()
                figures[f"largest_tile_{way}_{network}"] = wall.measured()
                for tried, seconds in wall.trained.items():
                    if seconds is not None:
                        figures[f"seconds_a_tile_{way}_{network}_{tried}"] = seconds
            print(_row(network, way, wall), flush=True)
            if right:
                figures["fit_predictions_right"] = sum(right) / len(right)
                figures["device"] = device_name(pick_device())
            if options.json:  # each time: what is cut off leaves what it has measured
                write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if right:
        print(f"\nPredictions right: {sum(right)} of {len(right)}")


def _predict(
    make: Callable[[], nn.Module],
    way: str,
    sides: Sequence[int],
    hardware: Hardware,
    asked: PlanRequest,
    offload: bool,
    threads: int,
) -> Wall:
    """Plans up to the first side that does not fit, that one for as little more as it needs."""
    wall = Wall()
    own = workspace_of(replace(hardware, threads=threads))
    for side in sides:
        with torch.device("meta"):
            traced = Traced(make(), torch.empty(1, 3, side, side))
        priced = StageCosts(traced.graph, cost_model(hardware), hardware, workspace=own)
        for share in _BEYOND:
            task = WAYS[way](traced.graph, replace(asked, memory=int(asked.memory * share)))
            ways = replace(task.ways, offload=task.ways.offload and offload)
            found = plan([priced], replace(task, ways=ways))
            if found:
                wall.plans[side] = found[0], share == 1
                break
        if not found or share > 1:
            break
    return wall


def _measure(wall: Wall, case: Case, memory: int) -> None:
    """Tries the largest side that is predicted to fit, then up or down from it."""
    sides = [*wall.plans]
    at = max(0, sides.index(wall.predicted()) if wall.predicted() else 0)
    step = 1
    while 0 <= at < len(sides):
        side = sides[at]
        wall.trained[side] = _try(wall.plans[side][0], case, side, memory)
        if wall.trained[side] is None and len(wall.trained) == 1:
            step = -1
        elif (wall.trained[side] is None) == (step == 1):
            return
        at += step


def _try(chosen: Plan, case: Case, side: int, memory: int) -> float | None:
    """Seconds a tile of a step on really started ranks, or None where it did not train."""
    with TemporaryDirectory() as folder:
        order, result = Path(folder) / "plan.json", Path(folder) / "seconds"
        order.write_text(chosen.to_json())
        attempt = Path(__file__).with_name("attempt.py")
        told = [case.network, "--side", side, "--plan", order, "--memory", memory, "--out", result]
        command = [sys.executable, attempt, *told, *(["--quick"] if case.quick else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            return float(result.read_text())
        said = done.stdout + done.stderr
        if "memory" not in said:  # something else is wrong
            raise RuntimeError(said)
        return None


def _row(network: str, way: str, wall: Wall) -> str:
    largest, measured = wall.predicted(), wall.measured()
    host = max(wall.plans[largest][0].host_memory) / 2**30 if largest else 0.0
    tries = ", ".join(f"{side}{'' if taken else ' not'}" for side, taken in wall.trained.items())
    seconds = wall.trained.get(measured)
    return (
        f"| {network} | {way} | {largest} px | {host:.2f} GiB | "
        f"{f'{measured} px' if wall.trained else ''} | {f'{seconds:.3g}' if seconds else ''} | "
        f"{tries} |"
    )


if __name__ == "__main__":
    main()
