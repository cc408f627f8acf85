"""The named orders of a step: the one place where their names stand, and how each is built."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Edge
from pathoseg.parallel.schedule.bidirectional import bidirectional_of
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.gems import gems_of
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b_of, warm_up
from pathoseg.parallel.schedule.schedule import Placement, Schedule, folded, linear, mirrored
from pathoseg.parallel.schedule.simulate import weights_by_rank
from pathoseg.parallel.schedule.synthesise import synthesise

AUTO = "auto"
SEQUENTIAL, DATA_PARALLEL = "sequential", "data-parallel"
MP_BASIC, SYNTHESISED = "mp-basic", "synthesised"

LINEAR = "linear"

PLACEMENTS: Mapping[str, Callable[[int], Placement]] = {
    LINEAR: linear,
    "folded": folded,
    "mirrored": mirrored,
}
# Placements of stages that are branches, which name a rank for each stage.
BRANCHED, BRANCHED_MIRRORED = "branched", "branched-mirrored"


def of_branches(order: Order) -> tuple[str, ...]:
    """Return the placements of an order on stages that are branches."""
    if not order.staged:
        return ()
    names = {LINEAR: BRANCHED, "mirrored": BRANCHED_MIRRORED}
    return tuple(names[name] for name in order.placements if name in names)


def branch_placement(name: str, ranks: int, home: tuple[int, ...]) -> Placement:
    """Place stages that are branches.

    Args:
        name: `branched`, or `branched-mirrored` for two replicas, the odd one inverted.
        ranks: Number of ranks.
        home: The rank of each stage.
    """
    opposite = tuple(ranks - 1 - rank for rank in home)
    return Placement(ranks, (home, opposite) if name == BRANCHED_MIRRORED else (home,))


class OrderSetting(NamedTuple):
    """The setting for which an order is built.

    Attributes:
        placement: The ranks of the stages.
        microbatches: Number of one group's microbatches in a step.
        costs: Times and bytes of the stages.
        edges: The tensors between them.
        memory: Bytes of a rank.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    edges: tuple[Edge, ...]
    memory: int

    def taken(self, stage: int, in_flight: int) -> int:
        """Return the bytes that a stage takes beside its weights, with so many microbatches."""
        cost = self.costs.stages[stage]
        entering, leaving = (
            sum(self.costs.size(edge, forward) for edge in self.edges if edge[forward] == stage)
            for forward in (True, False)
        )
        workspace = max(cost.forward_workspace, cost.backward_workspace + leaving)
        return in_flight * (cost.activations + entering) + workspace


class Variant(NamedTuple):
    """An order of F and B, and the stages that it recomputes."""

    order: Schedule
    recompute: tuple[int, ...] = ()


# Each family goes from the fastest variant to the one that needs least memory.
_Families = Iterator[Iterator[Variant]]
_InFlight = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Order:
    """A named order.

    Attributes:
        name: The name for `--order`.
        placements: Where its stages may be, by their names in `PLACEMENTS`.
        families: The variants of it.
        in_flight: By stage, the most microbatches between their forward and backward, of a number
            of stages and microbatches.
        recompute: Whether it recomputes every stage where memory asks for it.
        staged: Whether it needs two stages or more.
        may_keep_less: Whether layers may be offloaded and recomputed for it to fit.
    """

    name: str
    placements: tuple[str, ...]
    families: Callable[[OrderSetting], _Families]
    in_flight: _InFlight = lambda stages, microbatches: (1,) * stages
    recompute: bool = False
    staged: bool = True
    may_keep_less: bool = False


def find_order(name: str) -> list[Order]:
    """The order of this name; all for `auto`.

    Raises:
        PathosegError: There is none.
    """
    if name == AUTO:
        return list(ORDERS.values())
    if name not in ORDERS:
        known = (AUTO, *ORDERS)
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise PathosegError(f"There is no order {name!r}.", f"{hint}Known: {', '.join(known)}.")
    return [ORDERS[name]]


def _alone(setting: OrderSetting) -> _Families:
    yield iter([Variant(sequential(setting.microbatches))])


def _mp_basic(setting: OrderSetting) -> _Families:
    yield iter([Variant(mp_basic(setting.placement, setting.microbatches))])


def _gpipe(setting: OrderSetting) -> _Families:
    yield iter([Variant(gpipe(setting.placement, setting.microbatches))])


