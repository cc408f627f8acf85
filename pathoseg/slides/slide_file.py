"""The base of all readers: a header, a lazily opened handle, errors in one clause."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from pathoseg.geometry import Level, Mpp, Size

_LONGEST = 200


def reason(error: Exception) -> str:
    """The exception's text, or its type where it has none, without the file's own bytes in it.

    Libraries quote malformed headers, which may hold line ends and escape sequences.
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in str(error))
    text = " ".join(printable.split()).rstrip(".")
    if not text or isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Closeable(Protocol):
    """A library's open file."""

    def close(self) -> None: ...


Handle = TypeVar("Handle", bound=Closeable)


class SlideFile(ABC, Generic[Handle]):
    """The header of a slide, with a handle that copies and pickles leave behind.

    A handle belongs to one thread and one process: give each its own `copy.copy` of the slide.

    Args:
        path: The file.
        assume_mpp: Microns per pixel where the file states none.

    Raises:
        PathosegError: The file cannot be read, or its resolution is unknown.
    """

    vendor: str
    levels: tuple[Level, ...]
    reduced: tuple[Level, ...] = ()
    mpp: Mpp
    origin: tuple[int, int] = (0, 0)
    warnings: tuple[str, ...] = ()
    held_pixels: int = 0

    def __init__(self, path: Path, assume_mpp: float | None = None) -> None:
        self.path = path
        self._handle: Handle | None = None
        try:
            self._read_header(assume_mpp)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self) -> Handle:
        """Open the file anew."""

    @abstractmethod
    def _read_header(self, assume_mpp: float | None) -> None:
        """Set vendor, levels, mpp and, where the file has bounds, origin."""

    def _opened(self) -> Handle:
        if self._handle is None:
            self._handle = self._open()
        return self._handle

    @property
    def size(self) -> Size:
        """Pixels of level 0."""
        return self.levels[0].size

    def close(self) -> None:
        """Free the handle; a later read opens another."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}
