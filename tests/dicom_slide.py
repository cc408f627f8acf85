"""A DICOM whole-slide image of one level, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, dcmwrite
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, VLWholeSlideMicroscopyImageStorage

ORIGIN = (20.0, 40.0)  # mm
SIDE = 128
ROOT = "2.25.4711"


def code(value: str, scheme: str, meaning: str) -> Dataset:
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = value, scheme, meaning
    return item


def write_dicom_slide(
    path: Path,
    pixels: NDArray[np.uint8],
    mpp: float = 0.5,
    change: Callable[[Dataset], object] = lambda dataset: None,
    number: int = 1,
) -> Path:
    """Write an image of one series, in tiles without compression.

    Args:
        path: The file.
        pixels: Shape (height, width, 3).
        mpp: Microns per pixel.
        change: Changes the elements before they are written.
        number: Of the image in its series.
    """
    height, width, _ = pixels.shape
    padded = np.pad(pixels, ((0, -height % SIDE), (0, -width % SIDE), (0, 0)))
    tiles = [
        padded[top : top + SIDE, left : left + SIDE].tobytes()
        for top in range(0, height, SIDE)
        for left in range(0, width, SIDE)
    ]
    slide = Dataset()
    slide.file_meta = FileMetaDataset()
    slide.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    slide.SpecificCharacterSet = "ISO_IR 100"
    slide.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    slide.SOPClassUID = VLWholeSlideMicroscopyImageStorage
    slide.SOPInstanceUID = f"{ROOT}.3.{number}"
    slide.StudyDate = slide.ContentDate = "20250131"
    slide.StudyTime = slide.ContentTime = "235959"
    slide.AcquisitionDateTime = "20250131235959"
    slide.AccessionNumber, slide.ReferringPhysicianName = "A1", None
    slide.Modality, slide.Manufacturer, slide.ManufacturerModelName = "SM", "tests", "none"
    slide.DeviceSerialNumber, slide.SoftwareVersions = "1", "1"
    slide.PatientName, slide.PatientID = "Müller^Jörg", "P1"
    slide.PatientBirthDate, slide.PatientSex = None, "O"
    slide.StudyInstanceUID, slide.SeriesInstanceUID = f"{ROOT}.1", f"{ROOT}.2"
    slide.StudyID, slide.SeriesNumber, slide.InstanceNumber = "S1", 7, number
    slide.FrameOfReferenceUID, slide.PositionReferenceIndicator = f"{ROOT}.4", "SLIDE_CORNER"
    slide.DimensionOrganizationType = "TILED_FULL"
    slide.SamplesPerPixel, slide.PhotometricInterpretation = 3, "RGB"
    slide.PlanarConfiguration, slide.NumberOfFrames = 0, len(tiles)
    slide.Rows = slide.Columns = SIDE
    slide.BitsAllocated = slide.BitsStored = 8
    slide.HighBit, slide.PixelRepresentation = 7, 0
    slide.LossyImageCompression = "00"
    slide.ContainerIdentifier, slide.IssuerOfTheContainerIdentifierSequence = "Schnitt Ä", []
    slide.ContainerTypeCodeSequence = [code("433466003", "SCT", "Microscope slide")]
    specimen = Dataset()
    specimen.SpecimenIdentifier, specimen.SpecimenUID = "Gewebe Ö", f"{ROOT}.5"
    specimen.IssuerOfTheSpecimenIdentifierSequence = []
    specimen.SpecimenPreparationSequence = []
    slide.SpecimenDescriptionSequence = [specimen]
    slide.TotalPixelMatrixColumns, slide.TotalPixelMatrixRows = width, height
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem = ORIGIN
    slide.TotalPixelMatrixOriginSequence = [origin]
    slide.ImageOrientationSlide = [0, -1, 0, -1, 0, 0]
    measures, groups = Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [mpp / 1000, mpp / 1000], 0.004
    groups.PixelMeasuresSequence = [measures]
    slide.SharedFunctionalGroupsSequence = [groups]
    slide.add_new("PixelData", "OB", b"".join(tiles))
    change(slide)
    dcmwrite(path, slide, enforce_file_format=True)
    return path
