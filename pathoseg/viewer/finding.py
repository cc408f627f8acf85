"""Finds the slides, results and annotations behind the paths that `pathoseg view` was given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pathoseg.annotations.reading import annotation_of
from pathoseg.errors import PathosegError
from pathoseg.inference.result_folder import MASK, STATES, SUMMARY, State, read_state, state_file
from pathoseg.outputs.report import Summary, read_summary
from pathoseg.slides.folder import find_slides, is_data, is_slide, with_a_name
from pathoseg.slides.zarr_folder import is_zarr_slide
from pathoseg.viewer.slide_view import Entry

_RESULT_FILES = {MASK, SUMMARY}


@dataclass(frozen=True)
class _Segmented:
    """A slide that was segmented, or begun.

    Attributes:
        entry: Its entry, of which the slide's file is to be found.
        given: The slide's path as it was given to infer, or its name where that is not known.
        place: Its absolute path then; empty where that is not known.
        out: The folder of its batch.
    """

    entry: Entry
    given: str
    place: str
    out: Path


class Known:
    """Slides by name, in which those of results are looked up.

    Args:
        slides: Pairs of a name in its folder and a file.
        segmented: All whose slides are looked up.
    """

    def __init__(self, slides: Iterable[tuple[str, Path]], segmented: Iterable[_Segmented]) -> None:
        self._slides = list(slides)
        wanted = {(PurePosixPath(one.entry.name).name, one.place or one.given) for one in segmented}
        self._wanted = Counter(file for file, _ in wanted)

    def slide(self, name: str) -> Path | None:
        """Return the slide of a name, or the only file called so if no other slide may be meant."""
        found = [path for own, path in self._slides if own == name]
        file = PurePosixPath(name).name
        if not found and self._wanted[file] <= 1:
            found = [path for _, path in self._slides if path.name == file]
        return found[0] if len({path.resolve() for path in found}) == 1 else None


def find_entries(
    paths: Sequence[Path], slide_folders: Sequence[Path] = (), annotations: Path | None = None
) -> list[Entry]:
    """Find what is to be shown.

    Args:
        paths: Slides, folders of slides, results of a slide, and folders of results; one may hold
            both slides and results.
        slide_folders: Folders to search for the slides of results, which take precedence over the
            paths in results.
        annotations: Folder of annotations; None means beside each slide.

    Returns:
        Entries in the order of the paths; a slide and its result are one.

    Raises:
        PathosegError: A path does not exist or holds nothing to show.
    """
    apart = () if annotations is None else (annotations,)
    asked = find_slides(slide_folders, apart) if slide_folders else {}
    slides = dict[Path, tuple[str, Path]]()  # by the file, each once
    segmented = list[_Segmented]()
    for path in paths:
        if not path.exists():
            raise PathosegError(f"{path} does not exist.", "Check the path.")
        if path.is_file() and not is_slide(path):
            raise PathosegError(
                f"{path} is in no format that pathoseg reads.",
                "Give slides, or the folder that `pathoseg infer` wrote its results into.",
            )
        found = dict[str, Path]()
        if path.is_file() or is_zarr_slide(path):
            slide = with_a_name(path)
            found = {slide.name: slide}
        else:
            results, batches = _results_below(path)
            own = [*_segmented(path, results, batches)]
            segmented += own
            passed_over = *apart, *results, *(batch / STATES for batch in batches)
            # One that is a result holds none, one that has results may.
            with suppress(PathosegError) if own else nullcontext():
                found = {} if path in results else find_slides([path], passed_over)
        for name, slide in found.items():
            slides.setdefault(slide.resolve(), (name, slide))
    first = Known(asked.items(), segmented)
    last = Known([*asked.items(), *slides.values()], segmented)
    entries = [_with_slide(one, first, last) for one in segmented]
    shown = {entry.slide.resolve() for entry in entries if entry.slide is not None}
    entries += [Entry(*slide) for file, slide in slides.items() if file not in shown]
    if not entries:
        raise PathosegError(
            f"There is nothing to show in {', '.join(map(str, paths))}.",
            "Give slides, or the folder that `pathoseg infer` wrote its results into.",
        )
    used = dict[Path, Path]()
    return _named_apart([_annotated(entry, annotations, used) for entry in entries])


def _results_below(out: Path) -> tuple[list[Path], list[Path]]:
    """Return the results in a folder, itself included, whole or not, and the batches."""
    results, batches = list[Path](), list[Path]()
    for place, folders, files in os.walk(out):
        folder = Path(place)
        if MASK in files or (SUMMARY in files and _is_result(folder)):
            results.append(folder)
            folders.clear()
        elif folder != out and is_data([*folders, *files]):
            folders.clear()
        elif STATES in folders:
            batches.append(folder)
        folders[:] = sorted(name for name in folders if name[0] != "." and name != STATES)
    return results, batches


def _is_result(folder: Path) -> bool:
    """Return True if a folder's summary is that of a result, or a batch has a state of it."""
    batch = _batch_of(folder)
    if batch is not None and state_file(batch, folder).is_file():
        return True
    with suppress(PathosegError):
        read_summary(folder / SUMMARY)
        return True
    return False


