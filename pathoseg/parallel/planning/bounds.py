"""What a cut takes at best, whatever the order: what the search need not simulate."""

from __future__ import annotations

from pathoseg.parallel.planning.orders import Frame


def least_seconds(frame: Frame, groups: int) -> float:
    """A lower bound of a step's time.

    A rank computes all visits of its stages. Its first visit waits for the forwards of the stages
    before it; after its last one come the backwards of these stages, or its own stage's sum over
    the copies and the optimizer's step. Two replicas share the work as they like.

    Args:
        frame: One group's, its costs being those on the network of all groups.
        groups: How many groups.
    """
    placement, microbatches, costs = frame[:3]
    stages = costs.stages
    work = sum(stage.forward + stage.backward for stage in stages)
    if placement.replicas > 1:
        return max(work, microbatches * work / placement.ranks)
    [home] = placement.homes
    least = 0.0
    for rank in range(placement.ranks):
        own = [stage for stage, at in enumerate(home) if at == rank]
        busy = sum(stages[stage].forward + stages[stage].backward for stage in own)
        before = stages[: own[0]]
        copies = range(rank, rank + placement.ranks * groups, placement.ranks)
        ending = stages[own[0]].step + float(
            costs.network.all_reduce(copies, stages[own[0]].gradients)
        )
        after = max(ending, sum(stage.backward for stage in before))
        least = max(least, microbatches * busy + sum(s.forward for s in before) + after)
    return max(least, work)


def least_bytes(frame: Frame) -> int:
    """A lower bound of the most loaded rank's memory: one microbatch in one of its stages."""
    stages, sizes = frame.costs.stages, frame.costs.sizes
    weights = [0] * frame.placement.ranks
    most = [0] * frame.placement.ranks
    for home in frame.placement.homes:
        for stage, rank in enumerate(home):
            cost = stages[stage]
            entering, leaving = (
                sum(sizes[edge] for edge in frame.edges if edge[end] == stage) for end in (1, 0)
            )
            workspace = max(cost.forward_workspace, cost.backward_workspace + leaving)
            weights[rank] += cost.weights
            most[rank] = max(most[rank], entering + cost.activations + workspace)
    return max(map(sum, zip(weights, most, strict=True)))
