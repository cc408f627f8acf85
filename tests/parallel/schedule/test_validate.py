"""Tests that the validator accepts exactly the schedules that a machine could run to the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, Saved, StageCost
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Placement, Schedule, folded, linear, visit_of
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.validate import validate

SKIPS = [*chain(3), Edge(0, 2), Edge(0, 2, 1)]
WHOLE = [
    gems(3),
    gpipe(linear(3), 3),
    bidirectional(4, 4),
    lower(gems(3), SKIPS),
    lower(gems(4), buckets=2),
    lower(gpipe(folded(2), 2), [*chain(4), Edge(0, 3), Edge(1, 2, 1)]),
    lower(one_f_one_b(3, 4), SKIPS, recompute=[0, 1], offload={0: ["a"], 1: ["a", "b"]}),
    lower(bidirectional(3, 4).expanded(), SKIPS, recompute=[0]),
    lower(replace(gpipe(linear(2), 2), groups=2).expanded(), buckets=2),
]


class ImpossibleError(Exception):
    """No executor could do this, or the step did not end as it should."""


class ToyMachine:
    """Ranks that hold symbols instead of tensors; it knows no rule of what must precede what."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.homes = schedule.placement.homes
        self.lowered = any(action.kind not in (Kind.FORWARD, Kind.BACKWARD) for action in schedule)
        self.again = {action[1:4] for action in schedule if action.kind is Kind.RECOMPUTE}
        self.tensors: set[tuple[object, ...]] = set()
        self.wire: set[tuple[object, ...]] = set()
        self.log: list[Action] = []
        self.sums: dict[tuple[int, int | None], dict[int, list[int]]] = {}
        self.queues = [deque[tuple[int, int | None]]() for _ in schedule.lists]
        self.finished: set[tuple[int, int | None]] = set()

    def run(self) -> None:
        lists = [deque(actions) for actions in self.schedule.lists]
        while any(lists):
            able = [each for each in enumerate(lists) if each[1] and self.can(each[0], each[1][0])]
            self.need(able, "nothing can move")
            for rank, actions in able:
                self.do(rank, actions.popleft())
                self.log.append(self.log_of)
        for replica, home in enumerate(self.homes):
            for stage in range(len(home)):
                self.need(self.gradient(replica, stage) == self.own(replica), "a gradient")
                self.need(not self.lowered or Action(Kind.STEP, replica, stage) in self.log, "step")
        self.need(not self.wire and not self.tensors, "something is left over")

    def need(self, condition: object, what: str) -> None:
        if not condition:
            raise ImpossibleError(what)

    def own(self, replica: int) -> list[int]:
        return [each for each, at in enumerate(self.schedule.replica_of) if at == replica]

    def gradient(self, replica: int, stage: int) -> list[int]:
        added = [
            visit_of(each)[2]
            for each in self.log
            if each.kind is Kind.BACKWARD and each[1:3] == (replica, stage)
        ]
        return sorted(added)

    def can(self, rank: int, action: Action) -> bool:
        """Return True if a rank can do an action now, without waiting for another rank."""
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            return all(each in self.tensors for each in self.ends(action, made=False))
        if action.kind is Kind.RECV:
            return self.message(action) in self.wire
        if action.kind is Kind.WAIT_REDUCE:
            return (action.stage, action.bucket) in self.finished
        return True

    def ends(self, action: Action, made: bool) -> list[tuple[object, ...]]:
        """The tensors that an F or B makes or consumes, and on which rank they are then."""
        forward = action.kind is Kind.FORWARD
        home = self.homes[action.replica]
        result: list[tuple[object, ...]] = []
        for edge in self.schedule.edges:
            if action.stage == (edge.source if forward == made else edge.target):
                far = home[edge.target if forward == made else edge.source]
                local = far == home[action.stage] or not self.lowered
                # What must travel lies apart from what has arrived.
                at = (far if made else home[action.stage]) if local or not made else "outgoing"
                result.append((at, action.replica, edge, action.microbatch, forward))
        return result

    def message(self, action: Action) -> tuple[object, ...]:
        assert action.edge is not None
        activation = (action.stage == action.edge.source) == (action.kind is Kind.SEND)
        return (action.replica, action.edge, action.microbatch, activation)

    def do(self, rank: int, action: Action) -> None:
        self.log_of = action
        visit = action[1:4]
        done = {each.kind for each in self.log if each[1:4] == visit and each.tensor is None}
        moves = [each for each in self.log if each[1:4] == visit and each.tensor is not None]
        away = len({each.tensor for each in moves if each.kind is Kind.OFFLOAD}) - len(
            {each.tensor for each in moves if each.kind is Kind.PREFETCH}
        )
        self.need(self.homes[action.replica][action.stage] == rank, "not the holder")
        self.need(action not in self.log, "twice")
        if action.kind is Kind.FORWARD:
            self.visit(action)
        elif action.kind is Kind.BACKWARD:
            saved = Kind.RECOMPUTE if visit in self.again else Kind.FORWARD
            self.need(saved in done and not away, "nothing saved")
            self.visit(action)
        elif action.kind is Kind.RECOMPUTE:
            self.need(Kind.FORWARD in done and Kind.BACKWARD not in done, "no inputs")
        elif action.kind is Kind.SEND:
            outgoing = ("outgoing", *self.message(action))
            self.need(outgoing in self.tensors, "nothing to send")
            self.tensors.remove(outgoing)
            self.wire.add(self.message(action))
        elif action.kind is Kind.RECV:
            self.wire.remove(self.message(action))
            self.tensors.add((rank, *self.message(action)))
        elif action.kind in (Kind.OFFLOAD, Kind.PREFETCH):
            earlier = [each.kind for each in moves if each.tensor == action.tensor]
            expected = [] if action.kind is Kind.OFFLOAD else [Kind.OFFLOAD]
            self.need(earlier == expected, "not where it is moved from")
            saved = Kind.RECOMPUTE if visit in self.again else Kind.FORWARD
            self.need(saved in done and Kind.BACKWARD not in done, "nothing to move")
        elif action.kind is Kind.REDUCE:
            self.join(rank, action)
        elif action.kind is Kind.STEP:
            self.step(action)

    def visit(self, action: Action) -> None:
        self.need(self.schedule.replica_of[visit_of(action)[2]] == action.replica, "not its own")
        self.tensors.difference_update(self.ends(action, made=False))
        self.tensors.update(self.ends(action, made=True))

    def join(self, rank: int, action: Action) -> None:
        which = (action.stage, action.bucket)
        joined = self.sums.setdefault(which, {})
        joined[action.replica] = self.gradient(action.replica, action.stage)
        if all(each in joined for each, home in enumerate(self.homes) if home[which[0]] == rank):
            self.queues[rank].append(which)
        # A transport runs the sums of a rank one after another, in the order it was told.
        for _ in self.queues:
            for first in [queue[0] for queue in self.queues if queue]:
                queues = [self.queues[home[first[0]]] for home in self.homes]
                if all(queue and queue[0] == first for queue in queues):
                    self.finished.add(first)
                    for at in {home[first[0]] for home in self.homes}:
                        self.queues[at].popleft()

    def step(self, action: Action) -> None:
        if len(self.homes) == 1:
            self.need(self.gradient(0, action.stage) == self.own(0), "too early")
            return
        sums = {which: parts for which, parts in self.sums.items() if which[0] == action.stage}
        self.need(sums, "no sum")
        for (stage, bucket), parts in sums.items():
            self.need(parts == {each: self.own(each) for each in range(len(self.homes))}, "part")
            waited = Action(Kind.WAIT_REDUCE, action.replica, stage, bucket=bucket)
            self.need(waited in self.log, "not waited for")


