"""A pool of open slides for threads: few are open, and none serves two threads at once."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock, RLock
from typing import NamedTuple

from pathoseg.slides.slide import Slide

# Decoded pixels that idle slides keep together, beside those of one: 64 pictures of 1,000², 3 or 4
# bytes a pixel.
_MOST_HELD = 64_000_000


class _Header(NamedTuple):
    """A slide that is closed, of which copies are lent; and its file's state then."""

    slide: Slide
    state: tuple[int, ...]


class SlidePool:
    """Open slides that wait for the next reader.

    A slide that is decoded whole (`Slide.held_pixels`) has one reader at a time, so that it is
    decoded once.

    Args:
        open_slide: Opens a slide's file.
        idle: Slides kept open while nobody reads them; each holds a decoder's cache.
        known: Slides whose headers and tables of tiles are kept, up to 3 MB each. A TIFF of 390 ×
            390 tiles is open again in 0.4 ms instead of 110.
    """

    def __init__(
        self, open_slide: Callable[[Path], Slide], idle: int = 32, known: int = 256
    ) -> None:
        self._open, self._most_idle, self._most_known = open_slide, idle, known
        self._idle: list[Slide] = []  # the one used last at the end
        self._known = OrderedDict[Path, _Header]()  # likewise
        self._turns: dict[Path, RLock] = {}
        self._lock = Lock()

    @contextmanager
    def borrow(self, path: Path) -> Iterator[Slide]:
        """Make a context with an open slide that nobody else reads meanwhile.

        Raises:
            PathosegError: The slide cannot be opened.
        """
        with self._lock:
            turn = self._turns.setdefault(path, RLock())
        with ExitStack() as turns:
            turns.enter_context(turn)  # also to open a file: only then it is known what it holds
            slide = self._take(path)
            if not slide.held_pixels:
                turns.close()
            try:
                yield slide
            except BaseException:
                slide.close()
                raise
            with self._lock:
                self._idle.append(slide)
                surplus = self._surplus()
            for old in surplus:
                old.close()

    def _take(self, path: Path) -> Slide:
        """Return an idle slide, else a copy of one that was opened before, else open the file."""
        with self._lock:
            found = next((slide for slide in reversed(self._idle) if slide.path == path), None)
            if found is not None:
                self._idle.remove(found)
                return found
            known = self._known.pop(path, None)
        state = _state(path)
        if known is None or known.state != state:
            slide = self._open(path)
            known = _Header(copy.copy(slide), state)
        else:
            slide = copy.copy(known.slide)
        with self._lock:
            self._known[path] = known
            if len(self._known) > self._most_known:
                self._known.popitem(last=False)
        return slide

    def _surplus(self) -> list[Slide]:
        """Take idle slides out that are too many or hold too much; those used last stay."""
        held, kept, surplus = 0, list[Slide](), list[Slide]()
        for slide in reversed(self._idle):
            is_large = slide.held_pixels and held and held + slide.held_pixels > _MOST_HELD
            if is_large or len(kept) == self._most_idle:
                surplus.append(slide)
            else:
                kept.append(slide)
                held += slide.held_pixels
        self._idle = kept[::-1]
        return surplus

    def close(self) -> None:
        """Close the slides that nobody reads now."""
        with self._lock:
            slides, self._idle = self._idle, []
        for slide in slides:
            slide.close()


def _state(path: Path) -> tuple[int, ...]:
    """Return what tells a file from one that has taken its place; nothing where there is none."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_ino, state.st_size, state.st_mtime_ns
