"""Tests what lowering adds to an order, and where it puts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded, linear
from pathoseg.parallel.schedule.validate import validate


def _texts(schedule: Schedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.lists[rank]]


def test_one_rank_needs_only_a_step_and_several_groups_a_sum() -> None:
    assert _texts(lower(sequential(1)), 0) == ["0:0F0", "0:0B0", "0:0STEP"]
    grouped = lower(replace(sequential(1), groups=2))
    assert _texts(grouped, 0) == [
        "0:0F0",
        "0:0B0",
        "0:0REDUCE#0",
        "0:0WAIT_REDUCE#0",
        "0:0STEP",
    ]


def test_a_skip_goes_straight_to_its_consumer_after_the_nearer_one() -> None:
    edges = [Edge(0, 3), *chain(4)]
    lowered = lower(mp_basic(linear(4), 1), edges)
    assert _texts(lowered, 0) == [
        "0:0F0",
        "0:0SEND0(0>1)",
        "0:0SEND0(0>3)",
        "0:0RECV0(0>1)",
        "0:0RECV0(0>3)",
        "0:0B0",
        "0:0STEP",
    ]
    assert _texts(lowered, 3)[:3] == ["0:3RECV0(2>3)", "0:3RECV0(0>3)", "0:3F0"]
    assert not any("0>3" in text for rank in (1, 2) for text in _texts(lowered, rank))


def test_a_folded_placement_sends_no_skip_and_nothing_at_the_fold() -> None:
    edges = [*chain(6), *(Edge(stage, 5 - stage) for stage in range(2))]
    lowered = lower(gpipe(folded(3), 2), edges)
    sent = {action.edge for action in lowered if action.kind is Kind.SEND}
    assert sent == set(chain(6)) - {Edge(2, 3)}
    validate(lowered)


def test_recomputation_stands_ahead_of_the_wait_for_the_gradient() -> None:
    texts = _texts(lower(one_f_one_b(3, 4), recompute=range(3)), 0)
    at = texts.index("0:0RECOMPUTE1")
    assert texts[at : at + 3] == ["0:0RECOMPUTE1", "0:0RECV1(0>1)", "0:0B1"]


def test_what_would_be_used_at_once_is_not_recomputed() -> None:
    lowered = lower(one_f_one_b(3, 4), recompute=range(3))
    again = {action.stage for action in lowered if action.kind is Kind.RECOMPUTE}
    assert again == {0, 1}


@pytest.mark.parametrize("order", [one_f_one_b(3, 4), gems(4, 2), gpipe(folded(2), 3)])
def test_tensors_come_back_with_the_visit_ahead_of_their_backward(order: Schedule) -> None:
    lowered = lower(order, offload={stage: ["a", "b"] for stage in range(order.stages)})
    validate(lowered)
    for rank in range(order.placement.ranks):
        texts = _texts(lowered, rank)
        visits = [str(action) for action in order.lists[rank]]
        for index, text in enumerate(visits):
            at, visit = texts.index(text), text.replace("B", "{}").replace("F", "{}")
            if "F" in text:
                moves = [each for each in texts[at:] if "SEND" not in each][1:3]
                assert moves == [visit.format("OFFLOAD") + "[a]", visit.format("OFFLOAD") + "[b]"]
                continue
            back = texts.index(visit.format("PREFETCH") + "[b]")
            assert texts[back + 1] == visit.format("PREFETCH") + "[a]"
            between = [each for each in texts[back:at] if each in visits]
            ahead = visits[index - 1]
            assert between == ([] if ahead == visit.format("F") else [ahead])


def test_what_a_recomputation_saves_leaves_after_it() -> None:
    texts = _texts(lower(one_f_one_b(2, 3), recompute=[0, 1], offload={0: ["a"], 1: ["a"]}), 0)
    at = texts.index("0:0RECOMPUTE1")
    wanted = ["RECOMPUTE1", "OFFLOAD1[a]", "PREFETCH1[a]", "RECV1(0>1)", "B1"]
    assert texts[at : at + 5] == [f"0:0{each}" for each in wanted]
    assert sum("OFFLOAD" in text for text in texts) == 3


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_sums_start_as_soon_as_a_copy_is_done_deepest_stage_first(ranks: int) -> None:
    lowered = lower(gems(ranks, 2), buckets=2)
    for actions in lowered.lists:
        sums = [each for each in actions if each.kind is Kind.REDUCE]
        assert [each.stage for each in sums] == sorted((each.stage for each in sums), reverse=True)
        first = actions.index(sums[0])
        last_backward = max(
            index
            for index, each in enumerate(actions)
            if each.kind is Kind.BACKWARD and each[1:3] == sums[0][1:3]
        )
        assert all(each.kind is Kind.SEND for each in actions[last_backward + 1 : first])


def test_the_middle_rank_adds_the_two_copies_that_it_holds() -> None:
    middle = lower(gems(3)).lists[1]
    assert Action(Kind.REDUCE, 0, 1, bucket=0) in middle
    assert Action(Kind.REDUCE, 1, 1, bucket=0) in middle
