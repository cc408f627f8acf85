"""Tests that polishing never makes a timetable longer or impossible, and finds what is near."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.schedule.list_scheduling import list_schedule
from pathoseg.parallel.schedule.local_search import polish
from pathoseg.parallel.schedule.workload import Timetable, Workload

Judge = Callable[[Workload, Timetable], None]


def test_a_polished_timetable_is_no_longer_and_keeps_order_ranks_and_caps(
    works: st.SearchStrategy[Workload], judge: Judge
) -> None:
    @given(works, st.booleans())
    def check(work: Workload, cautious: bool) -> None:
        visits = range(len(work))
        start = list_schedule(work, [float(visit) for visit in visits], cautious, 0)
        polished = polish(work, start, 60)
        judge(work, polished)
        assert polished.end <= start.end

    check()
