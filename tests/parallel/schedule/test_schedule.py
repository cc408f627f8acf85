"""Tests that a schedule reads back as it was written, and what its groups stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Edge, Kind
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded
from pathoseg.parallel.schedule.validate import validate

SCHEDULES = [
    sequential(3),
    gpipe(folded(2), 3),
    lower(gems(3, 2, 2)),
    lower(replace(bidirectional(4, 6), groups=3), buckets=2),
    lower(
        one_f_one_b(3, 5),
        [Edge(0, 1), Edge(1, 2), Edge(0, 2), Edge(0, 2, 1)],
        recompute=[1],
        offload={0: ["a.0", "b"]},
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.name)
def test_a_schedule_reads_back_as_it_was_written(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ranks 3", "ranks three", "no list of numbers"),
        ("ranks 3", "", "no line 'ranks'"),
        ("groups 1", "groups", "no line 'groups', or nothing in it"),
        ("rank 1:", "rank 7:", "'rank 7: .* unknown or out of turn"),
        ("replica 0", "replica 1", "'replica 1 on 0 1 2' unknown or out of turn"),
        ("edges 0>1", "edges 0<1", "is no edge"),
        ("0:0F0", "0:0F", "is no action"),
        ("microbatches 0", "microbatches -1", "no list of numbers"),
    ],
)
def test_text_that_is_no_schedule_is_refused(old: str, new: str, problem: str) -> None:
    text = str(lower(gems(3)))
    assert old in text
    with pytest.raises(PathosegError, match=problem):
        Schedule.parse(text.replace(old, new))


def test_groups_written_out_are_whole_schedules_of_their_own() -> None:
    one = lower(replace(gems(3, 1, 2), groups=4))
    whole = one.expanded()
    assert (one.ranks, one.microbatches) == (12, 16) == (whole.ranks, whole.microbatches)
    validate(one)
    validate(whole)
    assert lower(replace(gems(3, 1, 2), groups=4).expanded()) == whole


def test_stages_are_summed_over_every_rank_and_group_that_holds_them() -> None:
    whole = lower(replace(gems(3), groups=4)).expanded()
    for stage in range(3):
        copies = [each for each in whole if each.kind is Kind.REDUCE and each.stage == stage]
        assert len(copies) == 2 * 4
        assert whole.placement.holders(stage) == [
            rank for rank in range(12) if rank % 3 in (stage, 2 - stage)
        ]
