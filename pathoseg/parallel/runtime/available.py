"""How much host memory this process may still take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pathoseg.errors import PathosegError
from pathoseg.memory_size import memory_text

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that are free or can be freed, on this host and in each control group of this process.

    Args:
        root: Where `/proc` and `/sys` lie.

    Returns:
        The least of them; None where the system does not tell.
    """
    return min(_limits(root), default=None)


def too_small(
    hosts: Iterable[tuple[str, int, int | None]], computes: bool = False
) -> PathosegError | None:
    """Why some ranks do not find room in the memory of their hosts.

    Args:
        hosts: Of each rank the name of its host, the bytes it will take and `available_memory`.
        computes: Whether all that a rank holds is there, since its device is the CPU; else what
            waits for its device.
    """
    needed: dict[str, int] = {}
    ranks = Counter[str]()
    left: dict[str, int] = {}
    for host, own, found in hosts:
        needed[host] = needed.get(host, 0) + own
        ranks[host] += 1
        if found is not None:
            left[host] = min(found, left.get(host, found))
    for host, found in left.items():
        if needed[host] > found:
            return _refusal(host, needed[host], found, ranks[host], computes)
    return None


def _refusal(host: str, needed: int, found: int, ranks: int, computes: bool) -> PathosegError:
    if computes:
        share = memory_text(found // ranks * 9 // 10)
        return PathosegError(
            f"Training takes about {memory_text(needed)} of the memory of host {host}, which has "
            f"{memory_text(found)} left.",
            "Lower [train] microbatch or --tile, or name what one process may take, as [parallel] "
            f'memory = "{share}": then what does not fit is recomputed. Or give the job more '
            "memory, or start fewer ranks on a host.",
        )
    return PathosegError(
        f"The plan keeps {memory_text(needed)} of tensors in the memory of host {host}, which has "
        f"{memory_text(found)} left for it.",
        "Give the job more host memory, start fewer ranks on a host, or give a device more memory "
        "(--memory, or memory in [parallel]).",
    )


def _limits(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2, version 1
            base = root / "sys/fs/cgroup" / controllers
            names = ("memory.max", "memory.current", "inactive_file")
            if controllers:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            inner = base / path.strip("/")
            for group in (inner, *inner.parents):
                if not group.is_relative_to(base):
                    break
                yield from _left(group, *names)


def _left(group: Path, limit: str, used: str, freeable: str) -> Iterator[int]:
    """What a control group has left, if it has a limit."""
    limits = [*_lines(group / limit)]
    if not limits or limits[0] == "max":
        return
    cached = (line.split() for line in _lines(group / "memory.stat"))
    free = sum(int(words[1]) for words in cached if words[0] == freeable)
    yield max(0, int(limits[0]) - sum(map(int, _lines(group / used))) + free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
