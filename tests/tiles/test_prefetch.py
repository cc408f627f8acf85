"""Working ahead: same order and errors as plain iteration, bounded, no thread left."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from pathoseg.tiles.prefetch import in_background, prefetch_map


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_are_bounded(threads: int) -> None:
    started: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        time.sleep(0.001 * (item % 3))
        return item * item

    results = prefetch_map(work, itertools.count(), threads)
    assert list(itertools.islice(results, 20)) == [i * i for i in range(20)]
    results.close()
    assert max(started) <= 20 + 2 * threads + 1


def test_an_error_is_raised_where_its_result_is_due() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise ValueError("third")
        return item

    results = prefetch_map(work, range(9), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="third"):
        next(results)


def _numbers(closed: list[bool], fail_at: int | None = None) -> Iterator[int]:
    try:
        for i in itertools.count():
            if i == fail_at:
                raise ValueError("in the background")
            yield i
    finally:
        closed.append(True)


def test_the_background_ends_when_its_consumer_does() -> None:
    before, closed = threading.active_count(), list[bool]()
    items = in_background(_numbers(closed), 2)
    assert list(itertools.islice(items, 5)) == [0, 1, 2, 3, 4]
    items.close()
    assert closed == [True]
    assert threading.active_count() == before


def test_an_error_in_the_background_reaches_the_consumer() -> None:
    closed = list[bool]()
    items = in_background(_numbers(closed, fail_at=2), 4)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="in the background"):
        next(items)
    assert closed == [True]


def test_an_empty_source_ends() -> None:
    assert list(in_background(iter(()), 1)) == []
