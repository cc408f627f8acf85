"""Physical sizes and magnification in OME-XML."""

from __future__ import annotations

import pytest

from pathoseg.geometry import Mpp, Size
from pathoseg.slides.resolution import ome_magnification, ome_mpp

SIZE = Size(200, 100)


def _ome(pixels: str, instrument: str = "") -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
        f"{instrument}"
        '<Image ID="Image:0"><Pixels SizeX="20" SizeY="10" PhysicalSizeX="9" PhysicalSizeY="9"/>'
        f'</Image><Image ID="Image:1"><Pixels SizeX="200" SizeY="100" {pixels}/></Image></OME>'
    )


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ('PhysicalSizeX="0.25"', 'PhysicalSizeY="0.5"'),
        ('PhysicalSizeX="250" PhysicalSizeXUnit="nm"', 'PhysicalSizeY="0.5"'),
        (
            'PhysicalSizeX="0.00025" PhysicalSizeXUnit="mm"',
            'PhysicalSizeY="5e-5" PhysicalSizeYUnit="cm"',
        ),
        (
            'PhysicalSizeX="0.25" PhysicalSizeXUnit="&#181;m"',
            'PhysicalSizeY="0.5" PhysicalSizeYUnit="&#956;m"',
        ),
    ],
)
def test_sizes_in_their_units_of_the_image_asked_for(x: str, y: str) -> None:
    mpp = ome_mpp(_ome(f"{x} {y}"), SIZE)
    assert mpp is not None
    assert (mpp.x, mpp.y) == (pytest.approx(0.25), pytest.approx(0.5))
    assert ome_mpp(_ome(f"{x} {y}"), Size(20, 10)) == Mpp(9, 9)


@pytest.mark.parametrize(
    "pixels",
    [
        "",
        'PhysicalSizeX="0.25"',
        'PhysicalSizeX="0" PhysicalSizeY="0"',
        'PhysicalSizeX="1" PhysicalSizeXUnit="pixel" PhysicalSizeY="1" PhysicalSizeYUnit="pixel"',
        'PhysicalSizeX="wide" PhysicalSizeY="1"',
    ],
)
def test_no_size_is_no_size(pixels: str) -> None:
    assert ome_mpp(_ome(pixels), SIZE) is None


def test_no_image_of_that_size() -> None:
    assert ome_mpp(_ome(""), Size(1, 1)) is None


def test_magnification() -> None:
    assert ome_magnification(_ome("")) is None
    objective = '<Instrument><Objective NominalMagnification="40.0"/></Instrument>'
    assert ome_magnification(_ome("", objective)) == 40


def test_entities_are_refused() -> None:
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><OME>&b;</OME>'
    with pytest.raises(ValueError, match="Entit"):
        ome_mpp(bomb, SIZE)
