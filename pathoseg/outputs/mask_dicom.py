"""Writes a mask as DICOM SEG while its bands arrive, where the slide is DICOM.

    mask.dcm
      header              (1) made by highdicom from the slide's own header and a blank tile
      functional groups   an item a frame: its segment, and where it lies (TILED_SPARSE)
      pixel data          frames of 512 × 512 px of one segment, a bit a pixel, none of them empty

(2) A strip of 512 rows is filled. (3) What it holds of each class goes, tile by tile, to the ends
of two unnamed files, of frames and of items. (4) Once all rows are there, the header, which tells
their number, is written, and behind it the two files. So what is held is a strip, whatever the
height. highdicom alone would hold the whole mask, and several objects for each of its frames.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from struct import Struct
from tempfile import TemporaryFile
from typing import IO

import highdicom as hd
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmwrite
from pydicom.filebase import DicomBytesIO
from pydicom.filereader import read_partial
from pydicom.filewriter import write_dataset
from pydicom.misc import is_dicom
from pydicom.sequence import Sequence
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.uid import UID, VLWholeSlideMicroscopyImageStorage

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Size
from pathoseg.outputs.atomic import naming, replaced
from pathoseg.outputs.pyramid import TILE, Add
from pathoseg.version import __version__

_NEEDED = (
    *("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID"),
    *("TotalPixelMatrixOriginSequence", "ImageOrientationSlide"),
    *("ContainerIdentifier", "SpecimenDescriptionSequence", "ContentDate", "ContentTime"),
)
_MAY_BE_EMPTY = (
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID"),
    *("StudyDate", "StudyTime"),
)
_HINT = (
    "Set [outputs] dicom_seg to false for this slide, or export it again as a DICOM whole-slide "
    "image that has what is missing."
)
_HEAD_ENDS = 0x0048_0007  # TotalPixelMatrixRows: by then a file has told which image it is
_FUNCTIONAL_GROUPS = 0x5200_9230
_ELEMENT = Struct("<HH2sHL")  # of explicit VR, little endian: tag, VR, length
_ITEM = Struct("<HHL")
_UNKNOWN_LENGTH = 0xFFFF_FFFF
_MOST_BYTES = 2**32 - 2  # of pixel data, whose length has 32 bits
_THICKNESS = 0.001  # mm, of a slide that does not tell its own
_LONGEST_LABEL = 64
_LATER = "2.25.0"  # a UID that is set once the content is known

# By the name of a class in lower case: category and type of its segment.
_TISSUE, _ABNORMAL = codes.SCT.Tissue, codes.SCT.MorphologicallyAbnormalStructure
_CODES: dict[str, tuple[Code, Code]] = {
    **dict.fromkeys(("tumor", "tumour", "neoplasm"), (_ABNORMAL, codes.SCT.Neoplasm)),
    "necrosis": (_ABNORMAL, codes.SCT.Necrosis),
    **dict.fromkeys(("stroma", "connective tissue"), (_TISSUE, codes.SCT.ConnectiveTissue)),
    **dict.fromkeys(("fat", "adipose tissue"), (_TISSUE, codes.SCT.AdiposeTissue)),
    **dict.fromkeys(("muscle", "muscle tissue"), (_TISSUE, codes.SCT.MuscleTissue)),
    **dict.fromkeys(("nucleus", "nuclei"), (codes.SCT.AnatomicalStructure, codes.SCT.Nucleus)),
}


@dataclass(frozen=True, eq=False, slots=True)
class DicomSource:
    """The DICOM image that is level 0 of a slide.

    Attributes:
        path: Its file.
        header: Its elements but for those of single frames and the pixels.
    """

    path: Path
    header: Dataset


def read_source(slide: Path, size: Size, others: Iterable[Path] = ()) -> DicomSource | None:
    """Read the header that a slide's segmentation refers to.

    Args:
        slide: A file of its DICOM series.
        size: The slide's pixels, which tell level 0 from the other images of the series.
        others: The further files of the series.

    Returns:
        None where the slide is not DICOM.

    Raises:
        PathosegError: The header lacks what a segmentation needs, or cannot be read.
    """
    if slide.is_dir() or not is_dicom(slide):
        return None
    with _refused(slide):
        path = _level0_file(slide, size, others)
        header = _read_until(path, _FUNCTIONAL_GROUPS - 1)
        header.decode()  # text is written in another character set
        lacking = [name for name in _NEEDED if not header.get(name)]
        invalid = [name for name in _NEEDED if name.endswith("UID") and not _is_valid(header, name)]
    if lacking:
        raise PathosegError(f"{path} lacks {', '.join(lacking)}, which mask.dcm needs.", _HINT)
    if invalid:
        raise PathosegError(
            f"{path} has a {' and a '.join(invalid)} that DICOM forbids, and mask.dcm would "
            "repeat it.",
            _HINT,
        )
    return DicomSource(path, header)


@contextmanager
def dicom_mask_writer(
    path: Path, source: DicomSource, frame: Frame, classes: ClassTable, model: str
) -> Iterator[Add]:
    """Make a context that yields what takes the next rows of a mask; `path` appears at its end.

    UIDs, dates and times follow from what is written: the same mask of the same slide by the same
    model gives the same bytes.

    Args:
        path: Replaced; after an error it is as it was.
        source: The slide's header.
        frame: The mask's.
        classes: Names and colours of the segments. Unread pixels are in none of them.
        model: The model's identity.

    Yields:
        A function of a band of shape (any number of rows, width).

    Raises:
        PathosegError: The header has impossible values, or the frames fill more than 4 GiB.
        OSError: The disk is full or cannot be written.
        ValueError: The bands have more or fewer rows than the mask.
    """
    with _refused(source.path):
        place = _Place.of(source.header, frame)
        header = _header(source.header, frame, classes, model, place)
        digest = hashlib.sha256(_encoded(header))
    with (
        naming(path),
        TemporaryFile(dir=path.parent) as items,
        TemporaryFile(dir=path.parent) as frames,
    ):
        writer = _FrameWriter(frame.size, len(classes), place, items, frames)
        yield writer.add
        writer.finish()
        # (4)
        digest.update(writer.digest.digest())
        header.NumberOfFrames = writer.count
        _set_uids(header, digest.hexdigest())
        with replaced(path) as draft, draft.open("wb") as file:
            file.write(_encoded(header))
            file.write(_ELEMENT.pack(0x5200, 0x9230, b"SQ", 0, _UNKNOWN_LENGTH))
            _copy(items, file)
            file.write(_ITEM.pack(0xFFFE, 0xE0DD, 0))  # the sequence ends
            file.write(_ELEMENT.pack(0x7FE0, 0x0010, b"OW", 0, frames.tell()))
            _copy(frames, file)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Make a context in which whatever a bad DICOM header leads to refuses the slide."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydicom's, of values that are not to the standard
            yield
    except PathosegError:
        raise
    except Exception as error:  # pydicom and highdicom raise what the header makes them meet
        raise PathosegError(
            f"The DICOM header of {path} cannot be taken over into mask.dcm ({error}).", _HINT
        ) from error


def _level0_file(slide: Path, size: Size, others: Iterable[Path]) -> Path:
    series = _read_until(slide, _HEAD_ENDS).get("SeriesInstanceUID")
    for path in (slide, *others):
        with suppress(Exception):  # a damaged file beside the slide is none of its own
            if is_dicom(path) and _is_level0(_read_until(path, _HEAD_ENDS), series, size):
                return path
    raise PathosegError(
        f"{slide} and the files of its series have no DICOM whole-slide image of {size.width} × "
        f"{size.height} px in tiles, which mask.dcm would refer to.",
        _HINT,
    )


def _is_level0(head: Dataset, series: str | None, size: Size) -> bool:
    return (
        head.get("SOPClassUID") == VLWholeSlideMicroscopyImageStorage
        and head.get("SeriesInstanceUID") == series
        and "VOLUME" in head.get("ImageType", ())  # no label, and no overview
        and head.get("TotalPixelMatrixColumns") == size.width
        and head.get("TotalPixelMatrixRows") == size.height
    )


def _read_until(path: Path, last: int) -> Dataset:
    """Read a file's elements up to a tag."""
    with path.open("rb") as file:
        return read_partial(file, lambda tag, _, __: tag > last)


