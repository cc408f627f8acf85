"""Bidirectional 1F1B: two mirrored replicas that fill each other's bubbles, as Chimera does."""

from __future__ import annotations

from pathoseg.parallel.schedule.action import Action, Kind, chain
from pathoseg.parallel.schedule.costs import Costs
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.one_f_one_b import alternate
from pathoseg.parallel.schedule.schedule import Schedule, mirrored
from pathoseg.parallel.schedule.simulate import simulate


def bidirectional(ranks: int, microbatches: int) -> Schedule:
    """1F1B in both directions at once; with N = D it is Chimera (Li and Hoefler, SC'21).

    Even microbatches run down the ranks and odd ones up. Each direction is a 1F1B order, and a
    rank takes its visits as they would start were the other direction not there and a backward
    twice as long as a forward. On an even number D of equal stages with b = 2f and an even number
    N ≥ D of microbatches it takes (3N + 2D - 4) f, and a rank holds the activations of at most D
    microbatches (D + 1 where D is odd).
    """
    placement = mirrored(ranks)
    replica_of = tuple(microbatch % 2 for microbatch in range(microbatches))
    merged: list[list[Event]] = [[] for _ in range(ranks)]
    for replica, home in enumerate(placement.homes):
        own = range(replica, microbatches, 2)
        lists: list[tuple[Action, ...]] = [() for _ in range(ranks)]
        for stage, rank in enumerate(home):
            # Where D is even, one less in the first half keeps the two directions at D together.
            in_flight = ranks - stage - (ranks % 2 == 0 and stage < ranks // 2)
            lists[rank] = tuple(alternate(replica, stage, own, in_flight))
        alone = Schedule("one-way", placement, chain(ranks), replica_of, tuple(lists))
        for event in simulate(alone, Costs.equal(ranks, 1, 2)).events:
            merged[event.rank].append(event)
    return Schedule(
        "bidirectional",
        placement,
        chain(ranks),
        replica_of,
        tuple(tuple(event.action for event in sorted(each, key=_turn)) for each in merged),
    )


def _turn(event: Event) -> tuple[float, bool, int]:
    """Sort key of visits that could start together: backwards first, then the lower microbatch."""
    visit = event.action
    assert visit.microbatch is not None
    return event.start, visit.kind is Kind.FORWARD, visit.microbatch
