"""Measures what a rank's program takes for a stage's visit beside the layers."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from pathoseg.parallel.schedule.costs import Link
from pathoseg.parallel.schedule.gpipe import mp_basic
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement

# Small layers, so that a visit stands out, on what a stage of a narrow network sends: 144 KiB.
_CHANNELS, _SIDE, _LAYERS = 16, 48, 80
_BYTES = 4 * _CHANNELS * _SIDE * _SIDE
_ROUNDS = 9  # of both in turn; the first ones warm up
_WARM_UP = 2


def measure_visit(transport: Transport, device: torch.device, link: Link) -> float:
    """Time the same layers in few and in many stages, one after the other on the ranks in turn.

        few    rank 0  | layer 0, layer 1 |                  | …
               rank 1                     | layer 2, layer 3 |
        many   rank 0  | layer 0 |         | layer 2 |         | …
               rank 1            | layer 1 |         | layer 3 |

    The step of 80 stages of a layer less that of 40 stages of two just before it is 80 visits, each
    with the message to the next rank, whose time on the link is taken off. All ranks call this;
    nothing else may be under way.

    Args:
        transport: Joins the ranks.
        device: On which this rank computes.
        link: Between one rank and the next.

    Returns:
        Seconds of a forward or backward of a stage, the same on every rank (`Hardware.visit`).

    Raises:
        PathosegError: Other work disturbs the steps so much that more stages take no longer.
    """
    traced = Traced(_network(), torch.empty(1, _CHANNELS, _SIDE, _SIDE))
    few, many = (_steps(traced.on(_network()), transport, device, layers) for layers in (2, 1))
    pairs = [(few(step), many(step)) for step in range(_ROUNDS)][_WARM_UP:]
    message = link.alpha + _BYTES * link.beta if transport.ranks > 1 else 0.0
    own = median(more - less for less, more in pairs) / _LAYERS - message
    longest = max(map(float, transport.gather(str(own))))
    if longest <= 0:
        raise PathosegError(
            f"Visits of stages cannot be timed: {_LAYERS // 2} more of them took no longer.",
            "Run it again while these machines do nothing else.",
        )
    return longest


def _network() -> nn.Module:
    model = nn.Sequential(*(nn.Conv2d(_CHANNELS, _CHANNELS, 1) for _ in range(_LAYERS)))
    for parameter in model.parameters():  # the same on all ranks
        nn.init.constant_(parameter, 1 / _CHANNELS)
    return model


def _steps(
    traced: Traced, transport: Transport, device: torch.device, layers: int
) -> Callable[[int], float]:
    """Cut a network into stages of so many layers; return a function that times one step."""
    partition = cut(traced.graph, range(0, _LAYERS + 1, layers))
    homes = tuple(stage % transport.ranks for stage in range(partition.stages))
    order = mp_basic(Placement(transport.ranks, (homes,)), 1)
    training = Training(
        lambda made, _: made.flatten(1).mean(1), lambda own: torch.optim.SGD(own, 0.0)
    )
    runner = Runner(
        traced, partition, lower(order, stage_edges(partition)), transport, device, training
    )
    image = torch.ones(1, _CHANNELS, _SIDE, _SIDE, device=device)
    [name] = traced.graph.inputs
    batch = Microbatches([1], lambda _: {name: image}, lambda _: None)

    def step(at: int) -> float:
        transport.barrier()
        begin = time.perf_counter()
        runner.step(at, batch)
        return time.perf_counter() - begin

    return step
