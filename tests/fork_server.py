"""Forks what tests start as processes from one that has imported everything.

    a test ── Forked ──────────────────┐
                                       ├──▶ fork server (imports torch, zarr, scipy… once: 5 s)
    mpirun, the program, a shell       │        └── fork, 30 ms ──▶ the process
        └──▶ python -m pathoseg … ─────┘                               │ exit code
             40 ms; waits, passes signals on   ◀───────────────────────┘
             and ends as the process did

A new interpreter of the tests finds `forked_starts/sitecustomize.py` on its path and hands over
its arguments, environment, working directory and standard streams. So ranks of mpirun are forked,
too: they join MPI after the fork, by the environment that mpirun gave. One server serves all
workers of pytest; it imports when it is first asked.

A process asked for on another host (`tests/cluster/hosts.py`) enters that host's namespaces, and
one that is to have the simulated device loads it: the server itself never has it. An interpreter
that differs from the server in more, or in its limits, is refused and does all itself. What a fork
does not show, and tests without `SERVER` in their environment do: what Python and imports do at the
start and at the end of a process, its parent, and hashes and unseeded random numbers of numpy that
differ between processes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import platform
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from tests.forked_starts.sitecustomize import SERVER, Place, place
from tests.simulated_device.run import AUTOLOAD

_ROOT = Path(__file__).resolve().parents[1]
_IMPORTED = [
    *(f"pathoseg.workflows.{name}" for name in ("train", "infer", "evaluate", "plan")),
    *("pathoseg.cli", "torch.utils.tensorboard", "albumentations"),
    # What an optimizer and a trace import: 2 s of processor time in each process.
    *("torch._dynamo", "tests.parallel.runtime.cases"),
]
_REFUSED = 0  # in place of a process's number
_ENTERED = ("net", "uts", "mnt")  # namespaces of a host, which a process with one thread can enter


def start_server() -> None:
    """Start a server, which ends with this process; what this one starts from now on uses it."""
    folder = Path(tempfile.mkdtemp(prefix="pathoseg-forks-"))
    before = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    without_device = os.pathsep.join(each for each in before if each != str(AUTOLOAD))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen(64)
        command = [sys.executable, "-m", "tests.fork_server", str(listening.fileno())]
        server = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": without_device},
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C is for pytest
        )
    atexit.register(_end_server, server, folder)
    starts = str(_ROOT / "tests" / "forked_starts")
    os.environ["PYTHONPATH"] = os.pathsep.join([starts, *before])
    os.environ[SERVER] = f"{sys.prefix}{os.pathsep}{folder / 'socket'}"


def _end_server(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.communicate()
    (folder / "socket").unlink()
    folder.rmdir()


def serve(listening: socket.socket) -> None:
    """Fork processes until the standard input ends, as it does with whoever holds its other end."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, woken, listening, *running.values()], [], [])
        if woken in ready:
            os.read(woken, 512)
        _tell_ended(running)
        for process, connection in running.items():
            if connection in ready:  # who asked has ended
                _kill(process)
        if 0 in ready:
            for process in running:
                _kill(process)
            return
        if listening in ready:
            connection, _ = listening.accept()
            _import_all()
            _fork(connection, running, [woken, wake, listening.fileno()])


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process, signal.SIGKILL)


def _tell_ended(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of processes that have ended, and forget those."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            break
        with running.pop(process) as connection:
            _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # who asked has ended
        connection.sendall(number.to_bytes(8, "little", signed=True))


def _import_all() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would write to, and so copy, what all share


def _fork(connection: socket.socket, running: dict[int, socket.socket], own: list[int]) -> None:
    """Fork the process that a connection asks for, if it lives here.

    Args:
        connection: From who asks.
        running: The processes so far, this one from now on.
        own: Other descriptors of the server, which the process closes.
    """
    streams: list[int] = []
    spaces: list[int] | None = None
    with suppress(OSError, EOFError, ValueError):  # who asks has ended
        size, streams, _, _ = socket.recv_fds(connection, 8, 3)
        call = connection.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        arguments, folder, environment, ignored, its_place = marshal.loads(call)
        spaces = _spaces_to_enter(connection, its_place)
    if spaces is None:
        _tell(connection, _REFUSED)
        connection.close()
    elif process := os.fork():
        with suppress(OSError):  # it has ended, or has done so itself
            os.setpgid(process, process)
        running[process] = connection
        _tell(connection, process)
    else:
        os.setpgid(0, 0)
        for held in (connection, *running.values()):
            held.close()
        _enter(spaces)
        _live(arguments, folder, environment, ignored, streams, own)
    for descriptor in (*streams, *(spaces or [])):
        os.close(descriptor)


def _spaces_to_enter(connection: socket.socket, its_place: Place) -> list[int] | None:
    """Open the namespaces of who asks that are not those of the server.

    Returns:
        Their descriptors; None if a fork cannot be where who asks is.

    Raises:
        OSError: Who asks has ended.
    """
    theirs, ours = its_place[0], place()
    other = [name for name, space in theirs.items() if space != ours[0].get(name)]
    if its_place[1:] != ours[1:] or theirs.keys() != ours[0].keys() or {*other} - {*_ENTERED}:
        return None
    if not other:
        return []
    if os.geteuid() != 0:
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process = struct.unpack("3i", found)[0]
    return [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in other]


def _enter(spaces: list[int]) -> None:
    """Move this process into namespaces, and close their descriptors."""
    for space in spaces:
        if ctypes.CDLL(None, use_errno=True).setns(space, 0):  # os.setns is of Python 3.12
            raise OSError(ctypes.get_errno(), "a forked process cannot enter its host")
        os.close(space)
    if spaces:
        importlib.reload(platform)  # it keeps the host's name


def _live(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    ignored: list[int],
    streams: list[int],
    own: list[int],
) -> None:
    """Live and end as an interpreter with these arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (*streams, *own):
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from pathoseg.platform_support import cores_to_use

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores_to_use()))
    sys.orig_argv = [sys.executable, *arguments]
    code = 1
    try:
        _run(arguments, folder)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # waits for threads, as at the end of each interpreter
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], folder: str) -> None:
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    script = Path(folder, arguments[0])
    sys.path[:0] = [folder if arguments[0] in ("-m", "-c") else str(script.parent), *searched]
    if str(AUTOLOAD) in searched:
        _load_device()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(str(script), run_name="__main__")


def _load_device() -> None:
    """Do what `import torch` would have done with the simulated device on its path."""
    importlib.import_module("tests.simulated_device.device").register()
    for name in [*sys.modules]:
        if name.startswith("tests.parallel"):  # these have chosen a device at their import
            del sys.modules[name]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
