"""Tests that polishing never makes a timetable longer or impossible, and finds what is near."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pathoseg.parallel.schedule.list_scheduling import Step, Timetable, list_schedule
from pathoseg.parallel.schedule.polish import polish

Judge = Callable[[Step, Timetable], None]


def test_a_polished_timetable_is_no_longer_and_keeps_order_ranks_and_caps(
    steps: st.SearchStrategy[Step], judge: Judge
) -> None:
    @given(steps, st.booleans())
    def check(step: Step, cautious: bool) -> None:
        visits = range(step.visits * len(step.replica_of))
        start = list_schedule(step, [float(visit) for visit in visits], cautious, 0)
        polished = polish(step, start, 60)
        judge(step, polished)
        assert polished.end <= start.end

    check()
