"""Everything of a plan but the cut: order, placement, stages, groups and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pathoseg.parallel.planning.orders import DATA_PARALLEL, SEQUENTIAL, Order, find_order
from pathoseg.parallel.planning.priced import Priced
from pathoseg.parallel.planning.task import Task

# Stage counts: all to the first of these, then each larger by so much.
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
            for width in _widths(task.ranks) if order.staged else (1,):
                stages = width * (2 if placement == "folded" else 1)
                if stages > most or fixed not in (None, stages) or (order.staged and width < 2):
                    continue
                for groups in _groups(order, task.ranks // width, microbatches):
                    if task.all_ranks and width * groups != task.ranks:
                        continue
                    own = microbatches // groups
                    least = max(1, own / width) * priced.seconds
                    yield Candidate(priced, order, placement, width, groups, own, least)


def _widths(ranks: int) -> Iterator[int]:
    width = 2.0
    while width <= ranks:
        yield int(width)
        width = width + 1 if width < _EVERY else width * _GROWTH


def _groups(order: Order, most: int, microbatches: int) -> list[int]:
    if order.name == SEQUENTIAL:
        return [1]
    fitting = [count for count in range(min(most, microbatches), 0, -1) if not microbatches % count]
    if order.name == DATA_PARALLEL:
        return [count for count in fitting if count > 1]
    return fitting[:_GROUPS]
