"""A pool of open slides for threads: few are open, and none serves two threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock, RLock

from pathoseg.slides.slide import Slide, is_picture


class SlidePool:
    """Open slides that wait for the next reader.

    A plain picture, which is held whole, has one reader at a time, so that it is decoded once.

    Args:
        open_slide: Opens a slide's file.
        idle: Slides kept open while nobody reads them; each holds a decoder's cache.
    """

    def __init__(self, open_slide: Callable[[Path], Slide], idle: int = 32) -> None:
        self._open, self._most = open_slide, idle
        self._idle: list[Slide] = []  # the one used last at the end
        self._turns: dict[Path, AbstractContextManager[object]] = {}
        self._lock = Lock()

    @contextmanager
    def borrow(self, path: Path) -> Iterator[Slide]:
        """Make a context with an open slide that nobody else reads meanwhile.

        Raises:
            PathosegError: The slide cannot be opened.
        """
        with self._turn(path):
            with self._lock:
                found = next((slide for slide in reversed(self._idle) if slide.path == path), None)
                if found is not None:
                    self._idle.remove(found)
            slide = found or self._open(path)
            try:
                yield slide
            except BaseException:
                slide.close()
                raise
            with self._lock:
                self._idle.append(slide)
                surplus = self._idle[: -self._most]
                del self._idle[: -self._most]
            for old in surplus:
                old.close()

    def _turn(self, path: Path) -> AbstractContextManager[object]:
        with self._lock:
            if path not in self._turns:
                self._turns[path] = RLock() if is_picture(path) else nullcontext()
            return self._turns[path]

    def close(self) -> None:
        """Close the slides that nobody reads now."""
        with self._lock:
            slides, self._idle = self._idle, []
        for slide in slides:
            slide.close()
