"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import replace

from pathoseg.parallel.schedule.action import Action, Kind, chain
from pathoseg.parallel.schedule.schedule import Placement, Schedule, linear


def gpipe(placement: Placement, microbatches: int, flush: int | None = None) -> Schedule:
    """Fill the stages with microbatches, then drain them (Huang et al., NeurIPS 2019).

    With N microbatches on D equal stages the bubble is (D - 1) / (N + D - 1) and every rank holds
    the activations of all N. Backwards run in the order of the forwards, so that gradients are
    summed as one process would.

    Args:
        placement: One replica, linear or folded.
        microbatches: In the whole step.
        flush: Number of microbatches that are in flight before the stages are drained; all of them
            when None. With 1 it is MP-Basic.
    """
    size = flush or microbatches
    [home] = placement.homes
    lists: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for first in range(0, microbatches, size):
        batch = range(first, min(first + size, microbatches))
        for stage, rank in enumerate(home):
            lists[rank] += [Action(Kind.FORWARD, 0, stage, microbatch) for microbatch in batch]
        for stage, rank in reversed(list(enumerate(home))):
            lists[rank] += [Action(Kind.BACKWARD, 0, stage, microbatch) for microbatch in batch]
    return Schedule(
        "gpipe",
        placement,
        chain(placement.stages),
        (0,) * microbatches,
        tuple(map(tuple, lists)),
    )


def mp_basic(placement: Placement, microbatches: int) -> Schedule:
    """Naive model parallelism: a microbatch goes through all stages and back, then the next.

    On D equal stages of forward f and backward b it takes N × D × (f + b) and holds the
    activations of one microbatch.
    """
    return replace(gpipe(placement, microbatches, flush=1), name="mp-basic")


def sequential(microbatches: int) -> Schedule:
    """Order one rank with the whole model as one stage; in groups, it is data parallelism."""
    return replace(mp_basic(linear(1), microbatches), name="sequential")
