"""The folder of a slide's result: its name, and how it appears whole or not at all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pathoseg.errors import PathosegError

SUMMARY = "summary.json"  # written last, so a folder that has it is whole
_PARTIAL = ".partial"


def result_folders(out: Path, slides: Sequence[Path]) -> dict[Path, Path]:
    """Slide → folder: the stem, or the whole name where two slides share a stem.

    Raises:
        PathosegError: Two slides have the same file name.
    """
    stems = Counter(slide.stem for slide in slides)
    folders = {
        slide: out / (slide.stem if stems[slide.stem] == 1 else slide.name) for slide in slides
    }
    for folder, count in Counter(folders.values()).items():
        if count > 1:
            same = [str(slide) for slide, taken in folders.items() if taken == folder]
            raise PathosegError(
                f"{' and '.join(same)} would share the result folder {folder}.",
                "Segment them in two calls with different --out folders.",
            )
    return folders


@contextmanager
def result_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into; it takes the place of `folder` when the block succeeds.

    Raises:
        PathosegError: The disk is full or cannot be written.
    """
    partial = folder.with_name(f".{folder.name}{_PARTIAL}")
    old = folder.with_name(f".{folder.name}.old")
    fresh = not folder.parent.exists()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.replace(old)
        partial.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise PathosegError(
            f"The result {folder} cannot be written ({error.strerror or error}).",
            "Free space there or give --out another disk, then run again with --resume.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if fresh:
            with suppress(OSError):  # where a result came to lie in it, it stays
                folder.parent.rmdir()
