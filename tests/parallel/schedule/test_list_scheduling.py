"""Tests that every timetable of the list scheduler can be kept, in time and against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.schedule.list_scheduling import Route, Step, Timetable, list_schedule

Judge = Callable[[Step, Timetable], None]


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("patience", [0, 0.5, 1])
def test_any_priority_gives_a_timetable_that_keeps_order_ranks_and_caps(
    steps: st.SearchStrategy[Step], judge: Judge, cautious: bool, patience: float
) -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        step = data.draw(steps)
        visits = step.visits * len(step.replica_of)
        floats = st.floats(0, 1)
        priority = data.draw(st.lists(floats, min_size=visits, max_size=visits))
        judge(step, list_schedule(step, priority, cautious, patience))
        mirror = step.mirrored()
        back = list_schedule(mirror, priority, cautious, patience)
        judge(mirror, back)
        judge(step, back.mirrored(mirror))

    check()


def test_a_mirror_image_of_a_mirror_image_is_the_original(
    steps: st.SearchStrategy[Step],
) -> None:
    @given(steps)
    def check(step: Step) -> None:
        assert step.mirrored().mirrored() == step

    check()


def test_a_patient_rank_waits_for_the_better_visit_that_is_on_its_way() -> None:
    """At 1 the rank could start the second forward; the first backward arrives at 2."""
    route = Route((0, 0), ((), ((0, 1),)), (((1, 1),), ()))
    step = Step((route,), (0, 0), (1, 4), (1,), (0, 0), (2,))
    backward_first = [1.0, 0.0, 1.0, 0.0]
    assert list_schedule(step, backward_first, False, patience=0).starts == [0, 2, 1, 6]
    long_forward = Step((route,), (0, 0), (3, 1), (1,), (0, 0), (2,))
    assert list_schedule(long_forward, backward_first, False, patience=0).starts == [0, 6, 3, 7]
    assert list_schedule(long_forward, backward_first, False, patience=1).starts == [0, 4, 5, 9]