def _is_valid(header: Dataset, name: str) -> bool:
    return name not in header or UID(str(header[name].value)).is_valid


def _header(
    source: Dataset, frame: Frame, classes: ClassTable, model: str, place: _Place
) -> Dataset:
    """(1) Return the header of a segmentation, but for its number of frames and its UIDs.

    Raises:
        Exception: Whatever highdicom meets in the source.
    """
    source = copy(source)
    source.TotalPixelMatrixColumns = source.TotalPixelMatrixRows = TILE  # as the blank tile has
    for name in _MAY_BE_EMPTY:
        source.setdefault(name, None)
    thickness = _thickness(source)
    native, spacing = (
        hd.PixelMeasuresSequence((mpp.y / 1000, mpp.x / 1000), thickness)
        for mpp in (frame.level0_mpp, frame.mpp)
    )
    # Where the source has none, or other ones than the user goes by.
    source.SharedFunctionalGroupsSequence = [Dataset()]
    source.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence = native
    header = hd.seg.Segmentation(
        [source],
        np.zeros((1, TILE, TILE), np.uint8),
        hd.seg.SegmentationTypeValues.BINARY,
        _segments(classes, model),
        series_instance_uid=_LATER,
        series_number=1,
        sop_instance_uid=_LATER,
        instance_number=1,
        manufacturer="pathoseg",
        manufacturer_model_name="pathoseg",
        software_versions=__version__,
        device_serial_number=model,
        pixel_measures=spacing,
        plane_positions=[place.of_tile(0, 0)],
        omit_empty_frames=False,
        tile_pixel_array=True,
        tile_size=(TILE, TILE),
        dimension_organization_type=hd.DimensionOrganizationTypeValues.TILED_SPARSE,
        specific_character_set="ISO_IR 192",
        content_date=source.ContentDate,
        content_time=source.ContentTime,
        series_description="pathoseg mask",
    )
    header.PatientOrientation = None  # that of the slide is told, but dciodvfy asks for this one
    # What is of the blank tile, and what tells when this was made.
    del header.PixelData, header.PerFrameFunctionalGroupsSequence
    del header.InstanceCreationDate, header.InstanceCreationTime
    for each in header.ContributingEquipmentSequence:
        each.pop("ContributionDateTime", None)
    header.SharedFunctionalGroupsSequence = [_shared_groups(source, spacing)]
    # Frames are in the order of their dimensions: by row, by column, by segment.
    segment, row, column = header.DimensionIndexSequence
    header["DimensionIndexSequence"].value = Sequence([row, column, segment])
    size = frame.size
    header.TotalPixelMatrixColumns, header.TotalPixelMatrixRows = size.width, size.height
    _set_uids(header, "")
    return header


