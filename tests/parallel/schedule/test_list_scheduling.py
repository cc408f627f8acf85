"""Tests that every timetable of the list scheduler can be kept, in time and against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.schedule.list_scheduling import list_schedule
from pathoseg.parallel.schedule.workload import Route, Timetable, Workload

Judge = Callable[[Workload, Timetable], None]


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("patience", [0, 0.5, 1])
def test_any_priority_gives_a_timetable_that_keeps_order_ranks_and_caps(
    works: st.SearchStrategy[Workload], judge: Judge, cautious: bool, patience: float
) -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        work = data.draw(works)
        visits = len(work)
        floats = st.floats(0, 1)
        priority = data.draw(st.lists(floats, min_size=visits, max_size=visits))
        judge(work, list_schedule(work, priority, cautious, patience))
        mirror = work.mirrored
        back = list_schedule(mirror, priority, cautious, patience)
        judge(mirror, back)
        judge(work, back.mirrored(mirror))

    check()


def test_a_mirror_image_of_a_mirror_image_is_the_original(
    works: st.SearchStrategy[Workload],
) -> None:
    @given(works)
    def check(work: Workload) -> None:
        assert work.mirrored.mirrored == work

    check()


def test_a_patient_rank_waits_for_the_better_visit_that_is_on_its_way() -> None:
    """At 1 the rank could start the second forward; the first backward arrives at 2."""
    route = Route((0, 0), ((), ((0, 1),)), (((1, 1),), ()))
    work = Workload((route,), (0, 0), (1, 4), (1,), (0, 0), (2,))
    backward_first = [1.0, 0.0, 1.0, 0.0]
    assert list_schedule(work, backward_first, False, patience=0).starts == [0, 2, 1, 6]
    long_forward = Workload((route,), (0, 0), (3, 1), (1,), (0, 0), (2,))
    assert list_schedule(long_forward, backward_first, False, patience=0).starts == [0, 6, 3, 7]
    assert list_schedule(long_forward, backward_first, False, patience=1).starts == [0, 4, 5, 9]
