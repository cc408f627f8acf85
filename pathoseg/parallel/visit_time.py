"""Measures what a rank's program takes for a stage's visit beside the layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.stage_costs import stage_edges
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.schedule.gpipe import mp_basic
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.schedule import Placement

_STAGES = 40  # and twice as many
_ROUNDS = 9  # of both in turn; the first ones warm up
_WARM_UP = 2


def measure_visit(transport: Transport, device: torch.device) -> float:
    """Time stages that do next to nothing, one after the other on the ranks in turn.

    The step of 80 stages less that of 40 just before it is 80 visits, each with the message to the
    next rank. All ranks call this; nothing else may be under way.

    Args:
        transport: Joins the ranks.
        device: On which this rank computes.

    Returns:
        Seconds of a forward or backward of a stage, the same on every rank (`Hardware.visit`).

    Raises:
        PathosegError: Other work disturbs the steps so much that more stages take no longer.
    """
    few, many = (_steps(transport, device, stages) for stages in (_STAGES, 2 * _STAGES))
    pairs = [(few(step), many(step)) for step in range(_ROUNDS)][_WARM_UP:]
    own = median(more - less for less, more in pairs) / (2 * _STAGES)
    longest = max(map(float, transport.gather(str(own))))
    if longest <= 0:
        raise PathosegError(
            f"Visits of stages cannot be timed: steps with {_STAGES} more of them took no longer.",
            "Run it again while these machines do nothing else.",
        )
    return longest


class _Products(nn.Module):
    """Multiplies a number as often as there are stages, first by a parameter: it has a gradient."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self._stages = stages

    def forward(self, number: Tensor) -> Tensor:
        number = number * self.factor
        for _ in range(self._stages - 1):
            number = number * 1.0
        return number


def _steps(transport: Transport, device: torch.device, stages: int) -> Callable[[int], float]:
    """Set up a network of so many stages; return a function that makes a step and times it."""
    number = torch.ones(1, 1)
    traced = Traced(_Products(stages), number)
    partition = cut(traced.graph, range(stages + 1))
    homes = tuple(stage % transport.ranks for stage in range(stages))
    order = mp_basic(Placement(transport.ranks, (homes,)), 1)
    training = Training(lambda made, _: made.sum(1), lambda own: torch.optim.SGD(own, 0.0))
    runner = Runner(
        traced, partition, lower(order, stage_edges(partition)), transport, device, training
    )
    [name] = traced.graph.inputs
    batch = Microbatches([1], lambda _: {name: number}, lambda _: None)

    def step(at: int) -> float:
        transport.barrier()
        begin = time.perf_counter()
        runner.step(at, batch)
        return time.perf_counter() - begin

    return step
