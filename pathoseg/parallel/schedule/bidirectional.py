"""Bidirectional 1F1B: two mirrored replicas that fill each other's bubbles, as Chimera does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pathoseg.parallel.schedule.action import Edge, Kind, chain
from pathoseg.parallel.schedule.costs import Costs, StageCost
from pathoseg.parallel.schedule.event import Event
from pathoseg.parallel.schedule.one_f_one_b import one_way, warm_up
from pathoseg.parallel.schedule.schedule import Placement, Schedule, mirrored
from pathoseg.parallel.schedule.simulate import simulate


def bidirectional(ranks: int, microbatches: int) -> Schedule:
    """Bidirectional 1F1B on as many stages as ranks; see `bidirectional_of`."""
    return bidirectional_of(mirrored(ranks), microbatches, chain(ranks))


def bidirectional_of(
    placement: Placement,
    microbatches: int,
    edges: Iterable[Edge],
    times: Sequence[tuple[float, float]] = (),
) -> Schedule:
    """1F1B in both directions at once; with N = D it is Chimera (Li and Hoefler, SC'21).

    Even microbatches run down the ranks and odd ones up. Each direction is a 1F1B order, and a
    rank takes its visits as they would start were the other direction not there and a backward
    twice as long as a forward. On an even number D of equal stages with b = 2f and an even number
    N ≥ D of microbatches it takes (3N + 2D - 4) f, and a rank holds the activations of at most D
    microbatches (D + 1 where D is odd).

    Args:
        placement: Two replicas, the odd one inverted.
        microbatches: In the whole step.
        edges: The tensors between the stages.
        times: Of each stage, a forward and a backward, where a rank holds several stages; empty
            takes 1 and 2.
    """
    edges, ranks = tuple(edges), placement.ranks
    replica_of = tuple(microbatch % 2 for microbatch in range(microbatches))
    # Where D is even, one less in the first half keeps the two directions at D together.
    in_flight = [held - (ranks % 2 == 0 and 2 * held > ranks) for held in warm_up(placement, edges)]
    merged: list[list[Event]] = [[] for _ in range(ranks)]
    costs = Costs(tuple(StageCost(*each) for each in times or [(1, 2)] * placement.stages))
    for replica in range(placement.replicas):
        own = range(replica, microbatches, 2)
        lists = one_way(placement, replica, own, edges, in_flight, times)
        alone = Schedule("one-way", placement, edges, replica_of, lists)
        for event in simulate(alone, costs).events:
            merged[event.rank].append(event)
    return Schedule(
        "bidirectional",
        placement,
        chain(placement.stages),
        replica_of,
        tuple(tuple(event.action for event in sorted(each, key=_start_order)) for each in merged),
    )


def _start_order(event: Event) -> tuple[float, bool, int]:
    """Sort key of visits that could start together: backwards first, then the lower microbatch."""
    visit = event.action
    assert visit.microbatch is not None
    return event.start, visit.kind is Kind.FORWARD, visit.microbatch
