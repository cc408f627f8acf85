"""mask.dcm holds the mask, bit by bit, where the slide is, from bounded memory."""

from __future__ import annotations

import resource
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.sr.codedict import codes

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs import mask_dicom
from pathoseg.outputs.mask_dicom import DicomSource, dicom_mask_writer, read_source
from tests.dicom_slide import ORIGIN, ROOT, write_dicom_slide

CLASSES = ClassTable(("Tumör", "stroma", "never"), ((200, 0, 0), (0, 200, 0), (0, 0, 200)))
MODEL = "0123456789abcdef"
SLIDE = Size(423, 300)


def blobs(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Regions of a few tens of pixels, of every value a mask may have but that of `never`."""
    rng = np.random.default_rng(seed)
    values = np.array([0, 0, 1, 2, IGNORE], np.uint8)
    coarse = rng.choice(values, (height // 20 + 1, width // 20 + 1))
    return np.kron(coarse, np.ones((20, 20), np.uint8))[:height, :width]


def in_bands(mask: NDArray[np.uint8], rows: int) -> Iterator[NDArray[np.uint8]]:
    return (mask[top : top + rows] for top in range(0, len(mask), rows))


def slide_file(folder: Path, change: Callable[[Dataset], object] = lambda dataset: None) -> Path:
    pixels = np.zeros((SLIDE.height, SLIDE.width, 3), np.uint8)
    return write_dicom_slide(folder / "slide.dcm", pixels, change=change)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DicomSource:
    found = read_source(slide_file(tmp_path_factory.mktemp("slide")), SLIDE)
    assert found is not None
    return found


def write(
    path: Path,
    source: DicomSource,
    mask: NDArray[np.uint8],
    rows: int = 100,
    classes: ClassTable = CLASSES,
    mpp: float = 0.5,
) -> Path:
    frame = Frame.at(Size(mask.shape[1], mask.shape[0]), Mpp(mpp, mpp), mpp)
    with dicom_mask_writer(path, source, frame, classes, MODEL) as add:
        for band in in_bands(mask, rows):
            add(band)
    return path


def read_back(path: Path) -> NDArray[np.uint8]:
    read: NDArray[np.uint8] = hd.seg.segread(path).get_total_pixel_matrix(combine_segments=True)
    return read


def seen(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mask as segments tell it: unread pixels are in none."""
    return np.where(mask == IGNORE, 0, mask)


@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (513, 1), (512, 512), (1024, 1025)])
@pytest.mark.parametrize("rows", [100, 896])
def test_highdicom_reads_the_mask_back(
    tmp_path: Path, source: DicomSource, shape: tuple[int, int], rows: int
) -> None:
    mask = blobs(*shape)
    path = write(tmp_path / "mask.dcm", source, mask, rows)
    np.testing.assert_array_equal(read_back(path), seen(mask))
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=12)
@given(st.integers(1, 1100), st.integers(1, 1100), st.integers(1, 1200), st.integers(0, 99))
def test_masks_of_any_size_in_bands_of_any_height(
    tmp_path_factory: pytest.TempPathFactory,
    source: DicomSource,
    height: int,
    width: int,
    rows: int,
    seed: int,
) -> None:
    mask = blobs(height, width, seed)
    path = write(tmp_path_factory.mktemp("mask") / "mask.dcm", source, mask, rows)
    np.testing.assert_array_equal(read_back(path), seen(mask))


@pytest.mark.parametrize("value", [0, IGNORE])
def test_a_mask_without_any_class_has_one_empty_frame(
    tmp_path: Path, source: DicomSource, value: int
) -> None:
    mask = np.full((600, 700), value, np.uint8)
    path = write(tmp_path / "mask.dcm", source, mask)
    assert pydicom.dcmread(path).NumberOfFrames == 1
    np.testing.assert_array_equal(read_back(path), np.zeros_like(mask))


def test_a_model_of_one_class(tmp_path: Path, source: DicomSource) -> None:
    mask = np.minimum(blobs(600, 700), 1)
    path = write(tmp_path / "mask.dcm", source, mask, classes=ClassTable(("a",), ((1, 2, 3),)))
    np.testing.assert_array_equal(read_back(path), mask)


def test_frames_are_in_order_and_none_is_empty(tmp_path: Path, source: DicomSource) -> None:
    mask = np.zeros((1100, 1100), np.uint8)
    mask[0, 0], mask[1050, 600], mask[1050, 601] = 2, 1, 2
    seg = pydicom.dcmread(write(tmp_path / "mask.dcm", source, mask))
    items = seg.PerFrameFunctionalGroupsSequence
    indices = [list(item.FrameContentSequence[0].DimensionIndexValues) for item in items]
    assert indices == [[1, 1, 2], [3, 2, 1], [3, 2, 2]]
    frames = seg.pixel_array
    assert frames.shape == (3, 512, 512)
    assert frames.any(axis=(1, 2)).all()


