"""Ranks as threads of one process: the transport of the tests, which knows when all are stuck."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from pathoseg.errors import PathosegError

Result = TypeVar("Result")
_Route = tuple[int, int, int]  # sender, receiver, tag


def run_ranks(ranks: int, body: Callable[[ThreadTransport], Result]) -> list[Result]:
    """Runs `body` once for each rank, each in a thread of its own; what they returned, by rank.

    Raises:
        Exception: What the first rank to fail raised; all others have ended by then.
    """
    hub = _Hub(ranks)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = ThreadTransport(hub, rank)
        try:
            results[rank] = body(transport)
        except BaseException as error:
            errors.append(error)
            transport.abort(f"Rank {rank} failed: {error}")
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]


class ThreadTransport:
    """One rank's end of a hub."""

    reads = frozenset({"cuda"})

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.rank = rank
        self.ranks = hub.ranks
        self._hub = hub
        self._sums: dict[tuple[int, ...], int] = defaultdict(int)

    def prepare(self, peers: Collection[int], groups: Collection[tuple[int, ...]]) -> None:
        assert self.rank not in peers
        assert all(self.rank in group for group in groups)

    def send(self, tensor: Tensor, to: int, tag: int) -> ThreadPending:
        what = f"rank {to} to take message {tag}"
        return self._hub.offer(
            (self.rank, to, tag), ThreadPending(self._hub, self.rank, what), tensor
        )

    def receive(self, into: Tensor, source: int, tag: int) -> ThreadPending:
        what = f"message {tag} of rank {source}"
        return self._hub.ask(
            (source, self.rank, tag), ThreadPending(self._hub, self.rank, what), into
        )

    def sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> ThreadPending:
        self._sums[ranks] += 1
        pending = ThreadPending(self._hub, self.rank, f"the sum over ranks {ranks}")
        return self._hub.join((self._sums[ranks], *ranks), pending, tensor)

    def gather(self, text: str) -> list[str]:
        pending = ThreadPending(self._hub, self.rank, "all ranks")
        found = self._hub.tell(pending, text)
        pending.wait()
        return [found[rank] for rank in range(self.ranks)]

    def barrier(self) -> None:
        self.gather("")

    def abort(self, reason: str, fits: int | None = None) -> None:
        self._hub.abort(reason)

    def close(self) -> None:
        self._hub.leave(self.rank)


@dataclass(eq=False)
class ThreadPending:
    """Done once another thread has said so.

    Attributes:
        hub: Where the rank waits.
        rank: Whose it is.
        what: What the rank waits for.
        finished: Whether it is done.
        problem: Why it failed, or None.
    """

    hub: _Hub
    rank: int
    what: str
    finished: bool = False
    problem: str | None = None

    def done(self) -> bool:
        with self.hub.changed:
            self.hub.check(self)
            return self.finished

    def wait(self) -> None:
        self.hub.wait(self)


@dataclass
class _Gathering:
    texts: dict[int, str] = field(default_factory=dict)
    pending: list[ThreadPending] = field(default_factory=list)


class _Hub:
    """The state that threads share: messages, sums, texts, and the ranks that wait or have left.

    The lock of `changed` guards it: methods take it, or are called by those that hold it.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.changed = threading.Condition()
        self._reason: str | None = None
        self._offered: dict[_Route, deque[tuple[ThreadPending, Tensor]]] = defaultdict(deque)
        self._asked: dict[_Route, deque[tuple[ThreadPending, Tensor]]] = defaultdict(deque)
        self._sums: dict[tuple[int, ...], dict[int, tuple[ThreadPending, Tensor]]] = {}
        self._gathering = _Gathering()
        self._waiting: dict[int, ThreadPending] = {}
        self._left: set[int] = set()

    def offer(self, route: _Route, pending: ThreadPending, tensor: Tensor) -> ThreadPending:
        with self.changed:
            self.check(pending)
            self._offered[route].append((pending, tensor))
            self._match(route)
        return pending

    def ask(self, route: _Route, pending: ThreadPending, into: Tensor) -> ThreadPending:
        with self.changed:
            self.check(pending)
            self._asked[route].append((pending, into))
            self._match(route)
        return pending

    def _match(self, route: _Route) -> None:
        offered, asked = self._offered[route], self._asked[route]
        if offered and asked:
            (sent, tensor), (received, into) = offered.popleft(), asked.popleft()
            if (tensor.shape, tensor.dtype) == (into.shape, into.dtype):
                into.copy_(tensor)
            else:
                received.problem = (
                    f"Rank {route[0]} sent {tensor.dtype} {tuple(tensor.shape)} where rank "
                    f"{route[1]} expected {into.dtype} {tuple(into.shape)}."
                )
            self._finish(sent, received)

    def join(self, key: tuple[int, ...], pending: ThreadPending, tensor: Tensor) -> ThreadPending:
        with self.changed:
            self.check(pending)
            joined = self._sums.setdefault(key, {})
            joined[pending.rank] = (pending, tensor)
            if len(joined) == len(key) - 1:
                first, *others = (joined[rank][1] for rank in key[1:])
                total = first.clone()
                for other in others:
                    total += other
                for _, each in joined.values():
                    each.copy_(total)
                self._finish(*(each for each, _ in joined.values()))
                del self._sums[key]
        return pending

    def tell(self, pending: ThreadPending, text: str) -> dict[int, str]:
        with self.changed:
            self.check(pending)
            gathering = self._gathering
            gathering.texts[pending.rank] = text
            gathering.pending.append(pending)
            if len(gathering.pending) == self.ranks:
                self._gathering = _Gathering()
                self._finish(*gathering.pending)
            return gathering.texts

    def wait(self, pending: ThreadPending) -> None:
        with self.changed:
            self._waiting[pending.rank] = pending
            self._look_for_stuck()
            self.changed.wait_for(lambda: pending.finished or self._reason is not None)
            del self._waiting[pending.rank]
            self.check(pending)

    def check(self, pending: ThreadPending) -> None:
        """Raises where this can never be done."""
        problem = pending.problem or (None if pending.finished else self._reason)
        if problem is not None:
            raise PathosegError(problem, "Correct what that rank reports and start again.")

    def abort(self, reason: str) -> None:
        with self.changed:
            self._reason = self._reason or reason
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        with self.changed:
            self._left.add(rank)
            self._look_for_stuck()

    def _finish(self, *pending: ThreadPending) -> None:
        for each in pending:
            each.finished = True
        self.changed.notify_all()

    def _look_for_stuck(self) -> None:
        """Ends all ranks where each waits, or is gone, and none can go on."""
        waiting = [each for each in self._waiting.values() if not each.finished]
        if waiting and len(waiting) + len(self._left) == self.ranks:
            told = (f"rank {each.rank} waits for {each.what}" for each in waiting)
            self.abort(f"All ranks are stuck: {'; '.join(sorted(told))}.")
