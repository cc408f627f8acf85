"""Finding the slides in a folder and the folders inside it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from pathoseg.errors import PathosegError
from pathoseg.platform_support import composed, is_file, is_folder
from pathoseg.slides.image_reader import is_image
from pathoseg.slides.tiff_reader import is_tiff
from pathoseg.slides.zarr_folder import METADATA, is_zarr_slide

# By these names a file is meant as a slide, whatever is in it: a damaged one must be told of.
_SUFFIXES = {
    ".svs", ".svslide", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".czi", ".dcm", ".qptiff",
    ".tif", ".tiff", ".png", ".jpg", ".jpeg", ".bmp",
}  # fmt: skip
_MASK_SUFFIXES = {".png", ".tif", ".tiff"}
_INDEX_SUFFIXES = {".vms", ".vmu"}  # text files that name the images of a Hamamatsu slide
_DICOM_SUFFIX, _DICOM_MAGIC, _DICOM_MAGIC_AT = ".dcm", b"DICM", 128
_SERIES = 0x0020_000E  # SeriesInstanceUID
# DICOM that refers to images, by the class that the head of a file names: segmentations,
# annotations, reports, PDFs, and the list of a folder's files (DICOMDIR).
_DICOM_ABOUT_IMAGES = (
    *(b"1.2.840.10008.5.1.4.1.1.66.", b"1.2.840.10008.5.1.4.1.1.91.1"),
    *(b"1.2.840.10008.5.1.4.1.1.88.", b"1.2.840.10008.5.1.4.1.1.104.1", b"1.2.840.10008.1.3.10"),
)
_HEAD_BYTES, _INDEX_BYTES = 256, 65_536

# What folders that hold no slides are known by: all entries of one of these sets are in them.
_DATA: tuple[frozenset[str], ...] = (
    frozenset({"cache.json", "pixels"}),  # tiles of a slide
    frozenset({"Slidedat.ini"}),  # the data of a MIRAX slide
    frozenset({"server.json", "summary.json"}),  # an image of a QuPath project
    *(frozenset({name}) for name in METADATA),
)
_MARKS: tuple[frozenset[str], ...] = (
    frozenset({"config.toml", "splits.csv"}),  # a run
    frozenset({"model.json", "weights.safetensors"}),  # a bundle
    frozenset({"summary.json", "mask.ome.tiff"}),  # the result of a slide
    *_DATA,
)

_log = logging.getLogger(__name__)


def find_slides(folders: Sequence[Path], passed_over: Collection[Path] = ()) -> dict[str, Path]:
    """The slides in some folders and the folders inside them, by name.

    A slide's name is its path relative to the folder that was given, with `/` between the parts.

    Left out are hidden files and folders; runs, bundles, results and caches of pathoseg, known by
    the files in them; the data of MIRAX and VMS slides and of QuPath projects; masks (`X_mask` and
    `X_classes` `.png` or `.tif` of a slide X, with its suffix or without); all but the first file
    of a DICOM series, and DICOM segmentations; and whatever is neither named like a slide nor
    begins like one. An OME-Zarr slide is a folder, in which nothing is searched.

    Args:
        folders: Where to look. A slide that two of them hold counts once.
        passed_over: Folders inside them that hold no slides, such as those of annotations.

    Returns:
        Name → file, in the order of the folders, sorted by name in each.

    Raises:
        PathosegError: A folder does not exist or holds no slide, or different slides have one name.
    """
    slides = dict[str, Path]()
    files = set[Path]()
    for folder in folders:
        found = _slides_below(folder, {path.resolve() for path in passed_over})
        if not found:
            raise PathosegError(
                f"{folder} holds no slides.", "Give a folder that holds them, at any depth."
            )
        for path in found:
            name, file = path.relative_to(folder).as_posix(), path.resolve()
            if len(folders) > 1 and file in files:
                continue
            if name in slides:
                raise PathosegError(
                    f"{slides[name]} and {path} are both called {name}.",
                    "Rename one, or give the folder that holds both: then their names have the "
                    "folders inside it.",
                )
            slides[name] = path
            files.add(file)
    return slides


def _slides_below(root: Path, passed_over: Collection[Path]) -> list[Path]:
    if is_zarr_slide(root):
        raise PathosegError(f"{root} is a slide, not a folder of slides.", "Give its folder.")
    meant = list[Path]()
    for files in _files_below(root, passed_over):
        named = {path.name for path in files}
        parts = set().union(*(_parts(path) for path in files)) & named
        own = [path for path in files if path.name not in parts and is_slide(path)]
        meant += _first_of_series(own)
    stems = {composed(stem) for path in meant for stem in (path.name, *_stems(path))}
    slides = [path for path in meant if not _is_mask(path, stems)]
    return sorted(slides, key=lambda path: path.relative_to(root).as_posix())


def _files_below(root: Path, passed_over: Collection[Path]) -> Iterator[list[Path]]:
    """The files and OME-Zarr slides of each folder, without hidden ones.

    Links are followed, each folder once.
    """
    waiting, seen = [root], set[Path]()
    while waiting:
        folder = waiting.pop()
        real = folder.resolve()
        if real in seen or (folder != root and real in passed_over):
            continue
        seen.add(real)
        try:
            entries = sorted(folder.iterdir())
        except OSError as error:
            if folder == root:
                raise PathosegError(
                    f"{folder} cannot be listed: {error.strerror}.",
                    "Give a directory that holds slides.",
                ) from error
            _log.warning("%s cannot be listed (%s): it is passed over.", folder, error.strerror)
            continue
        names = {path.name for path in entries}
        if folder != root and any(mark <= names for mark in _MARKS):
            continue
        shown = [path for path in entries if not path.name.startswith(".")]
        inside = [path for path in shown if is_folder(path)]
        whole = {path for path in inside if is_zarr_slide(path)}
        yield [path for path in shown if is_file(path) or path in whole]
        waiting += [path for path in reversed(inside) if path not in whole]


def _parts(path: Path) -> set[str]:
    """The names of the files that belong to a slide which is several files in one folder."""
    if path.suffix.lower() not in _INDEX_SUFFIXES:
        return set()
    try:
        with path.open(encoding="latin-1") as file:
            text = file.read(_INDEX_BYTES)
    except OSError:  # opening it as a slide tells why
        return set()
    return {line.partition("=")[2].strip() for line in text.splitlines()} - {path.name}


def is_data(names: Collection[str]) -> bool:
    """Return True if a folder of such entries is the data of one slide, with nothing else in it."""
    return any(mark.issubset(names) for mark in _DATA)


def files_of(path: Path) -> list[Path]:
    """Return the files of a slide that is several, the named one first; of others, that one.

    They are those of a DICOM series in its folder, those that a VMS or VMU file names (and that are
    there), and all that lies in the folder of a MIRAX slide.

    Raises:
        OSError: A folder cannot be listed.
    """
    suffix, others = path.suffix.lower(), list[Path]()
    if suffix == ".mrxs":
        others = sorted(path.with_suffix("").iterdir())
    elif suffix in _INDEX_SUFFIXES:
        named = (path.parent / name for name in sorted(_parts(path)))
        others = [file for file in named if file.is_file()]
    elif (series := _series(path)) is not None:
        beside = (file for file in sorted(path.parent.iterdir()) if file.name != path.name)
        others = [file for file in beside if file.is_file() and _image_series(file) == series]
    return [path, *others]


def _image_series(path: Path) -> str | None:
    """Return `_series` of a file; None for one that refers to images, as a segmentation does."""
    state = path.stat()
    return _image_series_then(path, state.st_size, state.st_mtime_ns)


@lru_cache(65_536)  # a folder may hold thousands of files, and each series in it asks for all
def _image_series_then(path: Path, size: int, modified: int) -> str | None:
    return _series(path) if is_slide(path) else None


def with_a_name(path: Path) -> Path:
    """Return the path of a slide, resolved where it ends in `.` or `..`, which name no slide."""
    return path.resolve() if path.name in ("", "..") else path


def is_slide(path: Path) -> bool:
    """Return True if a file or OME-Zarr folder looks like a slide by its name or first bytes."""
    suffix = path.suffix.lower()
    if suffix != _DICOM_SUFFIX and (suffix in _SUFFIXES or path.is_dir()):
        return True
    head = _head(path)
    if _is_dicom(head):
        return not any(kind in head for kind in _DICOM_ABOUT_IMAGES)
    return suffix == _DICOM_SUFFIX or is_tiff(head) or is_image(head)


def _stems(path: Path) -> Iterator[str]:
    """Yield the name up to each dot: the mask of X.ome.tif may be called X_mask.tif."""
    return (path.name[:at] for at, letter in enumerate(path.name) if letter == ".")


def _is_mask(path: Path, stems: Collection[str]) -> bool:
    """Return True if a file is a mask of another.

    Of `X.svs` that is `X_mask.png`, `X_classes.png`, `X.svs_mask.png` or `X.svs_classes.png`.
    """
    name = path.stem.removesuffix(".ome")  # of a pyramid, X_mask.ome.tif
    stem = name.removesuffix("_mask").removesuffix("_classes")
    return path.suffix.lower() in _MASK_SUFFIXES and stem != name and composed(stem) in stems


def _first_of_series(slides: list[Path]) -> list[Path]:
    """One file for each DICOM series, which is one slide: OpenSlide finds the others by itself."""
    first = {_series(path) or path: path for path in reversed(slides)}
    return sorted(first.values())


def _series(path: Path) -> str | None:
    """The SeriesInstanceUID of a DICOM file, None for other files."""
    if not _is_dicom(_head(path)):
        return None
    from pydicom.filereader import read_partial  # a tenth of a second, for DICOM alone

    try:
        with path.open("rb") as file:
            # Of the file itself: sequences name other series, which this one was derived from.
            found = read_partial(file, lambda tag, _, __: tag > _SERIES, specific_tags=[_SERIES])
            # Raw: pydicom would tell of a value that is not as the standard has it.
            return bytes(found.get_item(_SERIES).value).rstrip(b"\0 ").decode("ascii")
    except Exception:  # damaged in any way: opening it as a slide tells how
        return None


def _is_dicom(head: bytes) -> bool:
    return head.startswith(_DICOM_MAGIC, _DICOM_MAGIC_AT)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # opening it as a slide tells why
        return b""