def runs(schedule: Schedule) -> bool:
    try:
        ToyMachine(schedule).run()
    except ImpossibleError:
        return False
    return True


@pytest.mark.parametrize("schedule", WHOLE, ids=range(len(WHOLE)))
def test_whole_schedules_run_and_are_accepted(schedule: Schedule) -> None:
    assert runs(schedule)
    validate(schedule)


def _changed(schedule: Schedule, lists: Sequence[Sequence[Action]]) -> Schedule:
    return replace(schedule, lists=tuple(tuple(actions) for actions in lists))


@st.composite
def altered(draw: st.DrawFn) -> Schedule:
    """A schedule with an action dropped, doubled, or moved, or two swapped, up to twice."""
    schedule = draw(st.sampled_from(WHOLE))
    lists = [list(actions) for actions in schedule.lists]

    def place() -> tuple[int, int]:
        rank = draw(st.sampled_from([each for each, own in enumerate(lists) if own]))
        return rank, draw(st.integers(0, len(lists[rank]) - 1))

    for _ in range(draw(st.integers(1, 2))):
        rank, index = place()
        change = draw(st.sampled_from(["drop", "double", "move", "neighbours", "swap"]))
        if change == "drop":
            del lists[rank][index]
        elif change == "double":
            other, at = place()
            lists[other].insert(at, lists[rank][index])
        elif change == "move":
            action = lists[rank].pop(index)
            lists[rank].insert(draw(st.integers(0, len(lists[rank]))), action)
        else:
            other, at = place() if change == "swap" else (rank, max(0, index - 1))
            first, second = lists[rank][index], lists[other][at]
            lists[rank][index], lists[other][at] = second, first
    return _changed(schedule, lists)


