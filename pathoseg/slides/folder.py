"""Finding the slides in a directory."""

from __future__ import annotations

from pathlib import Path

from pathoseg.errors import PathosegError
from pathoseg.slides.image_reader import is_image
from pathoseg.slides.tiff_reader import is_tiff

# By these names a file is meant as a slide, whatever is in it: a damaged one must be told of.
_SUFFIXES = {
    ".svs", ".svslide", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".czi", ".dcm", ".qptiff",
    ".tif", ".tiff", ".png", ".jpg", ".jpeg", ".bmp",
}  # fmt: skip
_MASK_SUFFIXES = {".png", ".tif", ".tiff"}
_DICOM_MAGIC, _DICOM_MAGIC_AT = b"DICM", 128
_SERIES_TAG = b"\x20\x00\x0e\x00UI"  # SeriesInstanceUID, explicit little endian
_HEAD_BYTES = 65_536


def slides_in(folder: Path) -> list[Path]:
    """The slides directly in a directory, sorted by name.

    Left out are hidden files, subdirectories, index masks (`X_mask.png` or `.tif` beside a slide
    X), all but the first file of a DICOM series, and whatever is neither named like a slide nor
    begins like one.

    Raises:
        PathosegError: There is no such directory, or no slide in it.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise PathosegError(
            f"{folder} cannot be listed: {error.strerror}.", "Give a directory that holds slides."
        ) from error
    meant = [path for path in files if not path.name.startswith(".") and _is_slide(path)]
    slides = _first_of_series([path for path in meant if not _is_mask(path, meant)])
    if not slides:
        raise PathosegError(
            f"{folder} holds no slides.",
            "Give a directory that holds them directly; directories inside it are not searched.",
        )
    return slides


def _is_slide(path: Path) -> bool:
    if path.suffix.lower() in _SUFFIXES:
        return True
    head = _head(path)
    return is_tiff(head) or is_image(head) or _is_dicom(head)


def _is_mask(path: Path, meant: list[Path]) -> bool:
    """Return True if a file is the index mask of another: `X_mask.png` of `X.svs`."""
    if path.suffix.lower() not in _MASK_SUFFIXES or not path.stem.endswith("_mask"):
        return False
    masked = path.stem.removesuffix("_mask")
    return any(other.name.startswith(f"{masked}.") for other in meant)


def _first_of_series(slides: list[Path]) -> list[Path]:
    """One file for each DICOM series, which is one slide: OpenSlide finds the others by itself."""
    first = {_series(path) or path: path for path in reversed(slides)}
    return sorted(first.values())


def _series(path: Path) -> bytes | None:
    """The SeriesInstanceUID of a DICOM file, None for other files."""
    head = _head(path)
    start = head.find(_SERIES_TAG) + len(_SERIES_TAG)
    if not _is_dicom(head) or start < len(_SERIES_TAG):
        return None
    length = int.from_bytes(head[start : start + 2], "little")
    return head[start + 2 : start + 2 + length]


def _is_dicom(head: bytes) -> bool:
    return head.startswith(_DICOM_MAGIC, _DICOM_MAGIC_AT)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:  # opening it as a slide tells why
        return b""
