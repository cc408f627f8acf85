"""Measures what a rank's program takes for a stage's visit beside the layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.stage_costs import stage_edges
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement

# Small layers, so that a visit stands out, on what a stage of a narrow network sends: 144 KiB.
_CHANNELS, _SIDE = 16, 48
_STAGES = 40  # of the shorter pipeline, about: as many on each rank
_ROUNDS = 9  # of both in turn; the first ones warm up
_WARM_UP = 2


@dataclass(frozen=True)
class Pipelines:
    """The same layers in few stages and in twice as many, on the ranks in turn.

        few    rank 0  | layers 0, 1 of microbatch 0 | layers 0, 1 of microbatch 1 | …
               rank 1                                | layers 2, 3 of microbatch 0 | …
        many   rank 0  | layer 0 | layer 0 | layer 0 | layer 0 | layer 2 | layer 2 | …
               rank 1            | layer 1 | layer 1 | layer 1 | layer 1 | layer 3 | …

    There are so many microbatches that no rank waits. So a step of many less one of few is the
    visits that a rank makes more: what it does ahead of its layers, behind them, and with messages
    while they leave and arrive.

    Attributes:
        few: Does a step, given its number, and returns its seconds; all ranks call it.
        many: Likewise.
        visits: The forwards and backwards that a rank makes more in a step of many.
    """

    few: Callable[[int], float]
    many: Callable[[int], float]
    visits: int


def pipelines(transport: Transport, device: torch.device) -> Pipelines:
    """Make both pipelines on the ranks of a transport, each of which computes on its device."""
    ranks = transport.ranks
    stages, microbatches = ranks * math.ceil(_STAGES / ranks), 2 * ranks
    traced = Traced(_network(2 * stages), torch.empty(1, _CHANNELS, _SIDE, _SIDE))
    few, many = (
        _steps(traced.on(_network(2 * stages)), transport, device, count, microbatches)
        for count in (stages, 2 * stages)
    )
    return Pipelines(few, many, 2 * stages * microbatches // ranks)


def measure_visit(transport: Transport, device: torch.device) -> float:
    """Time the steps of `pipelines` in turn. All ranks call this; nothing else may be under way.

    Args:
        transport: Joins the ranks.
        device: On which this rank computes.

    Returns:
        Seconds of a forward or backward of a stage, the same on every rank (`Hardware.visit`).

    Raises:
        PathosegError: Other work disturbs the steps so much that more stages take no longer.
    """
    both = pipelines(transport, device)
    pairs = [(both.few(step), both.many(step)) for step in range(_ROUNDS)][_WARM_UP:]
    own = median(more - less for less, more in pairs) / both.visits
    longest = max(map(float, transport.gather(str(own))))
    if longest <= 0:
        raise PathosegError(
            f"Visits of stages cannot be timed: {both.visits} more of them took no longer.",
            "Run it again while these machines do nothing else.",
        )
    return longest


def _network(layers: int) -> nn.Module:
    model = nn.Sequential(*(nn.Conv2d(_CHANNELS, _CHANNELS, 1) for _ in range(layers)))
    for parameter in model.parameters():  # the same on all ranks
        nn.init.constant_(parameter, 1 / _CHANNELS)
    return model


def _steps(
    traced: Traced, transport: Transport, device: torch.device, stages: int, microbatches: int
) -> Callable[[int], float]:
    """Cut a network into stages, on the ranks in turn; return a function that times a step."""
    layers = len(traced.graph.layers)
    partition = cut(traced.graph, range(0, layers + 1, layers // stages))
    homes = tuple(stage % transport.ranks for stage in range(stages))
    order = gpipe(Placement(transport.ranks, (homes,)), microbatches)
    training = Training(
        lambda made, _: made.flatten(1).mean(1), lambda own: torch.optim.SGD(own, 0.0)
    )
    runner = Runner(
        traced, partition, lower(order, stage_edges(partition)), transport, device, training
    )
    image = torch.ones(1, _CHANNELS, _SIDE, _SIDE, device=device)
    [name] = traced.graph.inputs
    batch = Microbatches([1] * microbatches, lambda _: {name: image}, lambda _: None)

    def step(at: int) -> float:
        transport.barrier()
        begin = time.perf_counter()
        runner.step(at, batch)
        return time.perf_counter() - begin

    return step
