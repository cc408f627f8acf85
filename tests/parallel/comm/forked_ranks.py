"""Ranks of gloo that are forked from one process, which has imported and traced what they share."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pathoseg.parallel.comm.gloo import keep_store
from tests.forked import Forked

_ROOT = Path(__file__).resolve().parents[3]


def run_forked(world: Callable[..., int], *arguments: object) -> str:
    """Run a function that calls `fork_ranks`, in a process which has imported pathoseg already.

    A process of pytest has threads, which forks do not survive.

    Returns:
        All that was printed.
    """
    module, name = world.__module__, world.__name__
    program = f"import sys\nfrom {module} import {name}\nsys.exit({name}(*{arguments!r}))"
    with Forked([], _ROOT, program) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


def fork_ranks(ranks: int, rank: Callable[[], None]) -> int:
    """Run `rank` in so many processes, which `connect` joins.

    Returns:
        The largest exit code of a rank, or the number of the signal that ended it.
    """
    told, tell = os.pipe()
    children = [_fork(number, ranks, told, rank) for number in range(ranks)]
    store, port = keep_store()  # after the forks: it has a thread
    os.write(tell, b"%5d" % port * ranks)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    del store  # it ends with its last reference
    return max(map(abs, codes))


def _fork(number: int, ranks: int, told: int, rank: Callable[[], None]) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        world = {"RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": int(os.read(told, 5))}
        os.environ |= {name: str(value) for name, value in (world | where).items()}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        rank()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
