"""Everything of a plan but the cut: order, placement, stages, groups and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pathoseg.parallel.planning.orders import DATA_PARALLEL, SEQUENTIAL, Order, find_order
from pathoseg.parallel.planning.stage_costs import Priced
from pathoseg.parallel.planning.task import Task

# Ranks of a group: all to the first of these, then each larger by so much.
_EVERY, _GROWTH = 8, 1.5
_GROUPS = 3  # data-parallel widths that are tried for one number of stages, the widest first


class Candidate(NamedTuple):
    """Everything of a plan but the cut.

    Attributes:
        priced: The graph.
        order: The order.
        placement: Name of the placement.
        width: Ranks of a group.
        groups: How many.
        least: A lower bound of its time.
    """

    priced: Priced
    order: Order
    placement: str
    width: int
    groups: int
    microbatches: int
    least: float

    @property
    def stages(self) -> int:
        return self.width * (2 if self.placement == "folded" else 1)

    @property
    def ranks(self) -> int:
        return self.width * self.groups


def candidates(priced: Priced, task: Task) -> Iterator[Candidate]:
    """What may be tried of each order that the task allows.

    Raises:
        PathosegError: The model cannot be cut into as many stages as the task wants.
    """
    microbatches = task.batch // priced.microbatch
    fixed = task.stages or (len(task.cut) + 1 if task.cut else None)
    most = priced.cutter.most_stages
    if fixed is not None:
        priced.cutter.check(fixed)
    for order in find_order(task.order):
        for placement in order.placements:
            chunks = 2 if placement == "folded" else 1
            for width in _widths(task, fixed, chunks) if order.staged else (1,):
                stages = width * chunks
                if stages > most or fixed not in (None, stages):
                    continue
                for groups in _groups(order, task.ranks // width, microbatches):
                    if task.all_ranks and width * groups != task.ranks:
                        continue
                    own = microbatches // groups
                    least = max(1, own / width) * priced.seconds
                    yield Candidate(priced, order, placement, width, groups, own, least)


def _widths(task: Task, stages: int | None, chunks: int) -> list[int]:
    """How many ranks a group may have: those that leave no rank idle, and some between."""
    if stages is not None:
        return [stages // chunks] if 2 * chunks <= stages <= task.ranks * chunks else []
    widths = {width for width in range(2, task.ranks + 1) if task.ranks % width == 0}
    width = 2.0
    while width <= task.ranks:
        widths.add(int(width))
        width = width + 1 if width < _EVERY else width * _GROWTH
    return sorted(widths)


def _groups(order: Order, most: int, microbatches: int) -> list[int]:
    if order.name == SEQUENTIAL:
        return [1]
    fitting = [count for count in range(min(most, microbatches), 0, -1) if not microbatches % count]
    if order.name == DATA_PARALLEL:
        return [count for count in fitting if count > 1]
    return fitting[:_GROUPS]
