"""Starts the command line: `pathoseg` and `python -m pathoseg`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def main() -> NoReturn:
    """Run the command line; signals end it cleanly even while it is still being imported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    from pathoseg.cli import main as run

    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int) or end.code not in _STOPPED:
            raise
        # Python's own way to end takes seconds after torch, and a stop is to be over in five.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End a command that has nothing to save yet; once it has, `Interruption` takes over."""
    # Not sys.stderr: what checks slides quietly has replaced it. There may be no file behind it.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno(), b"Stopped. Run the same command again.\n")
    # Not an exception: a library that is being imported would catch it and fail in its own way.
    os._exit(128 + number)


if __name__ == "__main__":
    main()