def _thickness(source: Dataset) -> float:
    """Return the thickness of the image, in mm."""
    for groups in source.get("SharedFunctionalGroupsSequence") or ():
        for measures in groups.get("PixelMeasuresSequence") or ():
            if measures.get("SliceThickness"):
                return float(measures.SliceThickness)
    return _THICKNESS


def _shared_groups(source: Dataset, spacing: hd.PixelMeasuresSequence) -> Dataset:
    """Return the functional groups that all frames share: resolution and source image."""
    image = Dataset()
    image.ReferencedSOPClassUID = source.SOPClassUID
    image.ReferencedSOPInstanceUID = source.SOPInstanceUID
    image.PurposeOfReferenceCodeSequence = [
        hd.sr.CodedConcept.from_code(codes.DCM.SourceImageForImageProcessingOperation)
    ]
    derivation = Dataset()
    derivation.DerivationCodeSequence = [hd.sr.CodedConcept.from_code(codes.DCM.Segmentation)]
    derivation.SourceImageSequence = [image]
    groups = Dataset()
    groups.PixelMeasuresSequence = spacing
    groups.DerivationImageSequence = [derivation]
    return groups


def _segments(classes: ClassTable, model: str) -> list[hd.seg.SegmentDescription]:
    """Return the description of each class's segment."""
    algorithm = hd.AlgorithmIdentificationSequence(
        "pathoseg", codes.DCM.ArtificialIntelligence, __version__, parameters={"model": model}
    )
    described = list[hd.seg.SegmentDescription]()
    for number, (name, colour) in enumerate(zip(classes.names, classes.colours, strict=True), 1):
        category, kind = _CODES.get(name.casefold(), (_TISSUE, _TISSUE))
        segment = hd.seg.SegmentDescription(
            number,
            _label(name),
            category,
            kind,
            hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
            algorithm,
            display_color=hd.color.CIELabColor.from_rgb(*colour),
        )
        described.append(segment)
    return described


