"""Ctrl-C and SIGTERM as a question that long work asks itself between two parts of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

from pathoseg.errors import StoppedError

_HEARD = b"\nStopping, as soon as what is under way can be saved. Ctrl-C again stops at once.\n"


class Interruption:
    """While entered, holds back SIGINT and SIGTERM; a second SIGINT ends the work at once.

    Handlers are process-wide, so only the main thread installs them.

    Attributes:
        advice: How the user goes on after a signal; the work changes it as it gets further.
        number: The signal that came, or None.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.number: int | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_asked(self) -> bool:
        """Return True once a signal has come; what takes long asks this within itself."""
        return self.number is not None

    def raise_if_asked(self) -> None:
        """Ends the work if a signal came.

        Raises:
            StoppedError: A signal came.
        """
        if self.number is not None:
            raise StoppedError(self.number, self.advice)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        # Not print: the work may be within one. And there may be no file behind the stream.
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), _HEARD)
