"""The folder of a batch: results that appear whole or not at all, and how far each slide is.

OUT/<slide>/               the result of a slide, in folders as its slides are
OUT/states/<slide>.json    how far it is
OUT/.work/<slide>/         what is not whole (slide_job.py)
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from uuid import uuid4

from pathoseg.errors import PathosegError
from pathoseg.outputs.atomic import sync_tree, write_text
from pathoseg.outputs.report import Summary, read_summary
from pathoseg.tiles.fingerprint import Fingerprint
from pathoseg.typed_json import from_json

STATES, WORK = "states", ".work"
# In the folder of a slide:
MASK, ZARR_MASK, DICOM_MASK = "mask.ome.tiff", "mask.ome.zarr", "mask.dcm"
PROBABILITY, UNCERTAINTY = "probability.ome.tiff", "uncertainty.ome.tiff"
REGIONS = "regions.geojson"
OBJECTS, OBJECT_TABLE = "objects.geojson", "objects.csv"
OVERLAY = "overlay.png"
SUMMARY = "summary.json"  # written last, so a folder that has it is whole


@dataclass(frozen=True)
class Provenance:
    """The model and the options that results of a batch are made with.

    Attributes:
        model: Identity of the bundle (`bundle_id`).
        bundle: Its folder, as it was given.
        options: Option as `table.key` to its value as JSON; what changes no result is left out.
    """

    model: str
    bundle: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class State:
    """The state of a slide in a batch.

    Attributes:
        slide: Its path as it was given.
        status: "begun" by a process that works on it, or that was stopped or killed.
        key: A hash of all that its result depends on: the file, the model, the options.
        attempts: Number of times that it was begun.
        host: The host of the last attempt.
        seconds: Duration of each attempt that came to an end, the last one last.
        outputs: Files and folders of the last whole result to their bytes (`stored_bytes`).
        problem: Why it failed.
        hint: The hint that mends it.
        provenance: Of the last attempt; None in states of earlier versions.
        place: The slide's absolute path; empty in states of earlier versions.
        written: When, in seconds of the file system's clock; 0 before it is read back.
    """

    slide: str
    status: Literal["begun", "done", "failed"]
    key: str
    attempts: int
    host: str
    seconds: tuple[float, ...] = ()
    outputs: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    hint: str = ""
    provenance: Provenance | None = None
    place: str = ""
    written: float = 0.0

    def is_whole(self, folder: Path) -> bool:
        """Return True if all outputs are in `folder`, none of them cut short."""
        try:
            return self.status == "done" and all(
                stored_bytes(folder / name) == size for name, size in self.outputs.items()
            )
        except OSError:
            return False


def stored_bytes(path: Path) -> int:
    """Return the size of a file, or the sum over the files in a folder and the folders inside it.

    Raises:
        OSError: There is no such file or folder.
    """
    if not path.is_dir():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if not each.is_dir())


def state_file(out: Path, folder: Path) -> Path:
    """Return the state file of the slide whose result goes into `folder`."""
    within = folder.relative_to(out)
    return out / STATES / within.with_name(f"{within.name}.json")


def read_state(path: Path) -> State | None:
    """Read a slide's state file; None if it is missing, broken or of another version."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = json.load(file)
        if "mend" in entries:  # the key's name up to 4b9ee32
            entries["hint"] = entries.pop("mend")
        return replace(from_json(State, entries), written=path.stat().st_mtime)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def write_state(path: Path, state: State) -> None:
    """Replace a slide's state file, whole or not at all.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    entries = asdict(state)
    del entries["written"]  # the file's own time
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(entries, indent=2) + "\n")


def result_folders(out: Path, slides: Mapping[Path, str]) -> dict[Path, Path]:
    """Choose the folder of each slide's result: its name without the suffix, or the whole name.

    The whole name is used where another slide of this call or of an earlier batch has the shorter
    one, or where it is a folder of slides, in this call or in an earlier batch, or is `states`. A
    slide that has either name from an earlier batch keeps it.

    Args:
        out: The folder of the batch.
        slides: By file, the name, whose folders are mirrored.

    Returns:
        By slide, its folder in `out`.

    Raises:
        PathosegError: Two slides would share a folder, or one lie in another's, or in one that is
            called as that of a batch's states.
    """
    names = {slide: PurePosixPath(name) for slide, name in slides.items()}
    stems = Counter(name.with_suffix("") for name in names.values())
    parents = {parent for name in names.values() for parent in name.parents}
    folders = dict[Path, Path]()
    for slide, name in names.items():
        stem = name.with_suffix("")
        has_stem = _owner(out, out / stem)
        if has_stem is not None or _owner(out, out / name) == name.name:
            free = has_stem == name.name
        else:
            holds_others = stem in parents or (out / STATES / stem).is_dir()
            free = stems[stem] == 1 and not holds_others and stem.name != STATES
        folders[slide] = out / (stem if free else name)
    _refuse_shared(folders, out)
    return folders


def _owner(out: Path, folder: Path) -> str | None:
    """Return the file name of the slide whose result is, or was to be, in `folder`; None if none.

    It is by the slide's state, whatever the attempt came to.
    """
    state = read_state(state_file(out, folder))
    return None if state is None else Path(state.slide).name


def _refuse_shared(folders: Mapping[Path, Path], out: Path) -> None:
    slides = dict[Path, Path]()
    for slide, folder in folders.items():
        if (other := slides.setdefault(folder, slide)) is not slide:
            raise PathosegError(
                f"{other} and {slide} would share the result folder {folder}.",
                "Segment them in two calls with different --out folders, or give the folder that "
                "holds both: then results lie in folders like theirs.",
            )
    for slide, folder in folders.items():
        above = folder.parents[: len(folder.relative_to(out).parts) - 1]
        inside = next((p for p in above if p in slides or state_file(out, p).exists()), None)
        if inside is not None:
            raise PathosegError(
                f"The result of {slide} would lie in {inside}, which is in use.",
                "Rename the folder that the slide is in.",
            )
        kept = next((p for p in above if p.name == STATES), None)
        if kept is not None or (folder.name == STATES and _owner(out, folder) is None):
            raise PathosegError(
                f"The result of {slide} would lie in {kept or folder}. Folders called {STATES} are "
                "for the states of a batch, and no results are looked for in them.",
                f"Rename the {'slide' if kept is None else 'folder that the slide is in'}.",
            )


def refuse_strangers(out: Path, folders: Mapping[Path, Path]) -> None:
    """Refuse to replace what is no result: the user's folder or file of the name of one.

    Args:
        out: The folder of the batch.
        folders: The folder of each slide's result.

    Raises:
        PathosegError: There is one.
    """
    for slide, folder in folders.items():
        if not os.path.lexists(folder):
            continue
        state = read_state(state_file(out, folder))
        is_result = folder.is_dir() and (
            (state is not None and state.status == "done")
            or _has_summary(folder)
            or not any(folder.iterdir())
        )
        if not is_result:
            raise PathosegError(
                f"{folder} is no result, and that of {slide} would replace it.",
                "Give --out another folder, or move it away.",
            )


def _has_summary(folder: Path) -> bool:
    with suppress(PathosegError):
        read_summary(folder / SUMMARY)
        return True
    return False


def refuse_namesakes(out: Path, folders: Mapping[Path, Path]) -> None:
    """Refuse slides whose folder is that of another slide with the same file name.

    Where that one is no longer at its place, it was moved, and may be this one.

    Args:
        out: The folder of the batch.
        folders: The folder of each slide's result.

    Raises:
        PathosegError: There is one.
    """
    for slide, folder in folders.items():
        before = read_state(state_file(out, folder))
        if before is None or before.status == "failed" or Path(before.slide).name != slide.name:
            continue
        other = Path(before.place or before.slide)
        if _is_another(other, slide):
            raise PathosegError(
                f"{folder} is the result of another {slide.name}, {other}.",
                "Give --out another folder, give the folder that holds both slides, or replace "
                "that result with --overwrite.",
            )


def _is_another(other: Path, slide: Path) -> bool:
    try:
        if other.samefile(slide):
            return False
        one, two = Fingerprint.of(other), Fingerprint.of(slide)
    except (OSError, PathosegError):
        return False
    return (one.size, one.digest) != (two.size, two.digest)  # a copy has a time of its own


def results(
    out: Path, pass_over: Callable[[PathosegError], None] = lambda _: None
) -> dict[Path, Summary]:
    """Read the summaries of all results in `out`, at any depth, without those of batches inside.

    Args:
        out: The folder of the batch.
        pass_over: Told of each summary.json that is of something else, or broken.

    Returns:
        By the result's folder, in order.
    """
    found = dict[Path, Summary]()
    for place, folders, files in os.walk(out):
        if SUMMARY in files:
            try:
                found[Path(place)] = read_summary(Path(place, SUMMARY))
            except PathosegError as error:
                pass_over(error)
        # Earlier versions called the result of `states.svs` so, too, where it lay in a folder.
        holds_states = STATES in folders and not Path(place, STATES, MASK).is_file()
        if Path(place) in found or (holds_states and Path(place) != out):
            folders.clear()
        folders[:] = [
            name for name in folders if name[0] != "." and not (holds_states and name == STATES)
        ]
    return dict(sorted(found.items()))


def states(out: Path) -> dict[str, State]:
    """Read all state files in `out`, by the slides' names."""
    found = dict[str, State]()
    for path in sorted((out / STATES).glob("**/[!.]*.json")):
        if (state := read_state(path)) is not None:
            within = path.parent.relative_to(out / STATES)
            found[(within / Path(state.slide).name).as_posix()] = state
    return found


