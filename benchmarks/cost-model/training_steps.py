"""Asks how far the planned time of a whole training step is from what the step takes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import TrainConfig
from pathoseg.device import MEAN, STD
from pathoseg.host_memory import LARGE, keep_freed_memory
from pathoseg.models.build import build_model, lay_out
from pathoseg.models.bundle import Bundle
from pathoseg.models.losses import build_loss
from pathoseg.models.model_options import LossConfig, ModelConfig
from pathoseg.parallel.cost.cost_model import CostModel, LayerTime, cost_model
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.cost.timing import Profiled, Whole, host_seconds, measure_sequence
from pathoseg.parallel.graph.layer_graph import Layer
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts
from pathoseg.parallel.runtime.rng import WholeModel
from pathoseg.tiles.dataset import Batch
from pathoseg.training.one_device import OneDevice
from pathoseg.training.tasks import make_task

# Networks and sides of the tile, of which a step has one.
CASES = {
    "vit_seg_s_224": ("vit_seg", 224),
    "vit_seg_s_448": ("vit_seg", 448),
    "unet_256": ("unet", 256),
    "unet64_192": ("unet64", 192),
    "resnet110_v2_128": ("resnet110_v2", 128),
}
QUICK = ("vit_seg_s_224",)
ROUNDS = 4
RATE = 1e-4
CPU = torch.device("cpu")
CLASSES = ClassTable(("gland", "tumour"), ((0, 150, 0), (200, 0, 0)))
ALONE = LayerTime(1.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="cpu", help="a calibration of this very machine")
    parser.add_argument("--case", nargs="+", choices=CASES, help="left out: all")
    parser.add_argument("--quick", action="store_true", help="one case, half of the rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory(LARGE)  # as `pathoseg train` does where the host has room
    hardware = load_hardware(options.hardware)
    names = options.case or (QUICK if options.quick else CASES)
    cases = [Case(name, hardware) for name in names]
    factors = []
    for _ in range(ROUNDS // 2 if options.quick else ROUNDS):
        factors.append(measure_sequence(CPU, rounds=1))
        for case in cases:
            case.measure()
    factor = LayerTime(
        statistics.median(each.forward for each in factors),
        statistics.median(each.backward for each in factors),
    )
    figures: dict[str, float | str] = {"device": "cpu", "hardware": hardware.measured}
    for case in cases:
        figures |= case.figures(factor)
    for name, value in figures.items():
        print(f"{name:44} {value if isinstance(value, str) else f'{value:10.4g}'}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


class Case:
    """A network whose steps are timed, and whose layers are timed meanwhile.

    Args:
        name: See `CASES`.
        hardware: Prices its layers for the analytical prediction.
    """

    def __init__(self, name: str, hardware: Hardware) -> None:
        model_name, side = CASES[name]
        config = ModelConfig(model_name, "segment", len(CLASSES))
        model = build_model(config).train()
        layout = lay_out(model, config, "cpu")
        images = torch.rand(1, 3, side, side).contiguous(memory_format=layout)
        task = make_task("segment", CLASSES, 0.5)
        card = Bundle(config, CLASSES.names, CLASSES.colours, 0.5, side, 0, MEAN, STD, 1)
        drawn = np.random.default_rng(0)
        self._name, self._hardware = name, hardware
        self._traced = Traced(model, images)
        self._batch = Batch(
            drawn.integers(0, 256, (1, side, side, 3), np.uint8),
            drawn.integers(0, len(CLASSES), (1, side, side), np.uint8),
            (),
        )
        forward = WholeModel(model, self._traced, 0, CPU).forward
        loss = build_loss(LossConfig())
        self._engine = OneDevice(model, forward, loss, task, card, TrainConfig(batch=1))
        self._engine.step(0, self._batch, RATE)  # makes the optimizer's state
        self._whole = Whole(model, images)
        self._steps: list[float] = []
        self._passes: list[float] = []
        self._profiles: list[Profiled] = []

    def measure(self) -> None:
        """Time steps before and after the layers are timed alone."""
        self._time_step()
        otherwise = cost_model(self._hardware)
        self._profiles.append(Profiled(self._traced, otherwise, ALONE, rounds=1))
        self._time_step()

    def figures(self, factor: LayerTime) -> dict[str, float | str]:
        """Return what was measured, and how far predictions are off.

        Args:
            factor: What layers in sequence take over what they take alone, for the profile.
        """
        step, passes = min(self._steps), min(self._passes)
        found: dict[str, float | str] = {
            f"{self._name}_step_ms": 1e3 * step,
            f"{self._name}_step_median_ms": 1e3 * statistics.median(self._steps),
            f"{self._name}_forward_and_backward_ms": 1e3 * passes,
        }
        ways: dict[str, CostModel] = {
            "analytic": cost_model(self._hardware),
            "profiled": Quickest(self._profiles, factor),
            "sum_of_layers": Quickest(self._profiles, ALONE),
        }
        for way, costs in ways.items():
            priced = StageCosts(self._traced.graph, costs, self._hardware)
            [best] = plan([priced], PlanRequest(1, 2**50, 1, "sequential"))
            found[f"{self._name}_{way}_ms"] = 1e3 * best.seconds
            found[f"{self._name}_{way}_off"] = best.seconds / step - 1
            found[f"{self._name}_{way}_forward_and_backward_off"] = priced.seconds / passes - 1
        return found

    def _time_step(self) -> None:
        run = self._whole.visit()
        run()  # does not count
        begin = host_seconds()
        self._engine.step(1, self._batch, RATE)
        self._steps.append(host_seconds() - begin)
        self._passes.append(sum(run()))


class Quickest:
    """Each layer at its quickest in several profiles: a CostModel.

    Args:
        profiles: Of the same model.
        factor: By which a layer takes longer in a sequence than alone.
    """

    note = "layers of the model timed on this machine"

    def __init__(self, profiles: Sequence[Profiled], factor: LayerTime) -> None:
        self._profiles, self._factor = profiles, factor

    def time(self, layer: Layer) -> LayerTime:
        """Return the time of a layer in the network."""
        times = [profile.time(layer) for profile in self._profiles]
        return LayerTime(
            self._factor.forward * min(time.forward for time in times),
            self._factor.backward * min(time.backward for time in times),
        )


if __name__ == "__main__":
    main()