def _one_f_one_b(setting: OrderSetting) -> _Families:
    yield iter([Variant(_alternating(setting))])


def _alternating(setting: OrderSetting) -> Schedule:
    return one_f_one_b_of(setting.placement, setting.microbatches, setting.edges, _times(setting))


def _times(setting: OrderSetting) -> list[tuple[float, float]]:
    """Return (forward, backward) seconds by stage; an empty list where every rank has one stage.

    None takes no time at all, so that what waits for another starts later.
    """
    stages = setting.costs.stages
    if len(stages) == setting.placement.ranks:
        return []
    least = 1e-9 * sum(each.forward + each.backward for each in stages)
    return [(max(each.forward, least), max(each.backward, least)) for each in stages]


def _recomputing(setting: OrderSetting) -> _Families:
    """First the stages alone that would not fit otherwise, then all."""
    order = replace(_alternating(setting), name="1f1b-recompute")
    every = tuple(range(order.stages))
    too_large = tuple(stage for stage in every if not _fits(setting, stage))
    yield (Variant(order, stages) for stages in dict.fromkeys((too_large or every, every)))


def _fits(setting: OrderSetting, stage: int) -> bool:
    """Return True if a stage has room for the microbatches that 1F1B holds."""
    held = min(setting.microbatches, warm_up(setting.placement, setting.edges)[stage])
    weights = setting.costs.stages[stage].weights
    return weights + setting.taken(stage, held) <= setting.memory


def _gems(setting: OrderSetting, master: bool) -> _Families:
    half, odd = divmod(setting.microbatches, 2)
    if odd:
        return
    pairs = [count for count in range(2 if master else 1, half + 1) if half % count == 0]
    yield (
        Variant(gems_of(setting.placement, count, half // count))
        for count in (pairs if master else pairs[:1])
    )


def _bidirectional(setting: OrderSetting) -> _Families:
    placement, microbatches, _, edges, _ = setting
    yield iter([Variant(bidirectional_of(placement, microbatches, edges, _times(setting)))])


def _synthesised(setting: OrderSetting) -> _Families:
    for recompute in ((), tuple(range(setting.placement.stages))):
        yield _made_to_measure(setting, recompute)


def _made_to_measure(setting: OrderSetting, recompute: tuple[int, ...]) -> Iterator[Variant]:
    placement, microbatches, costs, edges, memory = setting
    room = memory - max(weights_by_rank(placement, costs))
    with suppress(PathosegError):  # no order fits
        order = synthesise(placement, costs, microbatches, room, edges, recompute)
        yield Variant(order, recompute)


def _all(stages: int, microbatches: int) -> tuple[int, ...]:
    return (microbatches,) * stages


def _half(stages: int, microbatches: int) -> tuple[int, ...]:
    return (max(1, microbatches // 2),) * stages


def _both_ways(stages: int, microbatches: int) -> tuple[int, ...]:
    one_less = stages // 2 if stages % 2 == 0 else 0
    return tuple(
        max(1, min(microbatches // 2, stages - stage - (stage < one_less)))
        for stage in range(stages)
    )


def _falling(stages: int, microbatches: int) -> tuple[int, ...]:
    return tuple(min(microbatches, stages - stage) for stage in range(stages))


ORDERS: Mapping[str, Order] = {
    order.name: order
    for order in (
        Order(SEQUENTIAL, (LINEAR,), _alone, staged=False, may_keep_less=True),
        Order(DATA_PARALLEL, (LINEAR,), _alone, staged=False, may_keep_less=True),
        Order(MP_BASIC, (LINEAR, "folded"), _mp_basic, may_keep_less=True),
        Order("gpipe", (LINEAR, "folded"), _gpipe, _all, may_keep_less=True),
        Order("1f1b", (LINEAR,), _one_f_one_b, _falling, may_keep_less=True),
        Order("1f1b-recompute", (LINEAR,), _recomputing, _falling, recompute=True),
        Order("gems-mast", ("mirrored",), lambda setting: _gems(setting, master=False), _half),
        Order("gems-master", ("mirrored",), lambda setting: _gems(setting, master=True)),
        Order("bidirectional", ("mirrored",), _bidirectional, _both_ways),
        Order(SYNTHESISED, (LINEAR, "folded", "mirrored"), _synthesised),
    )
}
