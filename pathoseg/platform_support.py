"""Calls that only Linux or POSIX offers, each with a plain way for other systems.

Every attribute is looked up when it is needed, so that a module imports everywhere.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import signal
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

_ROOT = Path("/")
_LONGEST_POINTER = 4096  # bytes
_HAS_LINKS = os.name != "nt"  # Windows replaces no link to a folder by rename
# What FAT, some network shares and FUSE say of a symbolic link.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


# --- files -------------------------------------------------------------------------------------


def open_for_reading(path: Path) -> int:
    """Open a file for `read_at`.

    Returns:
        Its descriptor, which children do not inherit.

    Raises:
        OSError: The file cannot be opened.
    """
    return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Read up to `count` bytes from `offset`.

    Without `pread` the descriptor's position moves: threads must not share a descriptor.

    Raises:
        OSError: The file cannot be read.
    """
    pread: Callable[[int, int, int], bytes] | None = getattr(os, "pread", None)
    if pread is not None:
        return pread(descriptor, count, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, count)


def is_file(path: Path) -> bool:
    """Return `path.is_file()`, and False where a folder on the way may not be entered."""
    try:
        return path.is_file()
    except PermissionError:  # Python 3.14 returns False
        return False


def is_folder(path: Path) -> bool:
    """Return `path.is_dir()`, and False where a folder on the way may not be entered."""
    try:
        return path.is_dir()
    except PermissionError:
        return False


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC); names from macOS may have ü as two signs."""
    return unicodedata.normalize("NFC", name)


def spellings(name: str) -> Iterable[str]:
    """Return a name as it is, and with its letters composed (NFC) and decomposed (NFD)."""
    forms: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")
    return dict.fromkeys((name, *(unicodedata.normalize(form, name) for form in forms)))


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file of this name, in whichever of its `spellings`; None where there is none."""
    files = (folder / each for each in spellings(name))
    return next((file for file in files if file.is_file()), None)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on disk.

    Raises:
        OSError: The disk is full or failed.
    """
    _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on disk; nothing happens on Windows, which opens no folder.

    Raises:
        OSError: The disk is full or failed.
    """
    if hasattr(os, "O_DIRECTORY"):
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def touched_now(path: Path) -> float:
    """Set a file's time of change to the file system's present one; the file is made if missing.

    Returns:
        That time in seconds.

    Raises:
        OSError: The file cannot be written.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        os.utime(descriptor if os.utime in os.supports_fd else path)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def make_pointer(pointer: Path, target: Path) -> None:
    """Make a symbolic link to a folder, or, where links cannot be made, a text file with its path.

    Args:
        pointer: Must not exist.
        target: The folder, absolute or relative to the pointer's folder.

    Raises:
        OSError: The pointer exists, or its folder cannot be written.
    """
    if _HAS_LINKS:
        try:
            pointer.symlink_to(target, target_is_directory=True)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return
    with pointer.open("x", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(f"{target.as_posix()}\n")


def follow_pointer(path: Path) -> Path:
    """Return the folder that a text file of `make_pointer` names, and any other path as it is."""
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                name = file.read(_LONGEST_POINTER).decode("utf-8", "surrogateescape").strip()
            if name and (path.parent / name).is_dir():
                return Path(os.path.normpath(path.parent / name))
    return path


def relative_path(path: Path, start: Path) -> Path:
    """Return `path` relative to the folder `start`, or absolute where it is on another drive."""
    try:
        return Path(os.path.relpath(path, start))
    except ValueError:
        return path.absolute()


# --- processors and processes ------------------------------------------------------------------


def usable_cores(process: int = 0) -> set[int]:
    """Return the numbers of the cores that a process may use; all, where none is excluded.

    Args:
        process: Its number; 0 is this one. One that has ended is taken for this one.
    """
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        return set(range(os.cpu_count() or 1))
    try:
        return affinity(process)
    except OSError:
        return affinity(0)


def process_age() -> float:
    """Return the seconds since this process began."""
    return max(0.0, time.time() - psutil.Process().create_time())


def cores_to_use(
    cores: int | None = None, processes: int = 1, in_task: int = 1, root: Path = _ROOT
) -> int:
    """Return how many cores this process may keep busy, at least 1: its share of the least limit.

    Limits are the cores it may run on (affinity), the processor time of its control groups
    (`cpu.max`, or `cpu.cfs_quota_us` of version 1, rounded up), and `SLURM_CPUS_PER_TASK`.

    Args:
        cores: How many cores the processes of this job on this machine may run on; None asks for
            those of this process.
        processes: How many processes of this job share the machine, this one included.
        in_task: How many of them share this process's Slurm task.
        root: Where `/proc` and `/sys` lie.
    """
    shares = [(len(usable_cores()) if cores is None else cores) // processes]
    shares += [math.ceil(quota) // processes for quota in _processor_quotas(root)]
    with suppress(KeyError, ValueError):
        shares.append(int(os.environ["SLURM_CPUS_PER_TASK"]) // in_task)
    return max(1, min(shares))


def _processor_quotas(root: Path) -> Iterator[float]:
    """Yield the cores' worth of time of each control group of this process that has a limit."""
    for base, group in _control_groups(root, "cpu"):
        if base.name == "cgroup":  # version 2 keeps quota and period in one line
            words = " ".join(_lines(group / "cpu.max")).split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [word for name in names for word in _lines(group / name)]
        with suppress(ValueError, ZeroDivisionError):  # "max" is no limit
            quota, period = map(int, words)
            if quota > 0:  # -1 is none, too
                yield quota / period


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield the mount and folder of the control groups of this process, from the inmost outwards.

    Args:
        root: Where `/proc` and `/sys` lie.
        controller: Of version 1, such as "memory"; version 2 has one tree for all.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            inner = base / path.strip("/")
            for group in (inner, *inner.parents):
                if not group.is_relative_to(base):
                    break
                yield base, group


