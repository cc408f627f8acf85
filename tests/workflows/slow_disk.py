"""A disk of its own, of which a program gets so many bytes a second and no more."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_GROUPS = Path("/sys/fs/cgroup/blkio")
_SIZE = 64 << 20


@dataclass(frozen=True)
class SlowDisk:
    """A mounted disk, and the control group whose programs get few bytes a second from it.

    Attributes:
        folder: Where it is mounted.
        group: The control group's folder.
        device: Major and minor number of the disk, as `major:minor`.
    """

    folder: Path
    group: Path
    device: str

    def entered(self, program: str) -> str:
        """Return a program of Python that first becomes a member of the control group."""
        group = str(self.group / "cgroup.procs")
        return (
            f"import os, pathlib\npathlib.Path({group!r}).write_text(str(os.getpid()))\n{program}"
        )

    def bytes_moved(self, way: str) -> int:
        """Held back so far; `way` is Read or Write."""
        told = (self.group / "blkio.throttle.io_service_bytes").read_text().split("\n")
        return sum(int(line.split()[2]) for line in told if line.startswith(f"{self.device} {way}"))


@contextmanager
def slow_disk(work: Path, filled_from: Path, rate: int) -> Iterator[SlowDisk]:
    """A disk with a copy of `filled_from`, none of it in memory yet, of `rate` bytes a second.

    Skips the test where this machine or user cannot have one.
    """
    if os.geteuid() != 0 or not (_GROUPS / "cgroup.procs").exists():
        pytest.skip("a slow disk takes root, and control groups of version 1 (blkio)")
    image, folder = work / "disk.img", work / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(_SIZE)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with ExitStack() as stack:
        made = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"a slow disk takes a loop device: {made.stderr.strip()}")
        device = made.stdout.strip()
        stack.callback(subprocess.run, ["losetup", "-d", device], check=True)
        _mounted(device, folder)
        shutil.copytree(filled_from, folder / filled_from.name)
        subprocess.run(["umount", str(folder)], check=True)
        _mounted(device, folder)
        stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
        _forgotten(folder)
        group = _GROUPS / f"pathoseg-{os.getpid()}"
        group.mkdir()
        stack.callback(group.rmdir)
        number = Path(device).stat().st_rdev
        found = SlowDisk(folder, group, f"{os.major(number)}:{os.minor(number)}")
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{found.device} {rate}\n")
        yield found


def _mounted(device: str, folder: Path) -> None:
    """Each write goes to the disk at once, at the cost of who writes."""
    subprocess.run(["mount", "-o", "sync", device, str(folder)], check=True)


def _forgotten(folder: Path) -> None:
    """Drop the files from memory.

    `umount` does so, unless another test made a mount namespace meanwhile, which holds on to it.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
