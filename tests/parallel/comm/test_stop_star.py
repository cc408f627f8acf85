"""Ranks that are told of a stop, agree to leave, and hand their state to rank 0."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import stop_star
from pathoseg.parallel.comm.stop_star import StopStar

Result = TypeVar("Result")


@contextmanager
def _stars(ranks: int) -> Iterator[list[StopStar]]:
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    ends = {rank: ours for rank, (ours, _) in enumerate(pairs, 1)}
    with ExitStack() as stack:
        stars = [StopStar(ends), *(StopStar({0: theirs}) for _, theirs in pairs)]
        for star in stars:
            stack.enter_context(closing(star))
        yield stars


def _together(stars: Sequence[StopStar], call: Callable[[int, StopStar], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(stars)) as pool:
        return [*pool.map(call, range(len(stars)), stars)]


@settings(max_examples=20)
@given(st.data())
def test_ranks_leave_in_the_first_round_in_which_all_are_ready(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    rounds = data.draw(st.lists(st.tuples(*[st.booleans()] * ranks), max_size=4))
    told = data.draw(st.sets(st.integers(0, ranks - 1)), "ranks that a signal came to")
    rounds.append((True,) * ranks)
    expected = next(at for at, ready in enumerate(rounds) if all(ready))
    parts = [bytes([rank]) * 3 * 10**rank for rank in range(ranks)]

    def body(rank: int, star: StopStar) -> tuple[int, list[bytes]]:
        if rank in told:
            star.tell(15)
        at = 0
        while not star.agree(rounds[at][rank]):
            at += 1
        if rank:
            with pytest.raises(PathosegError, match="cannot save"):
                star.gather(parts[rank])
            return at, []
        found = star.gather(parts[rank])
        star.go_on()
        return at, found

    with _stars(ranks) as stars:
        found = _together(stars, body)
    assert {at for at, _ in found} == {expected}
    assert found[0][1] == parts


def test_a_signal_reaches_all_and_the_end_of_rank_0_lets_others_end() -> None:
    with _stars(3) as stars:
        stars[2].tell(15)
        assert stars[0].hear(stars[0].connections[1]) == 15
        stars[0].tell(15)
        assert stars[1].hear(stars[1].connections[0]) == 15
        assert _together(stars, lambda _, star: star.agree(ready=True)) == [True] * 3

        def end(rank: int, star: StopStar) -> list[bytes]:
            found = star.gather(b"part")
            if rank == 0:
                star.close()
            return found

        assert _together(stars, end) == [[b"part"] * 3, [], []]


def test_a_rank_that_has_ended_ends_the_agreement() -> None:
    with _stars(3) as stars:
        stars[1].close()

        def agreed(_: int, star: StopStar) -> bool | None:
            with closing(star):
                return star.agree(ready=True)

        assert _together(stars[::2], agreed) == [None, None]


def test_a_rank_that_ends_within_its_part_is_an_error() -> None:
    with _stars(2) as (first, second):
        second.connections[0].sendall(b"\x09\0\0\0\0\0\0\0part")
        second.close()
        with pytest.raises(PathosegError, match="A rank has ended"):
            first.gather(b"")


def test_a_rank_that_says_nothing_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_star, "_ANSWER", 0.1)
    with _stars(2) as (first, _):
        assert first.agree(ready=True) is None
