"""Measures the Python time that retention adds to a step, for each layer and microbatch."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import linear
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

BLOCKS, MICROBATCHES, ROUNDS = 30, 4, 25
# By the layer's place in its block (convolution, norm, ReLU, addition): is it recomputed?
WAYS: dict[str, Callable[[int], bool]] = {
    "keeps_all": lambda at: False,
    "one_layer_again": lambda at: at == 2,
    "a_quarter_again": lambda at: at % 4 == 1,
    "three_quarters_again": lambda at: at % 4 != 3,
}


class Block(nn.Module):
    """Four layers that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.norm(self.convolve(values)).relu() + values
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.randn(MICROBATCHES, 1, 4, 8, 8)
    traced = {
        name: Traced(nn.Sequential(*(Block() for _ in range(BLOCKS))), images[0]) for name in WAYS
    }
    batch = Microbatches(
        [1] * MICROBATCHES, lambda number: {"input": images[number]}, lambda number: None
    )
    runners = {name: runner(traced[name], again) for name, again in WAYS.items()}
    taken: dict[str, list[float]] = {name: [] for name in (*WAYS, "forward_alone")}
    first = traced["keeps_all"]
    layers = range(len(first.graph.layers))
    segment = first.segment(layers)
    for number in range(ROUNDS):
        for name, each in runners.items():
            begin = time.process_time()
            each.step(number, batch)
            taken[name].append(time.process_time() - begin)
        begin = time.process_time()
        for image in images:
            segment({"input": image})
        taken["forward_alone"].append(time.process_time() - begin)
    per_layer = 1e6 / (len(layers) * MICROBATCHES)
    figures = {
        f"us_{name}": per_layer * median(islice(times, 5, None)) for name, times in taken.items()
    }
    for name in [*WAYS][1:]:
        figures[f"us_more_{name}"] = figures[f"us_{name}"] - figures["us_keeps_all"]
    for name, value in figures.items():
        print(f"{name:32} {value:.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def runner(traced: Traced, again: Callable[[int], bool]) -> Runner:
    """The runner of one rank that recomputes some layers and keeps the others."""
    graph = traced.graph
    recomputed = [layer.name for at, layer in enumerate(graph.layers) if again(at)]
    schedule = lower(gpipe(linear(1), MICROBATCHES))
    training = Training(
        lambda returned, _: returned.flatten(1).sum(1), lambda own: torch.optim.SGD(own, 1e-9)
    )

    def made(transport: ThreadTransport) -> Runner:
        memory = Memory({0: recomputed}, {})
        device = torch.device("cpu")
        return Runner(traced, even(graph, 1), schedule, transport, device, training, memory)

    return run_ranks(1, made)[0]


if __name__ == "__main__":
    main()
