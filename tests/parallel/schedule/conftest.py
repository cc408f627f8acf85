"""Random workloads, and a judge of their timetables: for list scheduling and polishing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from pathoseg.parallel.schedule.workload import Route, Timetable, Workload

Judge = Callable[[Workload, Timetable], None]


@pytest.fixture(scope="session")
def works() -> st.SearchStrategy[Workload]:
    """Workloads of two mirrored replicas in which every microbatch alone keeps to the caps."""
    return _works()


@st.composite
def _works(draw: st.DrawFn) -> Workload:
    stages = draw(st.integers(1, 4))
    numbers = st.integers(0, 5)
    of_stages = st.lists(numbers, min_size=stages, max_size=stages).map(tuple)
    times, back = draw(of_stages), draw(of_stages)
    held = draw(of_stages)
    extra = draw(of_stages) + draw(of_stages)
    visits = 2 * stages
    delay = draw(st.integers(0, 2))
    before = tuple(((visit - 1, delay),) if visit else () for visit in range(visits))
    after = tuple(((visit + 1, delay),) if visit + 1 < visits else () for visit in range(visits))
    folded = draw(st.booleans())
    ranks = -(-stages // 2) if folded else stages
    home = tuple(min(stage, stages - 1 - stage) if folded else stage for stage in range(stages))
    homes = [home] if folded else [home, tuple(reversed(home))]
    alone = max(
        sum(held[stage] for stage in range(stages) if home[stage] == rank)
        + max(extra[stage] for stage in (*range(visits),) if (home + home[::-1])[stage] == rank)
        for home in homes
        for rank in range(ranks)
    )
    replicas = st.integers(0, len(homes) - 1)
    return Workload(
        tuple(Route(home + home[::-1], before, after) for home in homes),
        tuple(draw(st.lists(replicas, min_size=1, max_size=5))),
        times + back,
        held,
        extra,
        (alone + draw(st.integers(0, 10)),) * ranks,
    )


@pytest.fixture(scope="session")
def judge() -> Judge:
    """Fails where a timetable breaks an order, has a rank do two things, exceeds a cap, or ends
    before what is said to be the earliest end."""
    return _judge


def _judge(work: Workload, timetable: Timetable) -> None:
    starts = timetable.starts
    ends = [start + time for start, time in zip(starts, work.durations, strict=True)]
    assert timetable.end == max(ends)
    assert not work.none_ends_before(timetable.end + 1)
    for visit, start in enumerate(starts):
        assert all(ends[earlier] + delay <= start for earlier, delay in work.before[visit])
    for rank, cap in enumerate(work.caps):
        clock: float = 0
        used = 0
        for visit in timetable.order:
            if work.homes[visit] == rank:
                assert starts[visit] >= clock
                clock = ends[visit]
                used += work.taken[visit]
                assert used + work.extra[visit % work.length] <= cap
                used -= work.freed[visit]
        assert used == 0
