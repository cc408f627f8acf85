"""Hands what a test starts to the fork server (`tests/fork_server.py` has the figure).

Every new interpreter of the tests reads this file before anything else, so it is small and imports
little. An interpreter that the server refuses goes on as if it had not asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SERVER = "PATHOSEG_TESTS_FORK_SERVER"  # its Python's prefix and the path of its socket


class Asked:
    """A process that the fork server was asked for.

    Args:
        arguments: Those of the interpreter, such as `["-m", "pathoseg", "train"]`.
        folder: Working directory.
        streams: Descriptors of its standard input, output and error.

    Attributes:
        pid: Its number; None where the server refuses.
    """

    def __init__(self, arguments: Sequence[str], folder: str, streams: Sequence[int]) -> None:
        import marshal
        import signal
        import socket

        ends = (signal.SIGINT, signal.SIGTERM)
        ignored = [int(each) for each in ends if signal.getsignal(each) == signal.SIG_IGN]
        told = (list(arguments), folder, dict(os.environ), ignored, place())
        call = marshal.dumps(told)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[SERVER].split(os.pathsep)[1])
        socket.send_fds(self._connection, [len(call).to_bytes(8, "little")], streams)
        self._connection.sendall(call)
        self.pid = self._told() or None

    def fileno(self) -> int:
        """Return what becomes readable when the process has ended."""
        return self._connection.fileno()

    def code(self) -> int:
        """Wait for the exit code: -N after signal N."""
        return self._told()

    def close(self) -> None:
        """Forget the process, which is killed if it runs."""
        self._connection.close()

    def _told(self) -> int:
        import socket

        number = self._connection.recv(8, socket.MSG_WAITALL)
        if len(number) < 8:
            raise ConnectionError("the tests' fork server has ended")
        return int.from_bytes(number, "little", signed=True)


Place = tuple[dict[str, str], list[tuple[int, int]], list[int], tuple[int, ...]]


def place() -> Place:
    """Return this process's namespaces, and what a fork does not take over: limits, cores, user."""
    import resource

    spaces = "/proc/self/ns"
    known = sorted(os.listdir(spaces)) if os.path.isdir(spaces) else []
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return (
        {name: os.readlink(f"{spaces}/{name}") for name in known if "children" not in name},
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        (os.getuid(), os.geteuid(), os.getgid(), os.getegid()),
    )


def _hand_over(arguments: Sequence[str]) -> None:
    """Be, to whoever started this interpreter, the process that is forked for it."""
    import signal
    from contextlib import suppress

    came: list[int] = []
    begun: list[int] = []

    def pass_on(number: int | None = None, _: object = None) -> None:
        if number is not None:
            came.append(number)
        while came and begun:
            with suppress(ProcessLookupError):  # its exit code is on its way
                os.kill(begun[0], came.pop(0))

    told = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    passed = [each for each in told if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, pass_on) for each in passed}
    process = None
    with suppress(OSError):  # the server has ended
        process = Asked(arguments, os.getcwd(), (0, 1, 2))
    if process is None or process.pid is None:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
        return
    begun.append(process.pid)
    pass_on()
    try:
        code = process.code()
    except OSError:
        os._exit(70)  # EX_SOFTWARE: the server has ended, and the process with it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_ours(arguments: Sequence[str]) -> bool:
    """Tell whether an interpreter is to run pathoseg or a program of a test.

    Benchmarks measure what they start. Code of `-c` asks what an interpreter does of itself.
    """
    script = arguments[0] if arguments else ""
    return arguments[:2] == ["-m", "pathoseg"] or (
        (script.endswith(".py") or os.path.basename(script) == "pathoseg")
        and "benchmarks" not in script.split(os.sep)
    )


_server = os.environ.get(SERVER, "")
if _server.split(os.pathsep)[0] == sys.prefix and _is_ours(sys.orig_argv[1:]):
    _hand_over(sys.orig_argv[1:])
