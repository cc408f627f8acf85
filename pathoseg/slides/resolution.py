"""The one rule of a slide's microns per pixel: what the file states, else what the user says."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree.ElementTree import Element

from defusedxml import ElementTree

from pathoseg.errors import PathosegError
from pathoseg.geometry import Mpp, Size

MICRONS_PER_INCH = 25_400.0

# Lengths as OME-XML, ImageJ and TIFF tags spell them, in microns.
MICRONS_PER_UNIT = {
    "nm": 1e-3,
    "µm": 1.0,  # micro sign
    "μm": 1.0,  # Greek mu
    "um": 1.0,
    "micron": 1.0,
    "microns": 1.0,
    "micrometer": 1.0,
    "mm": 1e3,
    "millimeter": 1e3,
    "cm": 1e4,
    "centimeter": 1e4,
    "m": 1e6,
    "in": MICRONS_PER_INCH,
    "inch": MICRONS_PER_INCH,
}

# Resolution tags of plain images mostly say how large to print them: 72 dpi is 353 µm, 2400 dpi
# 10.6 µm a pixel. No microscope's slide is that coarse, and none is finer than 0.01 µm.
_FINEST_TAG, _COARSEST_TAG = 0.01, 10.0


def slide_mpp(
    path: Path, stated: Mpp | None, magnification: float | None, assume_mpp: float | None
) -> Mpp:
    """The resolution of level 0.

    Args:
        path: The slide, for messages.
        stated: What the file says, which nothing overrules.
        magnification: The objective's power as the file says it; never enough by itself.
        assume_mpp: What the user says about files that say nothing.

    Raises:
        PathosegError: Nobody says, or `assume_mpp` is no resolution.
    """
    if stated is not None:
        return stated
    if assume_mpp is not None:
        return Mpp(assume_mpp, assume_mpp)
    if magnification:
        raise PathosegError(
            f"{path} states a magnification of {magnification:g}× but no microns per pixel.",
            f"Add --assume-mpp {10 / magnification:g} if it is what {magnification:g}× usually "
            "means, or its true value.",
        )
    raise PathosegError(
        f"{path} does not state its microns per pixel.",
        "Add --assume-mpp with the true value; usual are 0.25 for a 40× scan and 0.5 for 20×.",
    )


def stated_mpp(x: object, y: object) -> Mpp | None:
    """The resolution that a file's own words amount to, None where they amount to none.

    Args:
        x: Size of a pixel across, in microns: a number or its text.
        y: The same, down.
    """
    across, down = positive(x), positive(y)
    if across is None or down is None:
        return None
    return Mpp(across, down)


def aperio_mpp(description: str) -> Mpp | None:
    """Return the mpp of an Aperio description: `Aperio … |AppMag = 20|MPP = 0.4990`."""
    if not description.startswith("Aperio"):
        return None
    words = (part.partition("=") for part in description.split("|"))
    said = {key.strip(): value for key, _, value in words}
    return stated_mpp(said.get("MPP"), said.get("MPP"))


def tagged_mpp(x: object, y: object, unit: float) -> Mpp | None:
    """The resolution behind a plain image's resolution tags, None unless a microscope's.

    Args:
        x: Pixels per unit across: a number or its text.
        y: The same, down.
        unit: Microns per unit.
    """
    across, down = positive(x), positive(y)
    if across is None or down is None:
        return None
    mpp = unit / across, unit / down
    if not all(_FINEST_TAG <= side <= _COARSEST_TAG for side in mpp):
        return None
    return Mpp(*mpp)


def positive(value: object) -> float | None:
    """`value`, a number or its text, as a positive and finite number; None where it is none."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def ome_pixel_sizes(xml: str) -> dict[tuple[str, str], Mpp | None]:
    """Return the physical pixel size of each image by SizeX and SizeY, None where it has none.

    Of images of one size the first counts.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    found = dict[tuple[str, str], Mpp | None]()
    for pixels in ElementTree.fromstring(xml).iterfind(".//{*}Pixels"):
        x, y = _microns(pixels, "PhysicalSizeX"), _microns(pixels, "PhysicalSizeY")
        size = str(pixels.get("SizeX")), str(pixels.get("SizeY"))
        found.setdefault(size, stated_mpp(x, y))
    return found


def ome_mpp(xml: str, size: Size) -> Mpp | None:
    """The physical pixel size of the image with these pixels, None where it has none.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    return ome_pixel_sizes(xml).get((str(size.width), str(size.height)))


def ome_magnification(xml: str) -> float | None:
    """The nominal magnification of the first objective, None where there is none.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    objective = ElementTree.fromstring(xml).find(".//{*}Objective")
    return None if objective is None else positive(objective.get("NominalMagnification"))


def ome_significant_bits(xml: str) -> int:
    """The most bits that the values of an image use, 0 where none of the images says.

    Raises:
        ValueError, SyntaxError: The text is no XML, or declares entities.
    """
    images = ElementTree.fromstring(xml).iterfind(".//{*}Pixels")
    return max((int(positive(each.get("SignificantBits")) or 0) for each in images), default=0)


def _microns(pixels: Element, name: str) -> float | None:
    length = positive(pixels.get(name))
    unit = MICRONS_PER_UNIT.get(pixels.get(f"{name}Unit", "µm"))
    return None if length is None or unit is None else length * unit
