"""What OME-XML states of an image: microns per pixel and magnification."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from defusedxml import ElementTree

from pathoseg.geometry import Mpp, Size
from pathoseg.slides.resolution import MICRONS_PER_UNIT, positive, stated_mpp


def ome_mpp(xml: str, size: Size) -> Mpp | None:
    """The physical pixel size of the image with these pixels, None where it has none.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    for pixels in ElementTree.fromstring(xml).iterfind(".//{*}Pixels"):
        if (pixels.get("SizeX"), pixels.get("SizeY")) == (str(size.width), str(size.height)):
            x, y = _microns(pixels, "PhysicalSizeX"), _microns(pixels, "PhysicalSizeY")
            return stated_mpp(x, y)
    return None


def ome_magnification(xml: str) -> float | None:
    """The nominal magnification of the first objective, None where there is none.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    objective = ElementTree.fromstring(xml).find(".//{*}Objective")
    return None if objective is None else positive(objective.get("NominalMagnification"))


def _microns(pixels: Element, name: str) -> float | None:
    length = positive(pixels.get(name))
    unit = MICRONS_PER_UNIT.get(pixels.get(f"{name}Unit", "µm"))
    return None if length is None or unit is None else length * unit