def test_patient_study_specimen_and_source(tmp_path: Path, source: DicomSource) -> None:
    seg = hd.seg.segread(write(tmp_path / "mask.dcm", source, blobs(600, 700)))
    assert (seg.PatientName, seg.PatientID) == ("Müller^Jörg", "P1")
    assert (seg.StudyInstanceUID, seg.FrameOfReferenceUID) == (f"{ROOT}.1", f"{ROOT}.4")
    assert seg.ContainerIdentifier == "Schnitt Ä"
    assert seg.SpecimenDescriptionSequence[0].SpecimenIdentifier == "Gewebe Ö"
    assert (seg.StudyDate, seg.StudyTime, seg.AccessionNumber) == ("20250131", "235959", "A1")
    (series,) = seg.ReferencedSeriesSequence
    (image,) = series.ReferencedInstanceSequence
    referred = series.SeriesInstanceUID, image.ReferencedSOPInstanceUID
    assert referred == (f"{ROOT}.2", f"{ROOT}.3.1")
    (groups,) = seg.SharedFunctionalGroupsSequence
    (image,) = groups.DerivationImageSequence[0].SourceImageSequence
    assert image.ReferencedSOPInstanceUID == f"{ROOT}.3.1"


def test_segments_are_the_classes(tmp_path: Path, source: DicomSource) -> None:
    names = ("Tumor", "x" * 70, r"a\b", "Necrosis")
    classes = ClassTable(names, ((200, 0, 0), (0, 200, 0), (0, 0, 200), (9, 9, 9)))
    seg = hd.seg.segread(write(tmp_path / "m.dcm", source, blobs(600, 700), classes=classes))
    segments = [seg.get_segment_description(number) for number in seg.segment_numbers]
    assert [each.segment_label for each in segments] == ["Tumor", "x" * 64, "a/b", "Necrosis"]
    types = [each.segmented_property_type.meaning for each in segments]
    assert types == ["Neoplasm", "Tissue", "Tissue", "Necrosis"]
    assert segments[0].segmented_property_category == codes.SCT.MorphologicallyAbnormalStructure
    (algorithm,) = segments[0].algorithm_identification
    assert algorithm.AlgorithmName == "pathoseg"
    assert algorithm.AlgorithmParameters == f"model={MODEL}"
    lab = segments[0].RecommendedDisplayCIELabValue
    assert list(lab) == list(hd.color.CIELabColor.from_rgb(200, 0, 0).value)


@pytest.mark.parametrize("mpp", [0.5, 0.25, 1.3])
def test_pixels_are_where_those_of_the_slide_are(
    tmp_path: Path, source: DicomSource, mpp: float
) -> None:
    """The upper left corner of mask and slide is one, at whatever resolution."""
    frame = Frame.at(Size(2000, 1800), Mpp(0.5, 0.5), mpp)
    path = tmp_path / "mask.dcm"
    mask = np.zeros((frame.size.height, frame.size.width), np.uint8)
    row, column = 513, 600
    mask[row, column] = 1
    with dicom_mask_writer(path, source, frame, CLASSES, MODEL) as add:
        add(mask)
    seg = hd.seg.segread(path)
    (first,) = seg.TotalPixelMatrixOriginSequence
    (measures,) = seg.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    assert list(measures.PixelSpacing) == pytest.approx([mpp / 1000] * 2)
    assert measures.SliceThickness == 0.004
    assert list(seg.ImageOrientationSlide) == [0, -1, 0, -1, 0, 0]
    # Columns run along −y and rows along −x; half pixels lie between corner and centre.
    shift = (mpp - 0.5) / 2000
    placed = first.XOffsetInSlideCoordinateSystem, first.YOffsetInSlideCoordinateSystem
    assert placed == pytest.approx((ORIGIN[0] - shift, ORIGIN[1] - shift), abs=1e-9)
    # The same by highdicom's own way from pixels to the glass.
    (item,) = seg.PerFrameFunctionalGroupsSequence
    (position,) = item.PlanePositionSlideSequence
    from_frame = hd.spatial.PixelToReferenceTransformer(
        [position.XOffsetInSlideCoordinateSystem, position.YOffsetInSlideCoordinateSystem, 0],
        seg.ImageOrientationSlide,
        measures.PixelSpacing,
    )
    from_whole = hd.spatial.PixelToReferenceTransformer(
        [*placed, 0], seg.ImageOrientationSlide, measures.PixelSpacing
    )
    corner = position.ColumnPositionInTotalImagePixelMatrix - 1
    top = position.RowPositionInTotalImagePixelMatrix - 1
    np.testing.assert_allclose(
        from_frame(np.array([[column - corner, row - top]])),
        from_whole(np.array([[column, row]])),
        atol=1e-9,
    )


