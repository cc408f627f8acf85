"""Asks how far predicted times of layers, steps and stages are from measured ones."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from raw_polynomial import RawPolynomial

from benchmarks.networks.inception import InceptionV3
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.vgg import vgg19
from pathoseg.device import training_layout
from pathoseg.host_memory import keep_freed_memory
from pathoseg.models.model_options import vit_shape
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.models.vit_seg import ViTSeg
from pathoseg.parallel.cost.calibration_layers import draw_cases, laid_out
from pathoseg.parallel.cost.cost_model import Analytical, LayerTime, Roofline
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.parallel.cost.regression import Sample, TimedCase, learn, time_cases
from pathoseg.parallel.cost.timing import (
    Profiled,
    Run,
    Whole,
    host_seconds,
    measure_sequence,
    time_in_turn,
)
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import balance, even

Figures = dict[str, float]
Seconds = NDArray[np.float64]

STAGES = (2, 4, 8)
FOLDS = 5
CPU = torch.device("cpu")

# None of these is in the fit. Shapes are batch, channels, height, width; all is channels-last.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet_w16_d4": (partial(UNet, 3, width=16, depth=4), (1, 3, 256, 256)),
    "unet_w32_d4": (partial(UNet, 3, width=32, depth=4), (1, 3, 256, 256)),
    "unet_w64_d4": (partial(UNet, 3, width=64, depth=4), (1, 3, 192, 192)),
    "unet_w32_d3": (partial(UNet, 3, width=32, depth=3), (2, 3, 160, 160)),
    "unet_w24_d5_group": (partial(UNet, 3, width=24, depth=5, norm="group"), (1, 3, 256, 256)),
    "resnet110_v2": (partial(ResNetV2, 3, depth=110), (1, 3, 128, 128)),
    "resnet110_v2_tiles": (partial(ResNetV2, 3, "classify", depth=110), (2, 3, 96, 96)),
    "vgg19": (vgg19, (1, 3, 224, 224)),
    "resnet50": (resnet50, (2, 3, 224, 224)),
    "inception_v3": (InceptionV3, (2, 3, 299, 299)),
    "vit_seg_s": (partial(ViTSeg, 3, vit_shape({})), (1, 3, 224, 224)),
}
QUICK = ("unet_w16_d4", "unet_w32_d3", "resnet110_v2_tiles", "resnet50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer layers, models and sweeps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()  # as `pathoseg calibrate` and ranks do
    cases = draw_cases(0.15 if options.quick else 1.0)
    models = [Model(name) for name in (QUICK if options.quick else MODELS)]
    grids, factors = [], []
    for _ in range(2 if options.quick else 3):
        grids.append(time_cases(cases, CPU, 1))
        factors.append(measure_sequence(CPU))
        for model in models:
            model.measure()
    samples = [quickest(same) for same in zip(*grids, strict=True)]
    factor = LayerTime(
        statistics.median(item.forward for item in factors),
        statistics.median(item.backward for item in factors),
    )
    known = learn(samples, load_hardware("cpu"), factor)
    figures: Figures = {"threads": torch.get_num_threads(), "layers": len(samples)}
    figures |= {"forward_in_sequence": factor.forward, "backward_in_sequence": factor.backward}
    figures |= layer_errors(samples, known)
    figures |= judged(models, known, RawPolynomial(samples))
    for name, value in figures.items():
        print(f"{name:44} {value:10.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def quickest(same: Sequence[TimedCase]) -> Sample:
    """One layer of several sweeps, at its quickest."""
    times = [item.sample.time for item in same]
    best = LayerTime(min(time.forward for time in times), min(time.backward for time in times))
    return Sample(same[0].layer, best)


def layer_errors(samples: Sequence[Sample], known: Hardware) -> Figures:
    """Errors of single layers that were left out of the fit, in five parts."""
    part = np.random.default_rng(0).integers(0, FOLDS, len(samples))
    errors: dict[str, list[float]] = {"analytic": [], "polynomial": []}
    negative = []
    for fold in range(FOLDS):
        seen = [sample for sample, own in zip(samples, part, strict=True) if own != fold]
        hardware, polynomial = learn(seen, known), RawPolynomial(seen)
        assert hardware.fit
        analytic = Analytical(hardware, hardware.fit)
        for sample, own in zip(samples, part, strict=True):
            if own == fold:
                layer, true = sample.layer, total(sample.time)
                raw = polynomial.raw(layer)
                errors["analytic"].append(abs(total(analytic.alone(layer)) / true - 1))
                errors["polynomial"].append(abs(float(raw.sum()) / true - 1))
                negative.append(bool((raw < 0).any()))
    figures: Figures = {"polynomial_negative": statistics.fmean(negative)}
    for name, found in errors.items():
        figures[f"layer_error_{name}"] = statistics.fmean(found)
        figures[f"layer_error_{name}_median"] = statistics.median(found)
    return figures


class Model:
    """A model, what it took, and the profiles made meanwhile.

    Attributes:
        name: See `MODELS`.
        graph: Its layers.
    """

    def __init__(self, name: str) -> None:
        make, shape = MODELS[name]
        layout = training_layout("cpu")
        model, image = make().train(), laid_out(torch.rand(shape), layout)
        model.to(memory_format=layout)  # type: ignore[call-overload]  # not in its stub
        self.name = name
        self._traced = Traced(model, image)
        self.graph = self._traced.graph
        self._whole, self._among = Whole(model, image), Among(self._traced, image)
        self._steps: list[float] = []
        self._profiles: list[Profiled] = []

    def measure(self) -> None:
        """Times the model before and after its layers are timed alone."""
        self._time_step()
        priced = Roofline(load_hardware("cpu"))
        self._profiles.append(Profiled(self._traced, priced, LayerTime(1.0, 1.0), rounds=1))
        self._time_step()

    def _time_step(self) -> None:
        whole, _ = time_in_turn([self._whole, self._among], 1)
        self._steps.append(whole.forward.quartile + whole.backward.quartile)

    @property
    def step(self) -> float:
        """Seconds of a forward and backward, at their quickest."""
        return min(self._steps)

    @property
    def layers(self) -> Seconds:
        """Seconds of each layer's forward and backward, among the others."""
        return self._among.seconds()

    def profiled(self, factor: LayerTime) -> list[float]:
        """Seconds of each layer, as predicted from those alone, at their quickest."""
        times = [[profile.time(layer) for profile in self._profiles] for layer in self.graph.layers]
        return [
            factor.forward * min(time.forward for time in same)
            + factor.backward * min(time.backward for time in same)
            for same in times
        ]


