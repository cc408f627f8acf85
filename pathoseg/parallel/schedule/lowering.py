"""From an order of F and B to everything a rank does: messages, memory, sums, steps.

Two stages on two ranks, two microbatches; stage 0 recomputes, stage 1 offloads its tensor x.

    order       rank 0   F0            F1                                 B0            B1
                rank 1            F0            F1               B0            B1

    (1) edges   rank 0   F0 SEND0      F1 SEND1                     RECV0 B0  RECV1 B1
                rank 1   RECV0 F0      RECV1 F1       B0 SEND0      B1 SEND1
    (2) memory  rank 0   ... RECOMPUTE0 RECV0 B0      RECOMPUTE1 RECV1 B1
                rank 1   RECV0 F0 OFFLOAD0  PREFETCH0 RECV1 F1 OFFLOAD1  PREFETCH1 B0 ...
    (3) sums    B (a stage's last here), REDUCE of each bucket     (where a stage has copies)
    (4) end     WAIT_REDUCE of each bucket and STEP, for each copy of a stage

(1) `_messages`: RECV just ahead of the F or B that reads, SEND just after the one that made it.
(2) `_moves`: a tensor leaves after the forward (or recomputation) that saved it, and may come back
    from the visit ahead of its backward on: above, PREFETCH0 stands ahead of F1.
(3), (4) `_with_steps`: sums begin as early as they can and are awaited at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from pathoseg.parallel.schedule.action import Action, Edge, Kind
from pathoseg.parallel.schedule.schedule import Schedule, visit_of


def lower(
    schedule: Schedule,
    edges: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
    offload: Mapping[int, Sequence[str]] | None = None,
    buckets: int = 1,
) -> Schedule:
    """Return an order of F and B with messages, recomputation, offload, sums and steps added.

    A message is sent as soon as its tensor is made, to its consumer directly (a skip too), the
    nearest first, and awaited just ahead of the action that needs it. A stage's gradients are
    summed over its copies once its last backward is done, deepest stage first on every rank.

    Args:
        schedule: The order.
        edges: The tensors between the stages; None keeps the order's own.
        recompute: The stages whose forward runs again ahead of the backward, except where the
            backward follows at once.
        offload: By stage, the saved tensors that wait in host memory, in the order they are
            made. They leave after the forward (or recomputation), and may come back from the visit
            ahead of their backward on, or from the backward on where that visit is their own.
        buckets: In how many parts a stage's gradients are summed.

    Returns:
        The same schedule with longer lists and these edges, not validated.
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
    at_once = {visit_of(each) for each, after in pairwise(order) if each[1:4] == after[1:4]}
    lowered: list[Action] = []
    for action, following in zip_longest(order, order[1:]):
        again = action.stage in recompute and visit_of(action) not in at_once
        if action.kind is Kind.BACKWARD:
            # Ahead of the wait for the gradient: none of this needs it.
            if again:
                lowered.append(action._replace(kind=Kind.RECOMPUTE))
                lowered += _moves(action, Kind.OFFLOAD, offload)
            if again or visit_of(action) in at_once:
                lowered += _moves(action, Kind.PREFETCH, offload)
        if (
            following is not None
            and following.kind is Kind.BACKWARD
            and following.stage not in recompute
            and visit_of(following) not in at_once
        ):
            lowered += _moves(following, Kind.PREFETCH, offload)
        lowered += _messages(schedule, action, Kind.RECV)
        lowered.append(action)
        lowered += _messages(schedule, action, Kind.SEND)
        if action.kind is Kind.FORWARD and not again:
            lowered += _moves(action, Kind.OFFLOAD, offload)
    return lowered


def _moves(action: Action, kind: Kind, offload: Mapping[int, Sequence[str]]) -> list[Action]:
    """The OFFLOADs or PREFETCHes of an action's visit."""
    names = offload.get(action.stage, ())
    return [
        action._replace(kind=kind, tensor=name)
        for name in (names if kind is Kind.OFFLOAD else reversed(names))
    ]


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