def test_the_same_content_gives_the_same_bytes_and_other_content_other_uids(
    tmp_path: Path, source: DicomSource
) -> None:
    mask = blobs(600, 700)
    one = write(tmp_path / "1.dcm", source, mask, 100).read_bytes()
    assert write(tmp_path / "2.dcm", source, mask, 512).read_bytes() == one
    mask[0, 0] = 2 if mask[0, 0] == 1 else 1
    other = pydicom.dcmread(write(tmp_path / "3.dcm", source, mask))
    renamed = ClassTable(("a", "b", "c"), CLASSES.colours)
    third = pydicom.dcmread(write(tmp_path / "4.dcm", source, mask, classes=renamed))
    first = pydicom.dcmread(tmp_path / "1.dcm")
    for name in ("SOPInstanceUID", "SeriesInstanceUID"):
        uids = {str(each[name].value) for each in (first, other, third)}
        assert len(uids) == 3
        assert all(pydicom.uid.UID(uid).is_valid for uid in uids)


@pytest.mark.parametrize("rows", [1023, 1025, 1024 + 512])
def test_bands_of_another_height_are_an_error_and_leave_nothing(
    tmp_path: Path, source: DicomSource, rows: int
) -> None:
    frame = Frame.at(Size(64, 1024), Mpp(0.5, 0.5), 0.5)

    def write_rows() -> None:
        with dicom_mask_writer(tmp_path / "mask.dcm", source, frame, CLASSES, MODEL) as add:
            for band in in_bands(np.ones((rows, 64), np.uint8), 100):
                add(band)

    with pytest.raises(ValueError, match="1024"):
        write_rows()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path: Path, source: DicomSource) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        with pytest.raises(OSError, match=r"mask\.dcm") as raised:
            write(tmp_path / "mask.dcm", source, blobs(2048, 2048))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_height(tmp_path: Path, source: DicomSource) -> None:
    write(tmp_path / "warm.dcm", source, blobs(600, 600))  # what the libraries make once
    band, peaks = blobs(300, 2000), []
    for bands in (12, 48):
        frame = Frame.at(Size(2000, 300 * bands), Mpp(0.5, 0.5), 0.5)
        path = tmp_path / f"{bands}.dcm"
        tracemalloc.start()
        try:
            with dicom_mask_writer(path, source, frame, CLASSES, MODEL) as add:
                for _ in range(bands):
                    add(band)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    strip = 512 * 2048
    assert path.stat().st_size > 2 * 28 * strip / 8, "two segments of 28 strips"
    assert peaks[1] < peaks[0] + strip / 10
    assert peaks[1] < 8 * strip, "a tile is counted in 8 bytes a pixel, and the copy is buffered"