def judged(models: Sequence[Model], known: Hardware, polynomial: RawPolynomial) -> Figures:
    """Errors of steps and losses of stages, for each way to predict."""
    assert known.fit
    analytic = Analytical(known, known.fit)
    factor = LayerTime(known.fit.forward_in_sequence, known.fit.backward_in_sequence)
    rows: dict[str, list[float]] = {}
    details: Figures = {}
    for model in models:
        ways = {
            "profiled": model.profiled(factor),
            "analytic": [total(analytic.time(layer)) for layer in model.graph.layers],
            "polynomial": [total(polynomial.time(layer)) for layer in model.graph.layers],
        }
        details[f"{model.name}_step_ms"] = 1e3 * model.step
        details[f"{model.name}_marks_off"] = float(model.layers.sum()) / model.step - 1
        for way, predicted in ways.items():
            off = sum(predicted) / model.step - 1
            details[f"{model.name}_{way}_off"] = off
            rows.setdefault(f"step_error_{way}", []).append(abs(off))
            for stages in STAGES:
                bounds = balance(model.graph, stages, predicted).bounds
                rows.setdefault(f"stage_loss_{way}_d{stages}", []).append(
                    stage_loss(model, stages, bounds)
                )
        for stages in STAGES:
            bounds = even(model.graph, stages).bounds
            rows.setdefault(f"stage_loss_even_d{stages}", []).append(
                stage_loss(model, stages, bounds)
            )
    means = {name: statistics.fmean(values) for name, values in rows.items()}
    worst = {f"{name}_worst": max(rows[name]) for name in rows if name.startswith("step")}
    for way in ("profiled", "analytic", "polynomial", "even"):
        parts = [means[f"stage_loss_{way}_d{stages}"] for stages in STAGES]
        means[f"stage_loss_{way}"] = statistics.fmean(parts)
    return means | worst | details