def _batch_of(folder: Path) -> Path | None:
    return next((path for path in folder.parents if (path / STATES).is_dir()), None)


def _segmented(out: Path, results: Iterable[Path], batches: Iterable[Path]) -> Iterator[_Segmented]:
    """Yield the results in a folder, and the slides of its batches that have none yet."""
    seen = set[Path]()
    for folder in results:
        batch, state = _batch_of(folder), None
        if batch is not None:
            place = state_file(batch, folder)
            state = read_state(place)
            seen.add(place.resolve())
        yield _result(batch or out, folder, state)
    for batch in batches:
        for path in sorted((batch / STATES).glob("**/[!.]*.json")):
            state = read_state(path)
            if state is None or path.resolve() in seen:
                continue
            within = path.parent.relative_to(batch / STATES)
            name = (within / Path(state.slide).name).as_posix()
            told = f"{state.problem} {state.hint}".strip() if state.status == "failed" else ""
            status = "cut short" if state.status == "done" else state.status
            entry = Entry(name, None, status=status, problem=told, batch=batch)
            yield _Segmented(entry, state.slide, state.place, batch)


def _result(out: Path, folder: Path, state: State | None) -> _Segmented:
    summary: Summary | None = None
    status, problem = "done", ""
    try:
        summary = read_summary(folder / SUMMARY)
    except PathosegError as error:
        status, problem = "cut short", str(error)
    whole = {path.name for path in folder.iterdir()} >= _RESULT_FILES
    if not whole or (state is not None and state.status == "done" and not state.is_whole(folder)):
        not_whole = f"{folder} is not whole. Segment the slide again with --resume."
        status, problem = "cut short", (whole and problem) or not_whole
    name = summary.slide if summary is not None else folder.name
    entry = Entry(name, None, folder, status=status, problem=problem, summary=summary)
    given, place = (name, "") if state is None else (state.slide, state.place)
    return _Segmented(entry, given, place, out)


def _with_slide(one: _Segmented, first: Known, last: Known) -> Entry:
    """Return the entry with its slide's file, if that is known.

    It is where `--slides` has it, where it was, where its path leads from the folders around the
    batch or from this one, or among the slides given.
    """
    name, found = one.entry.name, first.slide(one.entry.name)
    if found is None:
        # A relative path was most likely given in the folder in which the batch was made.
        places = [Path(one.place)] if one.place else []
        places += [*(folder / one.given for folder in one.out.resolve().parents[:2])]
        places.append(Path(one.given))
        found = next((path for path in places if path.is_file() or is_zarr_slide(path)), None)
        found = found or last.slide(name)
    problem = one.entry.problem
    if found is None and one.entry.result is not None and not problem:
        problem = (
            f"The slide {one.given} is not where it was when it was segmented: only the mask is "
            "shown. Name the folder that it is in now with --slides DIR."
        )
    return replace(one.entry, slide=found, problem=problem)


def _named_apart(entries: Iterable[Entry]) -> list[Entry]:
    """Give entries that share a name the path of their slide, result or batch."""
    entries = list(entries)
    count = Counter(entry.name for entry in entries)
    return [
        replace(entry, name=str(entry.result or entry.slide or entry.batch / entry.name))
        if count[entry.name] > 1
        else entry
        for entry in entries
    ]


def _annotated(entry: Entry, folder: Path | None, used: dict[Path, Path]) -> Entry:
    """Add a slide's annotation file to its entry, or why it has none that could be its own."""
    if entry.slide is None:
        return entry
    try:
        return replace(entry, annotation=annotation_of(entry.name, entry.slide, folder, used))
    except PathosegError as error:
        return replace(entry, problem=entry.problem or str(error))
