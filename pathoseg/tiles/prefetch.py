"""Work done ahead of its use: by many threads in order, or by one thread in the background."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch_map(work: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R]:
    """Map `work` over `items` by threads, and yield the results in order.

    At most twice `threads` results are ahead of the consumer. An error of `work` is raised where
    its result is due; closing the iterator ends the threads.
    """
    pending: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_background(source: Iterator[T], ahead: int) -> Generator[T]:
    """Yield the items of `source`, which a thread runs up to `ahead` items before the consumer.

    An error of `source` is raised here; closing this iterator closes `source`.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(ahead)
    closed = threading.Event()

    def offer(item: T | None, error: BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in source:
                if not offer(item, None):
                    break
            offer(None, StopIteration())
        except BaseException as error:  # handed to the consumer, who raises it
            offer(None, error)
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item without error is a T
    finally:
        closed.set()
        worker.join()
