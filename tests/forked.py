"""Runs the command line in processes that are forked from one which has imported everything.

    test ── asks ──▶ fork server (imports torch, zarr, scipy… once: 3 s)
                         └── fork, 30 ms ──▶ the command: a process with a number, an exit code, a
                                             pipe for all that it prints, and signals of its own

What an interpreter does of itself at its start is not seen here: `start_python` of conftest.py is.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [f"pathoseg.workflows.{name}" for name in ("train", "infer", "evaluate", "plan")]
    # The last is what an optimizer and a trace import: 2 s of processor time in each process.
    + ["pathoseg.cli", "torch.utils.tensorboard", "albumentations", "torch._dynamo"]
)


class Forked:
    """A command that runs; answers to what `subprocess.Popen` does.

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
        self._output, theirs = _CONTEXT.Pipe(duplex=False)
        call = (list(arguments), str(folder), dict(os.environ), program, theirs)
        self._process = _CONTEXT.Process(target=_run, args=call)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(f"pathoseg ({self.pid})", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that was printed until the last holder of the pipe ended; and nothing beside it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = []
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(f"pathoseg ({self.pid})", timeout or 0.0)
            part = os.read(self._output.fileno(), 2**16)
            if not part:
                break
            parts.append(part)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return b"".join(parts).decode(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()
        self._process.close()
        self._output.close()


def _run(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    program: str | None,
    output: Connection,
) -> None:
    """The life of the forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", cores)))
    sys.path[:0] = [folder]  # as for `python -m`
    sys.argv = ["pathoseg", *arguments]
    try:
        if program is None:
            runpy.run_module("pathoseg", run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
