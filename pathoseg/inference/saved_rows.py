"""The finished rows of tiles of a slide in progress, one compressed file each."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np

from pathoseg.inference.segmenter import MaskRow

_HEAD = struct.Struct("<8sQQQ")  # magic, rows of pixels, width, unread tiles
_MAGIC = b"pathrow1"
_ROW, _CLAIM = ".row", ".claim"


class SavedRows:
    """Rows that processes save for the one that writes the result, and for a later attempt.

    Args:
        folder: Of one slide, model and set of options.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def listed(self) -> tuple[set[int], set[int]]:
        """The rows that are saved, and those with a claim, dead or alive.

        Raises:
            FileNotFoundError: The folder is gone: the slide is done.
        """
        names = [path.name for path in self._folder.iterdir()]
        saved, claimed = (
            {int(name.removesuffix(end)) for name in names if name[0] != "." and name.endswith(end)}
            for end in (_ROW, _CLAIM)
        )
        return saved, claimed

    def claim(self, row: int) -> Path:
        """The file by which a process claims the row."""
        return self._folder / f"{row:06d}{_CLAIM}"

    def has(self, row: int) -> bool:
        return self._file(row).exists()

    def save(self, row: MaskRow) -> None:
        """Appears whole or not at all. No fsync: what a crash of the machine cuts short, `load`
        refuses.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        draft = self._folder / f".{uuid4().hex[:8]}"
        head = _HEAD.pack(_MAGIC, *row.band.shape, row.unread_tiles)
        try:
            with draft.open("wb") as file:
                file.write(head)
                file.write(zlib.compress(np.ascontiguousarray(row.band).data, level=1))
            draft.replace(self._file(row.number))
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def load(self, row: int) -> MaskRow | None:
        """The row, None where it is not saved; a broken file is removed."""
        file = self._file(row)
        try:
            data = file.read_bytes()
            magic, height, width, unread = _HEAD.unpack_from(data)
            if magic == _MAGIC:
                pixels = zlib.decompress(data[_HEAD.size :], bufsize=height * width)
                return MaskRow(row, np.frombuffer(pixels, np.uint8).reshape(height, width), unread)
        except FileNotFoundError:
            return None
        except (struct.error, zlib.error, ValueError):
            pass
        file.unlink(missing_ok=True)
        return None

    def _file(self, row: int) -> Path:
        return self._folder / f"{row:06d}{_ROW}"
