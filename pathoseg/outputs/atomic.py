"""Replaces a file, or makes a folder, whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from pathoseg.platform_support import sync_file, sync_folder

_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # the others stand for bytes of a file name


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Make a context that yields a new path beside `path`; its file replaces `path` at the end.

    The file is on disk (fsync) before it is renamed. An error in the block leaves `path` as it was
    and no other file behind. The new path ends as `path` does, so a suffix keeps its meaning.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    draft = path.with_name(f".{uuid4().hex[:8]}-{path.name}")
    with naming(path):
        try:
            yield draft
            sync_file(draft)
            draft.replace(path)
            sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a context that yields a new path beside `path`; its folder is called `path` at the end.

    Its files are on disk (fsync) before that. An error in the block leaves nothing behind.

    Raises:
        OSError: There is a folder `path`, its place cannot be written, or the disk is full.
    """
    draft = path.with_name(f".{uuid4().hex[:8]}-{path.name}")
    with naming(path):
        try:
            yield draft
            sync_tree(draft)
            draft.rename(path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Wait until all that is in a folder is on disk.

    Raises:
        OSError: The disk is full or failed.
    """
    for each in folder.rglob("*"):
        sync_folder(each) if each.is_dir() else sync_file(each)
    sync_folder(folder)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make a context whose OSErrors name `path`: those of a write name no file, others a draft."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def write_text(path: Path, text: str) -> bool:
    """Replace the file `path` by `text` in UTF-8, whole or not at all.

    File names in the text keep the bytes that are no UTF-8. Another half of a surrogate pair, which
    no file name has, becomes a question mark.

    Returns:
        True if there was such a file.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    is_there = path.exists()
    with replaced(path) as draft:
        draft.write_bytes(_LONE.sub("?", text).encode(errors="surrogateescape"))
    return is_there


def write_rows(
    path: Path, rows: Iterable[Mapping[str, object]], columns: Sequence[str] | None = None
) -> bool:
    """Replace `path` by a CSV table, whole or not at all.

    Args:
        path: The file.
        rows: Each maps every column to its value.
        columns: In their order, for a table that may have no rows; None takes the first row's.

    Returns:
        True if there was such a file.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    text, entries = io.StringIO(), list(rows)
    writer = csv.DictWriter(text, columns or list(entries[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    return write_text(path, text.getvalue())
