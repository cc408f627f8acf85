"""GEMS: two mirrored replicas whose microbatches pass each other, one stage held at a time."""

from __future__ import annotations

from pathoseg.parallel.schedule.action import Action, Kind, chain
from pathoseg.parallel.schedule.schedule import Placement, Schedule, mirrored


def gems(ranks: int, pairs: int = 1, per_visit: int = 1) -> Schedule:
    """GEMS on as many stages as ranks; see `gems_of`."""
    return gems_of(mirrored(ranks), pairs, per_visit)


def gems_of(placement: Placement, pairs: int = 1, per_visit: int = 1) -> Schedule:
    """GEMS-MAST (one pair of visits) and GEMS-MASTER (several), Jain et al., SC'20.

    A visit is `per_visit` forwards, then as many backwards, of one replica; the replicas take
    turns, and a rank starts a visit only when its last one is done. On D equal stages with
    backward b ≥ forward f, k pairs and P microbatches a visit,
    T = (D - 1) f + 2 k [(D - 1) b + P (f + b)], and the activations held are at most those of
    P microbatches of the larger of a rank's two stages.

    Args:
        placement: Two replicas, the odd one inverted.
        pairs: k; 1 is MAST.
        per_visit: P.
    """
    lists: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for visit in range(2 * pairs):
        replica = visit % 2
        batch = range(visit * per_visit, (visit + 1) * per_visit)
        stages = list(enumerate(placement.homes[replica]))
        for kind, way in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1])):
            for stage, rank in way:
                lists[rank] += [Action(kind, replica, stage, microbatch) for microbatch in batch]
    return Schedule(
        "gems-mast" if pairs == 1 else "gems-master",
        placement,
        chain(placement.stages),
        tuple(visit % 2 for visit in range(2 * pairs) for _ in range(per_visit)),
        tuple(map(tuple, lists)),
    )
