"""The folder of a slide's result: its name, and how it appears whole or not at all."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from pathoseg.errors import PathosegError
from pathoseg.inference.states import STATES, read_state, state_file

SUMMARY = "summary.json"  # written last, so a folder that has it is whole


def result_folders(out: Path, slides: Sequence[Path]) -> dict[Path, Path]:
    """Slide → folder: the stem, or the whole name where another slide has the stem, here or in an
    earlier batch.

    Raises:
        PathosegError: Two slides have the same file name.
    """
    stems = Counter(slide.stem for slide in slides)
    stems[STATES] += 1
    folders = dict[Path, Path]()
    for slide in slides:
        before = read_state(state_file(out, out / slide.stem))
        has_stem = None if before is None else Path(before.slide).name
        free = stems[slide.stem] == 1 if has_stem is None else has_stem == slide.name
        folders[slide] = out / (slide.stem if free else slide.name)
    for folder, count in Counter(folders.values()).items():
        if count > 1:
            same = [str(slide) for slide, taken in folders.items() if taken == folder]
            raise PathosegError(
                f"{' and '.join(same)} would share the result folder {folder}.",
                "Segment them in two calls with different --out folders.",
            )
    return folders


@contextmanager
def result_folder(folder: Path, work: Path) -> Iterator[Path]:
    """A folder to write into; it takes the place of `folder` when the block succeeds.

    Where another process has put the same result there at the same moment, that one stays.

    Args:
        folder: Of the result.
        work: A folder on the same disk for what is not whole.

    Raises:
        PathosegError: The disk is full or cannot be written.
    """
    mark = uuid4().hex[:8]
    partial, old = work / f"new-{mark}", work / f"old-{mark}"
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.replace(old)
        try:
            partial.replace(folder)
        except OSError:
            if not (folder / SUMMARY).exists():
                raise
    except OSError as error:
        raise PathosegError(
            f"The result {folder} cannot be written ({error.strerror or error}).",
            "Free space there or give --out another disk, then run again with --resume.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
