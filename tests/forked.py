"""A command that a test starts, forked from a process that has imported everything."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.forked_starts.sitecustomize import Asked


class Forked:
    """A command that runs; answers to what `subprocess.Popen` does (`fork_server.py`).

    Args:
        arguments: The command line after the program's name.
        folder: Working directory.
        program: Python code to run in place of `python -m pathoseg`.

    Attributes:
        pid: Number of the process.
        returncode: Exit code, -N after signal N; None until `poll`, `wait` or `communicate` saw
            the end.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, program: str | None = None) -> None:
        what = ["-m", "pathoseg"] if program is None else ["-c", program]
        self._output, output = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._process = Asked([*what, *arguments], str(folder), (nothing, output, output))
        os.close(output)
        os.close(nothing)
        assert self._process.pid is not None, "the test lives elsewhere than its fork server"
        self.pid: int = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._process], [], [], 0)[0]:
            self.returncode = self._process.code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._process], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"pathoseg ({self.pid})", timeout or 0.0)
            self.returncode = self._process.code()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that was printed until the last holder of the pipe ended; and nothing beside it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = []
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"pathoseg ({self.pid})", timeout or 0.0)
            part = os.read(self._output, 2**16)
            if not part:
                break
            parts.append(part)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return b"".join(parts).decode(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self._process.close()
        os.close(self._output)
