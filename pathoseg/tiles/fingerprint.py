"""The fingerprint of a slide's file: its size, its time, and a hash of parts of it."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pathoseg.errors import PathosegError
from pathoseg.slides.folder import files_of

_PART = 64 * 1024


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A file as it is now.

    Attributes:
        size: Bytes, with those of companion files.
        modified: The latest time of change in nanoseconds.
        digest: SHA-256 of the head, middle and tail (64 KiB each), hexadecimal.
    """

    size: int
    modified: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Fingerprint:
        """Take the fingerprint of a slide's file, with the other files of a slide that is several
        (`files_of`).

        Of a slide that is a folder (OME-Zarr) it is that of all files in it but labels, which
        other programs add; the digest is that of the first, its metadata.

        Raises:
            PathosegError: The file cannot be read.
        """
        try:
            files = _files_below(path) if path.is_dir() else files_of(path)
            states = [file.stat() for file in files]
            with files[0].open("rb") as file:
                digest = _quick_hash(file, states[0].st_size)
        except OSError as error:
            raise PathosegError(
                f"{path} cannot be read ({error.strerror}).", "Check the file and its permissions."
            ) from error
        return cls(
            sum(state.st_size for state in states),
            max(state.st_mtime_ns for state in states),
            digest,
        )


def _files_below(folder: Path) -> list[Path]:
    """The files of an OME-Zarr slide, those of the folder itself (its metadata) first.

    Raises:
        FileNotFoundError: There are none.
    """
    found = list[Path]()
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "labels")
        found += [Path(place, name) for name in sorted(names)]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "it is an empty folder")
    return found


def _quick_hash(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    for start in (0, (size - _PART) // 2, size - _PART):
        file.seek(max(0, start))
        digest.update(file.read(_PART))
    return digest.hexdigest()
