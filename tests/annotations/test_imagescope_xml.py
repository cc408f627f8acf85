"""ImageScope XML: layers as classes, negative regions as holes, rectangles and ellipses."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.imagescope_xml import read_imagescope
from pathoseg.errors import PathosegError

SQUARE = [(0, 0), (10, 0), (10, 10), (0, 10)]


def _region(corners: list[tuple[float, float]], **attributes: str) -> str:
    vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in corners)
    given = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    return (
        f'<Region {given}><Attributes><Attribute Name="region\'s own" Value="x"/></Attributes>'
        f"<Vertices>{vertices}</Vertices></Region>"
    )


def _layer(regions: str, name: str = "", colour: str = "255", attributes: str = "") -> str:
    return (
        f'<Annotation Id="1" Name="{name}" LineColor="{colour}">'
        f"<Attributes>{attributes}</Attributes><Regions>{regions}</Regions></Annotation>"
    )


def _read(tmp_path: Path, layers: str) -> list[Annotation]:
    path = tmp_path / "slide.xml"
    path.write_text(f'<Annotations MicronsPerPixel="0.25">{layers}</Annotations>')
    return read_imagescope(path).annotations


@pytest.mark.parametrize(
    ("name", "attributes", "text", "expected"),
    [
        (" Tumour ", '<Attribute Name="Other" Value="x"/>', "text", "Tumour"),
        ("", '<Attribute Name="Epithelial" Value=""/>', "text", "Epithelial"),
        ("", '<Attribute Name="Description" Value="Stroma"/>', "text", "Stroma"),
        ("", '<Attribute Name="Description" Value=""/>', "text", "text"),
        ("", "", "", "#FF0000"),
    ],
)
def test_where_the_class_comes_from(
    tmp_path: Path, name: str, attributes: str, text: str, expected: str
) -> None:
    (found,) = _read(tmp_path, _layer(_region(SQUARE, Text=text), name, attributes=attributes))
    assert found.class_name == expected
    assert found.colour == (255, 0, 0)


@pytest.mark.parametrize(
    ("packed", "colour"),
    [("65280", (0, 255, 0)), ("16711680", (0, 0, 255)), ("-16776961", (255, 0, 0))],
)
def test_colours_are_packed_the_windows_way(
    tmp_path: Path, packed: str, colour: tuple[int, int, int]
) -> None:
    (found,) = _read(tmp_path, _layer(_region(SQUARE), colour=packed))
    assert found.colour == colour


def test_negative_regions_are_holes_of_their_own_layer_alone(tmp_path: Path) -> None:
    hole = _region([(2, 2), (4, 2), (4, 4), (2, 4)], NegativeROA="1")
    layers = _layer(hole + _region(SQUARE), "a") + _layer(_region(SQUARE), "b")
    areas = {one.class_name: one.geometry.area for one in _read(tmp_path, layers)}
    assert areas == {"a": 96, "b": 100}


def test_rectangles_and_ellipses_by_their_corners(tmp_path: Path) -> None:
    regions = (
        _region([(10, 20), (0, 0)], Type="1")
        + _region([(0, 0), (10, 0), (10, 20), (0, 20)], Type="1")
        + _region([(0, 0), (10, 20)], Type="2")
        + _region([(0, 0), (10, 0), (10, 20), (0, 20)], Type="2")
    )
    rectangle, other, ellipse, again = _read(tmp_path, _layer(regions))
    assert rectangle.geometry.area == other.geometry.area == 200
    assert ellipse.geometry.area == again.geometry.area
    assert ellipse.geometry.area == pytest.approx(math.pi * 5 * 10, rel=1e-3)
    assert ellipse.geometry.bounds == pytest.approx((0, 0, 10, 20))


def test_rulers_and_points_are_passed_over(tmp_path: Path) -> None:
    ruler = _region([(0, 0), (9, 9)], Type="4")
    assert len(_read(tmp_path, _layer(ruler + _region([]) + _region(SQUARE)))) == 1
    with pytest.raises(PathosegError, match="None of the 1 annotations"):
        _read(tmp_path, _layer(ruler))


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        (_region(SQUARE), "Region stands outside"),
        (_layer('<Region><Vertex Y="1"/></Region>'), "lacks the attribute 'X'"),
        (_layer(_region(SQUARE), colour="red"), "could not convert"),
        (_layer(_region(SQUARE), colour="inf"), "infinity"),
        (_layer(_region([(0, 0), (float("inf"), 0), (1, 1)])), "pixel of any slide"),
    ],
)
def test_malformed_layers_are_refused(tmp_path: Path, layers: str, problem: str) -> None:
    with pytest.raises(PathosegError, match=rf"slide\.xml.*{problem}"):
        _read(tmp_path, layers)


def test_a_real_slide_has_all_its_cells(shared_data: Path) -> None:
    path = shared_data / "slides" / "monusac_A9K0_1.xml"
    found = read_imagescope(path).annotations
    counts = Counter((one.class_name, one.colour) for one in found)
    assert counts == {("Epithelial", (255, 0, 0)): 314, ("Macrophage", (0, 255, 0)): 7}
    assert path.read_text().count("<Region ") == 321
    width, height = 1307, 1153
    bounds = [one.geometry.bounds for one in found]
    assert all(left >= -2 and right <= width + 2 for left, _, right, _ in bounds)
    assert all(top >= -2 and bottom <= height + 2 for _, top, _, bottom in bounds)


def test_a_real_unnamed_layer_goes_by_its_colour(shared_data: Path) -> None:
    path = shared_data / "monuseg-train" / "annotations_xml" / "TCGA-B0-5710-01Z-00-DX1.xml"
    found = read_imagescope(path).annotations
    assert Counter(one.class_name for one in found) == {"#00FF00": 359}
    assert path.read_text().count("<Region ") == 359
