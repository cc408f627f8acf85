"""Starts processes on this machine that share work but do not wait for each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

_NAP = 0.05  # seconds
_KILLED = 128  # and above: ended by a signal


def start_crew(ranks: int, command: Sequence[str]) -> int:
    """Runs a command as several ranks that meet by gloo, until all have ended.

    A rank that is killed ends no other. Ctrl-C and SIGTERM go on to all of them.

    Args:
        ranks: How many.
        command: What each runs; it calls `connect`.

    Returns:
        The best exit code of a rank: work that is shared is done as soon as one says so.
    """
    from pathoseg.parallel.comm.gloo import keep_store

    store, port = keep_store()
    cores = len(os.sched_getaffinity(0))
    environment = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, note))
        crew = []
        for rank in range(ranks):
            own = environment | {"RANK": str(rank)}
            if rank:  # two progress bars on one terminal would draw over each other
                own["TTY_COMPATIBLE"] = "0"
            # In a session of its own, so that Ctrl-C reaches it once: through this process.
            crew.append(
                subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
            )
            stack.callback(_end, crew[-1])
        told = 0
        while any(process.poll() is None for process in crew):
            time.sleep(_NAP)
            for each in came[told:]:
                told += 1
                for process in crew:
                    process.send_signal(each)
    del store  # it ends with its last reference
    codes = [_KILLED - each.returncode if each.returncode < 0 else each.returncode for each in crew]
    for rank, code in enumerate(codes):
        if code > _KILLED and not came and min(codes) < _KILLED:
            print(f"Rank {rank} was killed; the others did its share.", file=sys.stderr)
    return min(codes)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leaves nothing running, whatever happens."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
