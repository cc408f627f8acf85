"""Runs commands in a process that has lost what Windows has not, or refuses as Windows does.

    python tests/without_posix.py '[["train", "--slides", "slides"], ["infer", "slide.png"]]'

Everything is taken away before a module of ours is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Their builds for Linux need all of it as they are imported; those for other systems do not.
import psutil  # noqa: F401
import torch._dynamo  # noqa: F401

MISSING = {
    os: (
        *("pread", "preadv", "pwrite", "sched_getaffinity", "sched_yield", "sysconf", "fork"),
        *("forkpty", "geteuid", "getuid", "killpg", "setsid", "fchmod", "link", "getloadavg"),
        *("O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "O_NOFOLLOW"),
    ),
    signal: ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGCHLD"),
}
_HIDDEN = ("/proc", "/sys")


def take_away() -> None:
    """Remove or replace the calls; there is no way back in this process."""
    for module, names in MISSING.items():
        for name in names:
            delattr(module, name)
    os.supports_fd.clear()
    os.supports_dir_fd.clear()
    shutil._use_fd_functions = False  # it looked when it was imported
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # named until it is closed
    os.symlink = _no_link
    ctypes.CDLL = _NamedLibrary
    io.open = _hiding(io.open)  # what pathlib calls; psutil calls the builtin one
    os.readlink = _hiding(os.readlink)
    os.utime = _by_name_only(os.utime)
    os.open = _no_folders(os.open)
    for name in ("rename", "replace", "remove", "unlink"):
        setattr(os, name, _not_while_open(getattr(os, name), name))


def _no_link(*_: object, **__: object) -> None:
    raise OSError(errno.EINVAL, "A required privilege is not held by the client")


class _NamedLibrary(ctypes.CDLL):
    def __init__(self, name: str | None, *arguments: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *arguments, **options)


def _hiding(call: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith(_HIDDEN):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return call(path, *arguments, **options)

    return hidden


def _by_name_only(call: Callable[..., None]) -> Callable[..., None]:
    def utime(path: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(path, int):
            raise TypeError("utime: path should be string, bytes or os.PathLike, not int")
        call(path, *arguments, **options)

    return utime


def _no_folders(call: Callable[..., int]) -> Callable[..., int]:
    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return call(path, *arguments, **options)

    return opened


_readlink = os.readlink


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 pathlib would open it hidden
        with contextlib.suppress(OSError):
            found.append(_readlink(f"/proc/self/fd/{descriptor}"))
    return found


def _not_while_open(call: Callable[..., None], name: str) -> Callable[..., None]:
    """Windows neither moves nor removes a file that is open, nor a folder that holds one."""

    def moved(path: Any, *arguments: Any, **options: Any) -> None:
        for each in (path, *arguments):
            real = os.path.realpath(each)
            for file in _open_files():
                if file == real or file.startswith(f"{real}/"):
                    raise PermissionError(errno.EACCES, "It is used by a process", file)
        if name == "rename" and os.path.lexists(arguments[0]):
            raise FileExistsError(errno.EEXIST, "The file exists", str(arguments[0]))
        if name == "replace" and Path(arguments[0]).is_dir():
            raise PermissionError(errno.EACCES, "Access is denied", str(arguments[0]))
        call(path, *arguments, **options)

    return moved


def main(commands: list[list[str]]) -> None:
    """Run one command line after the other, until one fails."""
    take_away()
    from pathoseg.__main__ import main as pathoseg

    for command in commands:
        sys.argv = ["pathoseg", *command]
        try:
            pathoseg()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