@pytest.mark.slow
@settings(max_examples=1500)
@given(altered())
def test_an_altered_schedule_is_accepted_only_where_it_still_runs(schedule: Schedule) -> None:
    try:
        validate(schedule)
    except PathosegError:
        assert not runs(schedule)
    else:
        assert runs(schedule)
        stage = StageCost(1, 2, tensors={"a": Saved(1), "b": Saved(1)})
        simulate(schedule, Costs((stage,) * schedule.stages, window=1))


def _without(schedule: Schedule, text: str) -> Schedule:
    return _changed(
        schedule, [[each for each in own if str(each) != text] for own in schedule.lists]
    )


def _swapped(schedule: Schedule, first: str, second: str) -> Schedule:
    exchange = {first: Action.parse(second), second: Action.parse(first)}
    lists = [[exchange.get(str(each), each) for each in own] for own in schedule.lists]
    return _changed(schedule, lists)


LOWERED = lower(gems(3), SKIPS)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (_without(LOWERED, "0:1F0"), "0:1F0 is missing"),
        (_without(LOWERED, "0:2RECV0(0>2.1)"), r"0:2RECV0\(0>2.1\) is missing"),
        (_without(LOWERED, "1:2STEP"), "1:2STEP is missing"),
        (_without(LOWERED, "0:1REDUCE#0"), "0:1REDUCE#0 is missing"),
        (
            _changed(LOWERED, [[*LOWERED.lists[0], LOWERED.lists[0][0]], *LOWERED.lists[1:]]),
            "0:0F0 is there 2 times",
        ),
        (_swapped(LOWERED, "0:1F0", "0:1B0"), "rank 1 has 0:1B0 before .*must precede it"),
        (_swapped(LOWERED, "0:0F0", "0:1F0"), "0:1F0 is on rank 0, which does not hold"),
        (_swapped(LOWERED, "1:2REDUCE#0", "0:0REDUCE#0"), "stages .0, 2. in different orders"),
        (_changed(LOWERED, LOWERED.lists[:2]), "2 lists for 3 ranks"),
        (replace(LOWERED, edges=(Edge(2, 1),)), "edge 2>1 does not lead"),
        (replace(LOWERED, edges=(Edge(0, 1), Edge(0, 1))), "an edge is there twice"),
        (replace(LOWERED, edges=chain(3)), r"0:0RECV0\(0>2\) has no use"),
        (replace(LOWERED, replica_of=(0, 2)), "a replica outside 0…1"),
        (replace(LOWERED, replica_of=(0, 0)), "0:0B1 is missing"),
        (replace(LOWERED, placement=Placement(3, ((0, 1, 2), (2, 1)))), "differ in their number"),
        (replace(LOWERED, placement=Placement(2, LOWERED.placement.homes)), "outside 0…1"),
        (replace(LOWERED, placement=Placement(3, ())), "no stages"),
        (replace(LOWERED, groups=0), "0 groups"),
        (_changed(gems(2), [[Action(Kind.FORWARD, 0, 7, 0)], []]), "a replica or stage that is"),
        (_changed(gems(2), [[Action(Kind.FORWARD, 0, 0)], []]), "F needs a microbatch"),
    ],
)
def test_what_is_broken_is_named(broken: Schedule, reason: str) -> None:
    with pytest.raises(PathosegError, match=reason):
        validate(broken)


def test_a_deadlock_names_each_rank_and_what_it_waits_for() -> None:
    order = gpipe(linear(2), 2)
    first, second = order.lists
    crossed = _changed(order, [[first[i] for i in (0, 2, 1, 3)], [second[i] for i in (1, 3, 0, 2)]])
    with pytest.raises(PathosegError) as caught:
        validate(crossed)
    assert "rank 0 waits at 0:0B0 for 0:1B0 of rank 1" in str(caught.value)
    assert "rank 1 waits at 0:1F1 for 0:0F1 of rank 0" in str(caught.value)
