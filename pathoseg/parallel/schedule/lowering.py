"""From an order of F and B to everything a rank does: messages, memory, sums, steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pathoseg.parallel.schedule.action import Action, Edge, Kind
from pathoseg.parallel.schedule.schedule import Schedule, visit_of


def lower(
    schedule: Schedule,
    edges: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
    offload: Mapping[int, Sequence[str]] | None = None,
    buckets: int = 1,
) -> Schedule:
    """Add to an order of F and B all that the stage graph and the copies of stages ask for.

    A message is sent as soon as its tensor is made, to its consumer directly (a skip too), the
    nearest first, and awaited just ahead of the action that needs it. A stage's gradients are
    summed over its copies once its last backward is done, deepest stage first on every rank.

    Args:
        schedule: The order.
        edges: The tensors between the stages; None keeps the order's own.
        recompute: The stages whose forward runs again ahead of the backward, except where the
            backward follows at once.
        offload: By stage, the saved tensors that wait in host memory, in the order they are
            saved. One comes back while the action ahead of its backward runs; where fewer than
            two actions lie between forward and backward it stays.
        buckets: In how many parts a stage's gradients are summed.
    """
    whole = replace(schedule, edges=schedule.edges if edges is None else tuple(edges))
    offloaded = offload or {}
    lists = (_lower_rank(whole, rank, recompute, offloaded) for rank in range(len(whole.lists)))
    return replace(
        whole,
        lists=tuple(
            tuple(_with_steps(whole, rank, actions, buckets)) for rank, actions in enumerate(lists)
        ),
    )


def _lower_rank(
    schedule: Schedule,
    rank: int,
    recompute: Collection[int],
    offload: Mapping[int, Sequence[str]],
) -> list[Action]:
    """One rank's list with messages, recomputation and offload."""
    order = schedule.lists[rank]
    at = {action: index for index, action in enumerate(order)}
    blocks: list[list[Action]] = []
    prefetches: list[list[Action]] = [[] for _ in order]
    for index, action in enumerate(order):
        opposite = Kind.BACKWARD if action.kind is Kind.FORWARD else Kind.FORWARD
        distance = abs(index - at[action._replace(kind=opposite)])
        tensors = offload.get(action.stage, ()) if distance > 2 else ()
        block = [*_messages(schedule, action, Kind.RECV), action]
        if action.kind is Kind.FORWARD:
            saved = (action._replace(kind=Kind.OFFLOAD, tensor=tensor) for tensor in tensors)
            block += [*_messages(schedule, action, Kind.SEND), *saved]
        else:
            prefetches[index - 1] += [
                action._replace(kind=Kind.PREFETCH, tensor=tensor) for tensor in reversed(tensors)
            ]
            if action.stage in recompute and distance > 1:
                # Ahead of the wait for the gradient: it needs none.
                block.insert(0, action._replace(kind=Kind.RECOMPUTE))
            block += _messages(schedule, action, Kind.SEND)
        blocks.append(block)
    return [
        action
        for ahead, block in zip(prefetches, blocks, strict=True)
        for action in (*ahead, *block)
    ]


def _messages(schedule: Schedule, action: Action, kind: Kind) -> list[Action]:
    """The RECVs ahead of, or the SENDs after, an F or B: the nearest stage first."""
    home = schedule.placement.homes[action.replica]
    entering = (action.kind is Kind.FORWARD) == (kind is Kind.RECV)
    mine = [
        edge
        for edge in schedule.edges
        if action.stage == (edge.target if entering else edge.source)
        and home[edge.source] != home[edge.target]
    ]
    mine.sort(key=lambda edge: edge.target - edge.source)
    return [action._replace(kind=kind, edge=edge) for edge in mine]


def _with_steps(
    schedule: Schedule, rank: int, actions: Sequence[Action], buckets: int
) -> list[Action]:
    """The list with REDUCE, WAIT_REDUCE and STEP of every copy that the rank holds."""
    copies = [
        (replica, stage)
        for stage in reversed(range(schedule.stages))
        for replica, home in enumerate(schedule.placement.homes)
        if home[stage] == rank
    ]
    summed = buckets if schedule.placement.replicas * schedule.groups > 1 else 0
    sums = [
        Action(Kind.REDUCE, replica, stage, bucket=bucket)
        for stage in dict.fromkeys(stage for _, stage in copies)
        for bucket in range(summed)
        for replica, own in copies
        if own == stage
    ]
    last = {visit_of(each)[:2]: index for index, each in enumerate(actions)}
    result: list[Action] = []
    for index, action in enumerate(actions):
        result.append(action)
        # A copy without a microbatch has nothing to wait for.
        while sums and last.get((sums[0].replica, sums[0].stage), -1) <= index:
            result.append(sums.pop(0))
    result += sums
    for replica, stage in copies:
        result += [
            Action(Kind.WAIT_REDUCE, replica, stage, bucket=bucket) for bucket in range(summed)
        ]
        result.append(Action(Kind.STEP, replica, stage))
    return result