def _label(name: str) -> str:
    """Return the name of a class as DICOM allows it: 64 characters, none of them a separator."""
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    return shown.replace("\\", "/")[:_LONGEST_LABEL]


def _set_uids(header: Dataset, content: str) -> None:
    """Give a segmentation UIDs of its own, which follow from its content."""

    def uid(role: str) -> UID:
        return UID(f"2.25.{uuid.uuid5(uuid.NAMESPACE_OID, f'pathoseg {role} {content}').int}")

    header.SeriesInstanceUID = uid("series")
    header.SOPInstanceUID = uid("instance")
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID
    for item in (*header.DimensionOrganizationSequence, *header.DimensionIndexSequence):
        item.DimensionOrganizationUID = uid("dimensions")


def _encoded(header: Dataset) -> bytes:
    """Return the file's bytes up to what is told of each frame."""
    with warnings.catch_warnings(), BytesIO() as file:
        warnings.simplefilter("ignore")  # as in `_refused`: values that the source has, too
        dcmwrite(file, header, enforce_file_format=True)
        return file.getvalue()


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a mask's pixels on the glass, in mm.

    Attributes:
        origin: The centre of the first pixel: x, y and z.
        across: The vector from a pixel to its right neighbour.
        down: The vector from a pixel to the one below.
    """

    origin: NDArray[np.float64]
    across: NDArray[np.float64]
    down: NDArray[np.float64]

    @classmethod
    def of(cls, source: Dataset, frame: Frame) -> _Place:
        """Return the position of a frame: its upper left corner is the slide's.

        Raises:
            AttributeError, TypeError, ValueError: The source does not tell its own.
        """
        (first,) = source.TotalPixelMatrixOriginSequence
        corner = np.array(
            [
                first.XOffsetInSlideCoordinateSystem,
                first.YOffsetInSlideCoordinateSystem,
                first.get("ZOffsetInSlideCoordinateSystem") or 0,
            ],
            float,
        )
        right, below = np.array(source.ImageOrientationSlide, float).reshape(2, 3)
        across, down = right * frame.mpp.x / 1000, below * frame.mpp.y / 1000
        native = frame.level0_mpp
        # (first pixel's centre) - (half a pixel of the slide) + (half a pixel of the mask)
        corner -= (right * native.x + below * native.y) / 2000
        return cls(corner + (across + down) / 2, across, down)

    def of_tile(self, row: int, column: int) -> hd.PlanePositionSequence:
        """Return the place of a tile, whose row and column are counted in tiles."""
        top, left = row * TILE, column * TILE
        centre = self.origin + left * self.across + top * self.down
        return hd.PlanePositionSequence(
            hd.CoordinateSystemNames.SLIDE, list(map(float, centre)), (left + 1, top + 1)
        )


class _FrameWriter:
    """Takes the rows of a mask, and writes frames and their items.

    Args:
        size: The mask's.
        classes: How many there are, background included.
        place: The mask's.
        items: A file for the encoded functional groups.
        frames: A file for the pixels.

    Attributes:
        count: Number of frames.
        digest: Of all that was written.
    """

    def __init__(
        self, size: Size, classes: int, place: _Place, items: IO[bytes], frames: IO[bytes]
    ) -> None:
        self.count, self.digest = 0, hashlib.sha256()
        self._size, self._classes, self._place = size, classes, place
        self._items, self._frames = items, frames
        self._strip = np.zeros((TILE, size.rounded_up(TILE).width), np.uint8)
        self._rows = 0  # taken so far

    def add(self, band: NDArray[np.uint8]) -> None:
        """(2) Take the next rows.

        Raises:
            ValueError: They are more than the mask has.
        """
        if self._rows + len(band) > self._size.height:
            raise self._wrong_rows()
        while len(band):
            filled = self._rows % TILE
            taken, band = np.split(band, [TILE - filled])
            self._strip[filled : filled + len(taken), : self._size.width] = taken
            self._rows += len(taken)
            if self._rows % TILE == 0:
                self._write_strip()

    def finish(self) -> None:
        """Write what is left once all rows are added.

        Raises:
            ValueError: They are fewer than the mask has.
        """
        if self._rows != self._size.height:
            raise self._wrong_rows()
        if filled := self._rows % TILE:
            self._strip[filled:] = 0
            self._write_strip()
        if not self.count:  # DICOM has no image without frames
            self._write_frame(0, 0, 1, np.zeros((TILE, TILE), bool))

    def _write_strip(self) -> None:
        """(3) Write the tiles of the strip, which ends at the last row."""
        row = (self._rows - 1) // TILE
        for column in range(self._strip.shape[1] // TILE):
            tile = self._strip[:, column * TILE : (column + 1) * TILE]
            counts = np.bincount(tile.ravel(), minlength=self._classes)
            for segment in range(1, self._classes):
                if counts[segment]:
                    self._write_frame(row, column, segment, tile == segment)

    def _write_frame(self, row: int, column: int, segment: int, tile: NDArray[np.bool_]) -> None:
        pixels = np.packbits(tile, bitorder="little").tobytes()
        if self._frames.tell() + len(pixels) > _MOST_BYTES:
            raise PathosegError(
                "mask.dcm would have more than 4 GiB of pixels, and DICOM has no length for them.",
                "Set [outputs] dicom_seg to false for this slide; mask.ome.tiff holds the same.",
            )
        item = self._item(row, column, segment)
        self.digest.update(item)
        self.digest.update(pixels)
        self._items.write(item)
        self._frames.write(pixels)
        self.count += 1

    def _item(self, row: int, column: int, segment: int) -> bytes:
        """Return the encoded functional groups of a frame."""
        content, identified, groups = Dataset(), Dataset(), Dataset()
        content.DimensionIndexValues = [row + 1, column + 1, segment]
        identified.ReferencedSegmentNumber = segment
        groups.FrameContentSequence = [content]
        groups.PlanePositionSlideSequence = self._place.of_tile(row, column)
        groups.SegmentIdentificationSequence = [identified]
        file = DicomBytesIO()
        file.is_little_endian, file.is_implicit_VR = True, False
        write_dataset(file, groups)
        encoded = file.getvalue()
        return _ITEM.pack(0xFFFE, 0xE000, len(encoded)) + encoded

    def _wrong_rows(self) -> ValueError:
        return ValueError(f"the bands' rows are not the mask's {self._size.height}")


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)