def yield_core() -> None:
    """Let another thread or process that waits for this core run."""
    sched_yield: Callable[[], None] | None = getattr(os, "sched_yield", None)
    if sched_yield is not None:
        sched_yield()
    else:
        time.sleep(0)


def processor_name(root: Path = _ROOT) -> str:
    """Return the processor's model.

    Args:
        root: Where `/proc` lies.
    """
    lines = _lines(root / "proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def process_space(root: Path = _ROOT) -> dict[str, str]:
    """Return what tells apart starts of a machine, and containers that hide their processes.

    Args:
        root: Where `/proc` lies.

    Returns:
        `boot` and `pids`; empty strings where the system does not tell.
    """
    boot, pids = _lines(root / "proc/sys/kernel/random/boot_id"), ""
    with suppress(OSError):
        pids = str((root / "proc/self/ns/pid").readlink())
    return {"boot": boot[0].strip() if boot else "", "pids": pids}


def parent_lives(parent: int) -> bool:
    """Return True while the process that started this one runs.

    POSIX gives an orphan another parent; on Windows it keeps the number.

    Args:
        parent: `os.getppid()` at the start.
    """
    return os.getppid() == parent and psutil.pid_exists(parent)


KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has one way to end a process


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Hold back SIGINT and SIGTERM, and yield the list of those that come.

    Only the main thread may do so.
    """
    came = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group; without groups to the process that would lead it.

    Raises:
        ProcessLookupError: It has ended.
    """
    send: Callable[[int, int], None] = getattr(os, "killpg", os.kill)
    send(group, number)


def is_root() -> bool:
    """Return True if this process may do anything, as mpirun refuses."""
    geteuid: Callable[[], int] | None = getattr(os, "geteuid", None)
    return geteuid is not None and geteuid() == 0


# --- memory ------------------------------------------------------------------------------------


def c_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the process's C library, or None where there is none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (TypeError, OSError):  # Windows has no such handle
        return None


def physical_memory() -> int:
    """Return the bytes of memory of this host."""
    sysconf: Callable[[str], int] | None = getattr(os, "sysconf", None)
    if sysconf is not None:
        with suppress(ValueError):  # the name is unknown
            return sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES")
    return int(psutil.virtual_memory().total)


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that are free or can be freed, on this host and in each control group of this process.

    Args:
        root: Where `/proc` and `/sys` lie.

    Returns:
        The least of them; None where the system does not tell.
    """
    limits = [*_limits(root)]
    if not limits:
        with suppress(OSError, psutil.Error):
            limits.append(int(psutil.virtual_memory().available))
    return min(limits, default=None)


def _limits(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    for base, group in _control_groups(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if base.name == "memory":  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _left(group, *names)


def _left(group: Path, limit: str, used: str, freeable: str) -> Iterator[int]:
    """Yield the memory that a control group has left, if it has a limit."""
    limits = [*_lines(group / limit)]
    if not limits or limits[0] == "max":
        return
    cached = (line.split() for line in _lines(group / "memory.stat"))
    free = sum(int(words[1]) for words in cached if words[0] == freeable)
    yield max(0, int(limits[0]) - sum(map(int, _lines(group / used))) + free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