def test_more_pixels_than_a_file_can_hold_are_refused(
    tmp_path: Path, source: DicomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_bytes = 512 * 512 // 8
    monkeypatch.setattr(mask_dicom, "_MOST_BYTES", 2 * frame_bytes)
    write(tmp_path / "mask.dcm", source, np.ones((512, 1024), np.uint8))
    with pytest.raises(PathosegError, match="4 GiB"):
        write(tmp_path / "none.dcm", source, np.ones((512, 1025), np.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["mask.dcm"]


def drop(name: str) -> Callable[[Dataset], None]:
    return lambda dataset: delattr(dataset, name)


@pytest.mark.parametrize(
    "name",
    [
        *("FrameOfReferenceUID", "StudyInstanceUID", "ContainerIdentifier"),
        *("TotalPixelMatrixOriginSequence", "ImageOrientationSlide", "ContentDate"),
        "SpecimenDescriptionSequence",
    ],
)
def test_a_slide_that_lacks_what_is_needed_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathosegError, match=f"{name}.*dicom_seg") as refusal:
        read_source(slide_file(tmp_path, drop(name)), SLIDE)
    assert "slide.dcm" in refusal.value.problem


@pytest.mark.parametrize("name", ["PatientID", "PatientSex", "StudyDate", "ReferringPhysicianName"])
def test_what_may_be_empty_may_be_missing(tmp_path: Path, name: str) -> None:
    source = read_source(slide_file(tmp_path, drop(name)), SLIDE)
    assert source is not None
    seg = pydicom.dcmread(write(tmp_path / "mask.dcm", source, blobs(64, 64)))
    assert not seg[name].value


def test_a_slide_that_is_not_tiled_is_refused(tmp_path: Path) -> None:
    path = slide_file(tmp_path, drop("TotalPixelMatrixColumns"))
    with pytest.raises(PathosegError, match="423 × 300"):
        read_source(path, SLIDE)


def test_values_that_highdicom_refuses_refuse_the_slide(tmp_path: Path) -> None:
    def change(dataset: Dataset) -> None:
        dataset.TotalPixelMatrixOriginSequence = [Dataset()]

    source = read_source(slide_file(tmp_path, change), SLIDE)
    assert source is not None
    with pytest.raises(PathosegError, match=r"slide\.dcm.*XOffset"):
        write(tmp_path / "mask.dcm", source, blobs(64, 64))
    assert [path.name for path in tmp_path.iterdir()] == ["slide.dcm"]


def test_a_uid_that_dicom_forbids_is_refused(tmp_path: Path, shared_data: Path) -> None:
    real = shared_data / "slides" / "dicom_camelyon_1152x700.dcm"
    with pytest.raises(PathosegError, match="lacks TotalPixelMatrixOriginSequence"):
        read_source(real, Size(1152, 700))

    def change(dataset: Dataset) -> None:
        dataset["FrameOfReferenceUID"]._value = "1.02.3"

    with pytest.raises(PathosegError, match="FrameOfReferenceUID that DICOM forbids"):
        read_source(slide_file(tmp_path, change), SLIDE)


def test_level_0_is_found_among_the_files_of_its_series(tmp_path: Path) -> None:
    def label(dataset: Dataset) -> None:
        dataset.ImageType = ["ORIGINAL", "PRIMARY", "LABEL", "NONE"]

    def other_series(dataset: Dataset) -> None:
        dataset.SeriesInstanceUID = f"{ROOT}.22"

    large, small = np.zeros((300, 423, 3), np.uint8), np.zeros((150, 212, 3), np.uint8)
    first = write_dicom_slide(tmp_path / "a.dcm", small, 1.0, number=1)
    write_dicom_slide(tmp_path / "b.dcm", large, change=other_series, number=2)
    write_dicom_slide(tmp_path / "c.dcm", large, change=label, number=3)
    write_dicom_slide(tmp_path / "d.dcm", large, number=4)
    (tmp_path / "notes.txt").write_text("DICM")
    (tmp_path / "bad.dcm").write_bytes(first.read_bytes()[:700] + b"\xff" * 700)
    (tmp_path / "aa").mkdir()
    source = read_source(first, SLIDE, sorted(tmp_path.iterdir()))
    assert source is not None
    assert source.path.name == "d.dcm"
    with pytest.raises(PathosegError, match="the files of its series have no DICOM"):
        read_source(first, SLIDE)  # which looks at no file but those that it is given


def test_a_file_of_another_program(tmp_path: Path, shared_data: Path) -> None:
    """Its frames have no thickness: it is 0, which DICOM forbids."""
    real = shared_data / "robustness" / "openslide-python" / "boxes_0.dcm"
    head = pydicom.dcmread(real, stop_before_pixels=True)
    size = Size(head.TotalPixelMatrixColumns, head.TotalPixelMatrixRows)
    source = read_source(real, size)
    assert source is not None
    mask = blobs(size.height, size.width)
    path = write(tmp_path / "mask.dcm", source, mask)
    np.testing.assert_array_equal(read_back(path), seen(mask))
    (measures,) = pydicom.dcmread(path).SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    assert measures.SliceThickness > 0


def test_what_is_no_dicom_has_no_source(tmp_path: Path) -> None:
    path = tmp_path / "slide.dcm"
    path.write_bytes(b"II*\0" * 99)
    assert read_source(path, SLIDE) is None


@pytest.mark.system
@pytest.mark.process
def test_dciodvfy_finds_no_error(tmp_path: Path, source: DicomSource) -> None:
    command = shutil.which("dciodvfy")
    if command is None:
        pytest.skip("dciodvfy (Debian's dicom3tools) is not installed")
    for name, mask in (("a", blobs(1100, 1300)), ("b", np.zeros((64, 64), np.uint8))):
        path = write(tmp_path / f"{name}.dcm", source, mask)
        told = subprocess.run([command, "-new", path], capture_output=True, text=True, check=False)
        lines = (told.stdout + told.stderr).splitlines()
        assert "Segmentation" in lines
        assert [line for line in lines if line.startswith(("Error", "Warning"))] == []


def test_a_slide_that_is_a_folder_is_no_dicom(tmp_path: Path) -> None:
    assert read_source(tmp_path, Size(8, 8)) is None