def stage_loss(model: Model, stages: int, bounds: Sequence[int]) -> float:
    """Return the measured time of a cut's worst stage over that of the best cut's, less 1.

    Args:
        model: The model, whose layers were timed among each other.
        stages: The number of stages of either cut.
        bounds: The cut: where stages begin and end in the list of layers, `stages` + 1 positions.

    Returns:
        0 where the cut is as good as the one that balances the measured times.
    """
    best = balance(model.graph, stages, model.layers.tolist()).bounds
    return worst_stage(model.layers, bounds) / worst_stage(model.layers, best) - 1


def worst_stage(layers: Seconds, bounds: Sequence[int]) -> float:
    return max(float(layers[first:stop].sum()) for first, stop in pairwise(bounds))


def total(time: LayerTime) -> float:
    return time.forward + time.backward


class Among:
    """Times each layer of a model among the others, by marks that its forward and backward pass.

    Autograd numbers the nodes that it makes, so a node's number tells its layer.
    """

    def __init__(self, traced: Traced, image: torch.Tensor) -> None:
        self._model, self._graph = traced.model, traced.graph
        self._segment = traced.segment(range(len(traced.graph.layers)))
        self._image = image
        self._taken: list[Seconds] = []

    def visit(self) -> Run:
        return self._run

    def seconds(self) -> Seconds:
        """Return the seconds of each layer, forward and backward together, shape (layers,).

        Of each layer's times in all runs it is the lower quartile.
        """
        taken: Seconds = np.quantile(self._taken, 0.25, axis=0)
        return taken

    def _run(self) -> tuple[float, float]:
        self._model.zero_grad(set_to_none=True)
        starts: list[int] = []
        marks: list[tuple[int, float]] = []

        def enter(position: int) -> None:
            starts.append(torch._C._autograd._get_sequence_nr())
            marks.append((position, host_seconds()))

        made = self._segment(dict.fromkeys(self._graph.inputs, self._image), enter)
        forward = spent(marks, len(self._graph.layers))
        roots = [made[name] for name in self._graph.outputs]
        gradients = [torch.ones_like(root) for root in roots]
        back: list[tuple[int, float]] = []

        def pass_node(position: int, given: Any) -> None:
            back.append((position, host_seconds()))

        for node in nodes(roots):
            position = max(0, bisect_right(starts, node._sequence_nr()) - 1)
            node.register_prehook(partial(pass_node, position))
        torch.autograd.backward(roots, gradients)
        backward = spent(back, len(self._graph.layers))
        self._taken.append(forward + backward)
        return float(forward.sum()), float(backward.sum())


def nodes(roots: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes of autograd that make these tensors; those of parameters, which it sums, aside."""
    waiting: list[Any] = [root.grad_fn for root in roots]
    found: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found[node] = None
            waiting += [source for source, _ in node.next_functions]
    return [*found]


def spent(marks: Sequence[tuple[int, float]], layers: int) -> Seconds:
    """Seconds by layer, where each mark is (layer, since when) and the last one lasts until now."""
    times = [time for _, time in marks] + [host_seconds()]
    seconds = np.zeros(layers)
    for (position, _), (start, stop) in zip(marks, pairwise(times), strict=True):
        seconds[position] += stop - start
    return seconds


if __name__ == "__main__":
    main()
