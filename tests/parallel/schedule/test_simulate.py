"""Tests the simulator against small steps worked out by hand, and against itself in groups."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import COMPUTE, Action, Edge, Kind, chain
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, Link, Nodes, StageCost, Teams
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded, linear
from pathoseg.parallel.schedule.simulate import Simulation, simulate, step_memory

ORDERS = [
    gpipe(linear(4), 5),
    gpipe(folded(2), 3),
    one_f_one_b(4, 6),
    gems(4, 2, 2),
    bidirectional(4, 6),
]


def _times(run: Simulation, text: str) -> tuple[float, float]:
    [event] = [event for event in run.events if str(event.action) == text]
    return event.start, event.end


def test_a_message_takes_latency_and_transfer_and_the_sender_goes_on() -> None:
    costs = Costs((StageCost(2, 4),) * 2, {Edge(0, 1): 10}, Link(alpha=1, beta=Fraction(1, 2)))
    run = simulate(lower(gpipe(linear(2), 2)), costs)
    assert _times(run, "0:0F1") == (2, 4)
    assert _times(run, "0:0SEND0(0>1)") == (2, 7)
    assert _times(run, "0:1RECV0(0>1)") == (0, 8)
    # The second message waits until the first has left.
    assert _times(run, "0:0SEND1(0>1)") == (7, 12)
    assert _times(run, "0:1F1") == (13, 15)
    assert _times(run, "0:0B0") == (25, 29)
    assert _times(run, "0:0B1") == (30, 34)
    assert run.bytes_sent == (20, 20)
    assert run.busy == (12, 12)
    assert run.bubble == pytest.approx(1 - 24 / 68)


def test_boundary_tensors_are_held_from_posting_to_use_and_at_the_sender_till_they_left() -> None:
    costs = Costs((StageCost(2, 4),) * 2, {Edge(0, 1): 10}, Link(alpha=0, beta=Fraction(1, 2)))
    run = simulate(lower(gpipe(linear(2), 2)), costs)
    # Rank 0: the outputs are made by 2 and 4, and leave 2…7 and 7…12; from 2 on, the second
    # forward, there is room for the gradient of the first.
    # Rank 1: there is room for the inputs from 0 and 7; they are used up at 18 and 22, when the
    # gradients appear.
    assert run.peak_memory == (30, 20)
    assert run.peak_activations == (0, 0)
    free = simulate(lower(mp_basic(linear(2), 2)), costs)
    assert free.peak_memory == (20, 20)


def test_a_skip_that_stays_on_its_rank_is_held_and_not_sent() -> None:
    edges = [*chain(4), Edge(0, 3)]
    sizes = {**dict.fromkeys(chain(4), 1), Edge(0, 3): 100}
    stages = (StageCost(1, 2),) * 4
    near = simulate(lower(mp_basic(folded(2), 1), edges), Costs(stages, sizes))
    far = simulate(lower(mp_basic(linear(4), 1), edges), Costs(stages, sizes))
    assert near.bytes_sent == (2, 2)
    assert far.bytes_sent == (101, 2, 2, 101)
    assert near.peak_memory[0] >= 100 > near.peak_memory[1]


def test_weights_of_every_copy_and_the_workspace_of_one_visit_are_held() -> None:
    stage = StageCost(1, 2, 10, weights=1000, forward_workspace=5, backward_workspace=7)
    # Both replicas of the middle stage are on one rank, which has its parameters once.
    assert simulate(gems(3, 2), Costs((stage,) * 3)).peak_memory == (2017, 1017, 2017)
    assert simulate(gpipe(linear(3), 2), Costs((stage,) * 3)).peak_memory == (1027,) * 3


def test_a_frozen_encoder_is_sent_no_gradients() -> None:
    link, sizes = Link(alpha=1, beta=Fraction(1, 2)), {Edge(0, 1): 10}
    stages = (StageCost(2, 0), StageCost(2, 4))
    order = lower(gpipe(linear(2), 2))
    both = simulate(order, Costs(stages, sizes, link))
    one = simulate(order, Costs(stages, sizes, link, one_way={Edge(0, 1)}))
    assert both.bytes_sent == (20, 20)
    assert one.bytes_sent == (20, 0)
    assert one.time < both.time
    _, done = _times(one, "0:1B0")
    assert _times(one, "0:0B0") == (done, done)
    assert one.peak_memory[0] < both.peak_memory[0]


def test_recomputation_holds_the_checkpoint_until_it_runs() -> None:
    stage = StageCost(1, 2, activations=10, checkpoint=1, recompute=5)
    kept = simulate(lower(gpipe(linear(2), 4)), Costs((stage,) * 2))
    again = simulate(lower(gpipe(linear(2), 4), recompute=[0, 1]), Costs((stage,) * 2))
    assert kept.peak_activations == (40, 40)
    assert again.peak_activations == (13, 13)
    assert again.busy == (4 * 8, 4 * 8)


def test_a_deadlock_is_named() -> None:
    order = gpipe(linear(2), 1)
    stuck = replace(order, lists=(order.lists[0], order.lists[1][::-1]))
    with pytest.raises(PathosegError, match="rank 0 waits at 0:0B0 for 0:1B0 of rank 1; rank 1"):
        simulate(stuck, Costs.equal(2, 1, 2))


def test_a_sum_starts_with_its_last_copy_and_sums_of_a_rank_run_in_turn() -> None:
    stages = tuple(StageCost(1, 2, gradients=size, step=3) for size in (60, 120))
    run = simulate(lower(gems(2)), Costs(stages, network=Link(alpha=1, beta=Fraction(1, 10))))
    # Both ranks hold both stages. Their visits end at 8 and 11 on rank 0, at 5 and 14 on rank 1.
    assert (_times(run, "0:0B0")[1], _times(run, "1:1B1")[1]) == (8, 11)
    assert (_times(run, "0:1B0")[1], _times(run, "1:0B1")[1]) == (5, 14)
    # Stage 1 goes first: 2 α + 120 β from 11 on; then stage 0.
    assert _times(run, "0:1REDUCE#0") == _times(run, "1:1REDUCE#0") == (11, 11 + 2 + 12)
    assert _times(run, "0:0REDUCE#0") == _times(run, "1:0REDUCE#0") == (25, 25 + 2 + 6)
    assert _times(run, "1:1STEP") == (25, 28)
    assert run.time == 33 + 3


@given(shards=st.integers(2, 5), groups=st.integers(1, 4), size=st.integers(1, 200))
def test_the_gradients_of_strips_are_summed_over_all_ranks_that_share_tiles(
    shards: int, groups: int, size: int
) -> None:
    """Groups of whole tiles sum at a REDUCE; of one group the strips alone, at the STEP."""
    link = Link(alpha=1, beta=Fraction(1, 10))
    stage = StageCost(3, 5, 7, gradients=size, step=2)
    schedule = lower(replace(sequential(4), groups=groups))
    costs = Costs((stage,), network=Teams(Nodes(64, link, Link()), shards), shards=shards)
    run = simulate(schedule, costs)
    assert run.time == 4 * (3 + 5) + link.all_reduce(range(shards * groups), size) + 2
    assert step_memory(schedule, costs) == (size,)
    assert run.peak_memory == (max(7, size),)


def test_data_parallelism_is_one_rank_and_a_sum() -> None:
    stage = StageCost(3, 5, 7, gradients=100, step=2)
    schedule = lower(replace(sequential(4), groups=10), buckets=4)
    run = simulate(schedule, Costs((stage,), network=Link(alpha=1, beta=Fraction(1, 10))))
    ring = 18 * 1 + Fraction(18 * 25, 10) * Fraction(1, 10)
    assert run.time == 4 * (3 + 5) + 4 * ring + 2


@given(
    activations=st.integers(0, 30),
    gradients=st.integers(0, 60),
    update=st.integers(0, 60),
    buckets=st.integers(1, 4),
    groups=st.integers(1, 3),
)
def test_sums_and_the_optimizer_take_memory_when_activations_are_gone(
    activations: int, gradients: int, update: int, buckets: int, groups: int
) -> None:
    stage = StageCost(
        3, 5, activations, 100, gradients, backward_workspace=7, update_workspace=update
    )
    schedule = lower(replace(sequential(4), groups=groups), buckets=buckets)
    ends = max(update, (groups > 1) * (gradients // buckets))
    costs = Costs((stage,))
    assert simulate(schedule, costs).peak_memory == (100 + max(activations + 7, ends),)
    assert step_memory(schedule, costs) == (100 + ends,)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_group_stands_for_all_of_them(order: Schedule, groups: int) -> None:
    stages = tuple(StageCost(2 + s, 3 + s, 10 + s, 100, 50, step=1) for s in range(order.stages))
    sizes = dict.fromkeys(order.edges, 4)
    costs = Costs(stages, sizes, Link(alpha=Fraction(1, 7), beta=Fraction(1, 5)))
    one = lower(replace(order, groups=groups))
    run, whole = simulate(one, costs), simulate(one.expanded(), costs)
    assert whole.time == run.time
    for name in ("busy", "peak_memory", "peak_activations", "bytes_sent"):
        assert getattr(whole, name) == getattr(run, name) * groups
    assert whole.bubble == pytest.approx(run.bubble)


@given(
    order=st.sampled_from(ORDERS),
    data=st.data(),
    alpha=st.integers(0, 3),
    beta=st.integers(0, 3),
)
def test_a_rank_does_one_thing_at_a_time_and_slower_parts_never_hasten_a_step(
    order: Schedule, data: st.DataObject, alpha: int, beta: int
) -> None:
    times = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
    drawn = data.draw(st.lists(times, min_size=order.stages, max_size=order.stages))
    costs = Costs(
        tuple(StageCost(*each) for each in drawn), dict.fromkeys(order.edges, 2), Link(alpha, beta)
    )
    schedule = lower(order)
    run = simulate(schedule, costs)
    assert len(run.events) == sum(map(len, schedule.lists))
    for rank in range(order.placement.ranks):
        own = sorted(
            (event.start, event.end)
            for event in run.events
            if event.rank == rank and event.action.kind in COMPUTE
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
        assert run.busy[rank] == sum(end - start for start, end in own)
    assert simulate(schedule, replace(costs, network=Link(alpha + 1, beta))).time >= run.time
    assert simulate(schedule, replace(costs, network=Link())).time <= run.time


def test_ranks_of_a_node_share_the_links_to_other_nodes_when_they_sum() -> None:
    inside, between = Link(1, Fraction(1, 100)), Link(10, Fraction(1, 10))
    nodes = Nodes(4, inside, between)
    assert nodes.transfer(0, 3, 100) == 1
    assert nodes.transfer(3, 4, 100) == 10
    assert (nodes.latency(0, 3), nodes.latency(3, 4)) == (1, 10)
    assert nodes.all_reduce([0, 1, 2, 3], 100) == inside.all_reduce(range(4), 100)
    # One rank of each of two nodes, while its three neighbours sum theirs over the same link.
    assert nodes.all_reduce([0, 4], 100) == 2 * 10 + Fraction(2 * 100, 2) * Fraction(1, 10) * 4
    whole = nodes.all_reduce(range(8), 100)
    assert whole == inside.all_reduce(range(4), 100) + between.all_reduce(range(2), 100)
    assert nodes.all_reduce([5], 100) == 0


def test_a_step_without_actions_takes_no_time() -> None:
    empty = Schedule("", linear(1), (), (), ((),))
    assert simulate(empty, Costs.equal(1, 1, 2)).bubble == 0


def test_events_of_both_runs_can_be_told_apart_by_their_action_alone() -> None:
    run = simulate(lower(gems(4, 2, 2)), Costs.equal(4, 1, 2))
    assert len({event.action for event in run.events}) == len(run.events)
    assert Action(Kind.STEP, 0, 0) in {event.action for event in run.events}