def failures(states: Mapping[str, State]) -> dict[str, PathosegError]:
    """Return why slides failed, by the slides' names."""
    return {
        name: PathosegError(state.problem, state.hint)
        for name, state in states.items()
        if state.status == "failed"
    }


def sweep(out: Path) -> None:
    """Remove the empty folders of the work in `out`, but none of a slide that a process is at."""
    empty = list[str]()
    for place, folders, files in os.walk(out / WORK):
        if files:  # a slide's lease: its process has yet to fill the folders inside
            folders.clear()
        else:
            empty.append(place)
    for place in reversed(empty):
        with suppress(OSError):  # a folder in it is in use
            Path(place).rmdir()


@contextmanager
def result_folder(folder: Path, work: Path, outputs: Collection[str]) -> Iterator[Path]:
    """Make a context that yields a folder to write into, which replaces `folder` at the end.

    Where another process has put the same result there at the same moment, that one stays. After an
    error `folder` is as it was.

    Args:
        folder: The folder of the result.
        work: A folder on the same disk for what is not whole.
        outputs: Names of the former result's files and folders. What else is in `folder` is the
            user's, and is kept; all is the former result's where no name is known.

    Raises:
        PathosegError: The disk is full or cannot be written.
    """
    mark = uuid4().hex[:8]
    partial, old = work / f"new-{mark}", work / f"old-{mark}"
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            if outputs:
                _keep_others(folder, partial, outputs)
            folder.replace(old)
        try:
            partial.replace(folder)
        except OSError:
            if not (folder / SUMMARY).exists():
                if old.exists() and not folder.exists():
                    old.replace(folder)
                raise
    except OSError as error:
        raise PathosegError(
            f"The result {folder} cannot be written ({error.strerror or error}).",
            "Free space there or give --out another disk, then run again with --resume.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if os.path.lexists(folder):  # else `put_back` needs it
            shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path, work: Path) -> None:
    """Put the former result back where a kill came while `result_folder` replaced it.

    Args:
        folder: The folder of the result.
        work: As for `result_folder`.

    Raises:
        OSError: The disk cannot be written.
    """
    for old in sorted(work.glob("old-*")):
        if not os.path.lexists(folder):
            old.replace(folder)


def _keep_others(folder: Path, partial: Path, outputs: Collection[str]) -> None:
    """Links the user's files and folders into the new result, so that no kill loses them."""
    for each in folder.iterdir():
        kept = partial / each.name
        if each.name in outputs or kept.exists():
            continue
        if each.is_dir():
            shutil.copytree(each, kept, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(each, kept)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without links
        shutil.copy2(source, target)
