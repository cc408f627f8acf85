"""From an order of F and B to everything a rank does: messages, memory, sums, steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

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
            saved. One comes back while the visit ahead of its backward runs; where fewer than two
            visits lie between forward and backward it stays.
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
    # By backward: how many places after its forward it stands.
    waits = {
        action: index - at[action._replace(kind=Kind.FORWARD)]
        for index, action in enumerate(order)
        if action.kind is Kind.BACKWARD
    }
    away = {action: [*offload.get(action.stage, ())] for action, wait in waits.items() if wait > 2}
    lowered: list[Action] = []
    for action, following in zip_longest(order, order[1:]):
        if action.stage in recompute and waits.get(action, 1) > 1:
            # Ahead of the wait for the gradient: it needs none.
            lowered.append(action._replace(kind=Kind.RECOMPUTE))
        lowered += _messages(schedule, action, Kind.RECV)
        lowered += [
            following._replace(kind=Kind.PREFETCH, tensor=tensor)
            for tensor in reversed(away.get(following, ()))
        ]
        lowered.append(action)
        lowered += _messages(schedule, action, Kind.SEND)
        lowered += [
            action._replace(kind=Kind.OFFLOAD, tensor=tensor)
            for tensor in away.get(action._replace(kind=Kind.BACKWARD), ())
            if action.kind is Kind.FORWARD
        ]
    return lowered


def _messages(schedule: Schedule, action: Action, kind: Kind) -> list[Action]:
    """The RECVs ahead of, or the SENDs after, an F or B: the nearest stage first."""
    home = schedule.placement.homes[action.replica]
    entering = (action.kind is Kind.FORWARD) == (kind is Kind.RECV)
    setting = schedule.setting
    edges = (setting.inputs if entering else setting.outputs)[action.stage]
    crossing = [edge for edge in edges if home[edge.source] != home[edge.target]]
    crossing.sort(key=lambda edge: edge.target - edge.source)
    return [action._replace(kind=kind, edge=edge) for edge in crossing]


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
