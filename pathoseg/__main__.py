"""Starts the command line: `pathoseg` and `python -m pathoseg`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line; signals end it cleanly even while it is still being imported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    from pathoseg.cli import main as run

    run()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Ends a command that has nothing to save yet; once it has, `Interruption` takes over."""
    os.write(sys.stderr.fileno(), b"Stopped. Run the same command again.\n")
    # Not an exception: a library that is being imported would catch it and fail in its own way.
    os._exit(128 + number)


if __name__ == "__main__":
    main()
