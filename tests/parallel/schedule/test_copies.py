"""Tests copies to and from the host by small steps worked out by hand, and by what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Kind
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, Link, Saved, StageCost
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded, linear
from pathoseg.parallel.schedule.simulate import Simulation, simulate, take_turns

THIRD = Fraction(1, 3)


def _times(run: Simulation, text: str) -> tuple[float, float]:
    [event] = [event for event in run.events if str(event.action) == text]
    return event.start, event.end


def _one_stage(
    microbatches: int, tensors: dict[str, Saved], host: Link, window: int
) -> tuple[Schedule, Costs]:
    """A stage with a forward of 6 and a backward of 12 on a rank alone."""
    schedule = lower(sequential(microbatches), offload={0: [*tensors]})
    return schedule, Costs((StageCost(6, 12, 10, tensors=tensors),), host=host, window=window)


def test_a_copy_begins_within_the_forward_and_ends_under_the_next_work() -> None:
    tensors = {"a": Saved(6, made=1, needed=9), "b": Saved(3, made=4, needed=2)}
    run = simulate(*_one_stage(1, tensors, Link(alpha=1, beta=THIRD), window=9))
    assert _times(run, "0:0OFFLOAD0[a]") == (1, 4)
    assert _times(run, "0:0OFFLOAD0[b]") == (4, 6)
    # They come back in the order in which the backward needs them.
    assert _times(run, "0:0PREFETCH0[b]") == (6, 8)
    assert _times(run, "0:0PREFETCH0[a]") == (8, 11)
    assert _times(run, "0:0B0") == (6, 18)
    assert run.host_memory == (9,)
    assert run.peak_activations == (10,)
    assert run.peak_memory == (10 + 9,)


def test_a_forward_waits_while_more_than_a_window_would_wait_to_leave() -> None:
    tensors = {name: Saved(6, made=at, needed=12 - at) for name, at in (("a", 1), ("b", 2))}
    wide, narrow = (
        simulate(*_one_stage(1, tensors, Link(beta=Fraction(1, 2)), window)) for window in (12, 6)
    )
    # Copies take 3. With room for both the second waits for the channel alone.
    assert _times(wide, "0:0F0") == (0, 6)
    assert _times(wide, "0:0OFFLOAD0[b]") == (4, 7)
    # With room for one, the forward stands at 2 until the first has left at 4.
    assert _times(narrow, "0:0F0") == (0, 8)
    assert _times(narrow, "0:0OFFLOAD0[b]") == (4, 7)
    assert wide.busy == narrow.busy == (18,)


def test_a_backward_waits_for_a_copy_and_a_copy_for_room() -> None:
    tensors = {name: Saved(6, made=at, needed=12 - at) for name, at in (("a", 1), ("b", 4))}
    run = simulate(*_one_stage(1, tensors, Link(beta=Fraction(1, 2)), window=6))
    assert _times(run, "0:0OFFLOAD0[b]") == (4, 7)
    assert _times(run, "0:0PREFETCH0[b]") == (7, 10)
    # The backward waits for 1 till all has left, so that b is needed at 6 + 8 + 1; only then is
    # there room for the other, needed at 18.
    assert _times(run, "0:0PREFETCH0[a]") == (15, 18)
    assert _times(run, "0:0B0") == (6, 19)
    slower = simulate(*_one_stage(1, tensors, Link(beta=1), window=6))
    assert _times(slower, "0:0OFFLOAD0[b]") == (7, 13)
    assert _times(slower, "0:0F0") == (0, 9)
    assert _times(slower, "0:0PREFETCH0[b]") == (13, 19)  # needed at 17 + 4
    assert _times(slower, "0:0PREFETCH0[a]") == (21, 27)  # needed at 20 + 4
    assert _times(slower, "0:0B0") == (9, 9 + 12 + 4 + 3)


def test_copies_of_several_visits_share_the_channels_and_the_window() -> None:
    schedule = lower(gpipe(folded(1), 3), offload={0: ["a"]})
    stages = (StageCost(6, 12, tensors={"a": Saved(6, made=6)}),) * 2
    costs = Costs(stages, host=Link(beta=1), window=6)
    run = simulate(schedule, costs)
    outs = [_times(run, f"0:0OFFLOAD{m}[a]") for m in range(3)]
    assert all(end - start == 6 for start, end in outs)
    assert all(end <= start for (_, end), (start, _) in pairwise(outs))
    assert run.host_memory == (18,)


def test_directions_take_turns_where_nothing_leaves_before_a_backward() -> None:
    def turns(order: Schedule, recompute: Sequence[int] = ()) -> list[bool]:
        offload = {stage: ["a"] for stage in range(order.stages)}
        return [take_turns(own) for own in lower(order, recompute, offload=offload).lists]

    assert turns(sequential(3)) == [True]
    assert turns(mp_basic(linear(3), 4)) == [True] * 3
    assert turns(gpipe(linear(2), 3)) == [False, False]
    # The last stage has one microbatch in flight.
    assert turns(one_f_one_b(3, 5)) == [False, False, True]


def test_one_window_serves_directions_that_take_turns() -> None:
    tensors = {"a": Saved(4, made=3, needed=8), "b": Saved(4, made=6, needed=2)}
    stage = StageCost(6, 12, tensors=tensors)
    costs = Costs((stage,), host=Link(beta=1), window=8)
    run = simulate(lower(sequential(1), offload={0: ["a", "b"]}), costs)
    assert _times(run, "0:0OFFLOAD0[b]") == (7, 11)
    # The backward waits till all has left: 5; then for b, needed at 11 + 2 and there at 15.
    assert _times(run, "0:0PREFETCH0[b]") == (11, 15)
    assert _times(run, "0:0B0") == (6, 6 + 12 + 5 + 2)
    assert run.peak_memory == (8,)
    several = simulate(lower(gpipe(linear(1), 2), offload={0: ["a", "b"]}), costs)
    assert several.peak_memory == (16,)


def test_a_recomputation_is_what_saves() -> None:
    schedule = lower(one_f_one_b(2, 3), recompute=[0, 1], offload={0: ["a"]})
    stage = StageCost(6, 12, 10, checkpoint=1, tensors={"a": Saved(4, made=2)})
    run = simulate(schedule, Costs((stage,) * 2, host=Link(beta=1), window=4))
    start, _ = _times(run, "0:0RECOMPUTE1")
    assert _times(run, "0:0OFFLOAD1[a]") == (start + 2, start + 6)


def test_what_cannot_be_copied_is_refused() -> None:
    schedule = lower(sequential(2), offload={0: ["a"]})
    stage = StageCost(1, 2, tensors={"a": Saved(5)})
    with pytest.raises(PathosegError, match=r"a of stage 0 has 5 bytes, and the window .* 0"):
        simulate(schedule, Costs((stage,)))
    with pytest.raises(PathosegError, match=r"the window .* 4"):
        simulate(schedule, Costs((stage,), window=4))
    with pytest.raises(PathosegError, match="stage 0 know no tensor 'a'"):
        simulate(schedule, Costs.equal(1, 1, 2))


ORDERS = [
    sequential(3),
    gpipe(folded(2), 3),
    one_f_one_b(3, 5),
    gems(4, 2, 2),
    bidirectional(3, 4),
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, list[int], Costs]:
    """An order, the stages that are recomputed, and costs of stages that offload."""
    order = draw(st.sampled_from(ORDERS))
    sizes = st.integers(1, 6)
    stages = []
    for _ in range(order.stages):
        forward, backward = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        made = sorted(draw(st.lists(st.integers(0, forward), max_size=3)))
        tensors = {
            f"t{index}": Saved(draw(sizes), at, draw(st.integers(0, backward)))
            for index, at in enumerate(made)
        }
        stages.append(StageCost(forward, backward, draw(sizes), tensors=tensors))
    beta = Fraction(draw(st.integers(0, 12)), draw(st.integers(1, 6)))
    host = Link(Fraction(draw(st.integers(0, 4)), 3), beta)
    costs = Costs(tuple(stages), host=host, window=draw(st.integers(6, 20)))
    recomputed = [stage for stage in range(order.stages) if draw(st.booleans())]
    return order, recomputed, costs


def _run(order: Schedule, recomputed: Sequence[int], costs: Costs) -> Simulation:
    offload = {number: [*stage.tensors] for number, stage in enumerate(costs.stages)}
    return simulate(lower(order, recompute=recomputed, offload=offload), costs)


@pytest.mark.slow
@given(cases())
def test_copies_hasten_nothing_and_cost_no_more_than_a_faster_link_or_a_wider_window(
    case: tuple[Schedule, list[int], Costs],
) -> None:
    order, recomputed, costs = case
    run = _run(order, recomputed, costs)
    without = simulate(lower(order, recompute=recomputed), costs)
    assert run.time >= without.time
    assert run.busy == without.busy
    assert run.peak_activations >= (0,) * order.placement.ranks
    wider = replace(costs, window=costs.window + 3)
    assert _run(order, recomputed, wider).time <= run.time
    for part in ("alpha", "beta"):
        faster = replace(costs.host, **{part: getattr(costs.host, part) / 2})
        assert _run(order, recomputed, replace(costs, host=faster)).time <= run.time
    free = replace(costs, host=Link())
    assert _run(order, recomputed, free).time == without.time


@given(cases())
def test_copies_run_one_at_a_time_within_their_window(
    case: tuple[Schedule, list[int], Costs],
) -> None:
    order, recomputed, costs = case
    run = _run(order, recomputed, costs)
    for rank in range(order.placement.ranks):
        for kind in (Kind.OFFLOAD, Kind.PREFETCH):
            own = sorted(
                (event.start, event.end)
                for event in run.events
                if event.rank == rank and event.action.kind is kind
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(own))
            # The floor: what one direction copies.
            assert run.time >= sum(end - start for start, end in own)
        out, back = (
            {
                (*event.action[1:4], event.action.tensor): event
                for event in run.events
                if event.rank == rank and event.action.kind is kind
            }
            for kind in (Kind.OFFLOAD, Kind.PREFETCH)
        )
        assert out.keys() == back.keys()
        assert all(out[key].end <= back[key].start for key in out)
        # Never more on the host than is copied there in all; what a copy takes time for is there.
        size = {
            key: costs.stages[event.action.stage].tensors[event.action.tensor].bytes
            for key, event in out.items()
        }
        largest = max((size[key] for key in out if out[key].start < back[key].end), default=0)
        assert largest <= run.host_memory[rank] <= sum(size.values())
