"""What all readers share: a slide's header, and a handle opened when first read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from pathoseg.geometry import Level, Mpp, Size


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
        """Opens the file anew."""

    @abstractmethod
    def _read_header(self, assume_mpp: float | None) -> None:
        """Sets vendor, levels, mpp and, where the file has bounds, origin."""

    def _opened(self) -> Handle:
        if self._handle is None:
            self._handle = self._open()
        return self._handle

    @property
    def size(self) -> Size:
        """Pixels of level 0."""
        return self.levels[0].size

    def close(self) -> None:
        """Frees the handle; a later read opens another."""
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
