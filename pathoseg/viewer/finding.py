"""Finds the slides, results and annotations behind the paths that `pathoseg view` was given."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from pathoseg.annotations.reading import find_annotation
from pathoseg.errors import PathosegError
from pathoseg.inference.result_folder import STATES, SUMMARY, State, read_state, state_file
from pathoseg.outputs.report import Summary, read_summary
from pathoseg.slides.folder import find_slides, is_slide
from pathoseg.slides.zarr_folder import is_zarr_slide
from pathoseg.viewer.slide_view import FILES, Entry

_RESULT_FILES = {FILES.mask, SUMMARY}


@dataclass(frozen=True)
class Known:
    """Slides by name, in which those of results are looked up.

    Attributes:
        by_name: Name in the folder → file.
        asked: True if given by --slides, which takes precedence over the paths in results.
    """

    by_name: Mapping[str, Path] = field(default_factory=dict)
    asked: bool = False

    def slide(self, name: str) -> Path | None:
        """Return the slide of a name, or the only one whose file is called so."""
        if name in self.by_name:
            return self.by_name[name]
        file = PurePosixPath(name).name
        same = [path for path in self.by_name.values() if path.name == file]
        return same[0] if len(same) == 1 else None


def find_entries(
    paths: Sequence[Path], slide_folders: Sequence[Path] = (), annotations: Path | None = None
) -> list[Entry]:
    """Find what is to be shown.

    Args:
        paths: Slides, folders of slides, results of a slide, and folders of results.
        slide_folders: Folders to search for the slides of results.
        annotations: Folder of annotations; None means beside each slide.

    Returns:
        Entries in the order of the paths; a slide and its result are one.

    Raises:
        PathosegError: A path does not exist or holds nothing to show.
    """
    apart = () if annotations is None else (annotations,)
    slides, results = dict[str, Path](), list[Entry]()
    known = Known(
        find_slides(slide_folders, apart) if slide_folders else {}, asked=bool(slide_folders)
    )
    outs = list[Path]()
    for path in paths:
        if not path.exists():
            raise PathosegError(f"{path} does not exist.", "Check the path.")
        if path.is_file() and not is_slide(path):
            raise PathosegError(
                f"{path} is in no format that pathoseg reads.",
                "Give slides, or the folder that `pathoseg infer` wrote its results into.",
            )
        if path.is_file() or is_zarr_slide(path):
            slides[_key(slides, path.name, path)] = path
        elif _holds_results(path):
            outs.append(path)
        else:
            for name, slide in find_slides([path], apart).items():
                slides[_key(slides, name, slide)] = slide
    given = Known({**known.by_name, **slides}, known.asked)
    for out in outs:
        results += _results(out, given)
    shown = {entry.slide.resolve() for entry in results if entry.slide is not None}
    alone = [Entry(name, path) for name, path in slides.items() if path.resolve() not in shown]
    entries = [_annotated(entry, annotations) for entry in _named_apart([*results, *alone])]
    if not entries:
        raise PathosegError(
            f"There is nothing to show in {', '.join(map(str, paths))}.",
            "Give slides, or the folder that `pathoseg infer` wrote its results into.",
        )
    return entries


def _key(slides: Mapping[str, Path], name: str, slide: Path) -> str:
    """Return the name of a slide, or its path where another slide has that name."""
    return name if slides.get(name, slide).resolve() == slide.resolve() else str(slide)


def _holds_results(folder: Path) -> bool:
    return (folder / STATES).is_dir() or next(_result_folders(folder), None) is not None


def _result_folders(out: Path) -> Iterator[Path]:
    """Yield the folders of results in a folder, itself included, whole or not."""
    for place, folders, files in os.walk(out):
        if FILES.mask in files or (SUMMARY in files and "config.toml" not in files):
            yield Path(place)
            folders.clear()
        folders[:] = sorted(name for name in folders if name[0] != "." and name != STATES)


def _results(out: Path, known: Known) -> Iterator[Entry]:
    """Yield the results in a folder, and the slides of its batch that have none yet."""
    seen = set[Path]()
    for folder in _result_folders(out):
        batch = next((p for p in (out, *folder.parents) if (p / STATES).is_dir()), out)
        state = None
        if folder != batch and folder.is_relative_to(batch):
            place = state_file(batch, folder)
            state = read_state(place)
            seen.add(place.resolve())
        yield _result(batch, folder, state, known)
    for path in sorted((out / STATES).glob("**/[!.]*.json")):
        state = read_state(path)
        if state is not None and path.resolve() not in seen:
            within = path.parent.relative_to(out / STATES)
            name = (within / Path(state.slide).name).as_posix()
            told = f"{state.problem} {state.hint}".strip() if state.status == "failed" else ""
            status = "cut short" if state.status == "done" else state.status
            slide = _slide(out, state.slide, name, known)
            yield Entry(name, slide, None, None, status, told, batch=out)


def _result(out: Path, folder: Path, state: State | None, known: Known) -> Entry:
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
    given = name if state is None else state.slide
    slide = _slide(out, given, name, known)
    if slide is None and not problem:
        problem = (
            f"The slide {given} is not where it was when it was segmented: only the mask is "
            "shown. Name the folder that it is in now with --slides DIR."
        )
    return Entry(name, slide, folder, None, status, problem, summary)


def _slide(out: Path, given: str, name: str, known: Known) -> Path | None:
    """Return a slide's file: where `--slides` has it, where it was, or among the slides given."""
    found = known.slide(name)
    if found is not None and known.asked:
        return found
    # The path is as it was given to infer, most likely in the folder in which `out` was made.
    places = [Path(given), *(folder / given for folder in out.resolve().parents[:2])]
    return next((path for path in places if path.is_file() or is_zarr_slide(path)), found)


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


def _annotated(entry: Entry, folder: Path | None) -> Entry:
    """Add a slide's annotation file to its entry, from the folder that mirrors its own first."""
    if entry.slide is None:
        return entry
    within = PurePosixPath(entry.name).parent
    places = [folder]
    if folder is not None and within.parts and (folder / within).is_dir():
        places.insert(0, folder / within)
    try:
        found = (find_annotation(entry.slide, place) for place in places)
        return replace(entry, annotation=next((path for path in found if path is not None), None))
    except PathosegError as error:
        return replace(entry, problem=entry.problem or str(error))
