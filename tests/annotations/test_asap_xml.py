"""ASAP XML: groups as classes, exclusion, order and locale of coordinates."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pathoseg.annotations.annotation import Annotation
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.asap_xml import read_asap
from pathoseg.errors import PathosegError

EXCLUDE = AnnotationOptions().exclude


def _outline(group: str, left: float, side: float, kind: str = "Polygon") -> str:
    corners = [(left, 0), (left + side, 0), (left + side, side), (left, side)]
    lines = "".join(
        f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>' for order, (x, y) in enumerate(corners)
    )
    return (
        f'<Annotation Name="a" Type="{kind}" PartOfGroup="{group}" Color="#F4FA58">'
        f"<Coordinates>{lines}</Coordinates></Annotation>"
    )


def _read(
    tmp_path: Path, outlines: str, groups: str = "", exclude: tuple[str, ...] = EXCLUDE
) -> list[Annotation]:
    path = tmp_path / "slide.xml"
    path.write_text(
        '<?xml version="1.0"?><ASAP_Annotations>'
        f"<Annotations>{outlines}</Annotations>"
        f"<AnnotationGroups>{groups}</AnnotationGroups></ASAP_Annotations>"
    )
    return read_asap(path, exclude).annotations


def test_groups_are_classes_with_the_groups_colour(tmp_path: Path) -> None:
    group = '<Group Name="tumour" PartOfGroup="None" Color="#64FE2E"><Attributes/></Group>'
    outlines = _outline("tumour", 0, 10) + _outline("undeclared", 50, 2) + _outline("None", 90, 1)
    found = _read(tmp_path, outlines, group)
    assert [(one.class_name, one.colour) for one in found] == [
        ("tumour", (100, 254, 46)),
        ("undeclared", (244, 250, 88)),
        (None, (244, 250, 88)),
    ]
    assert found[0].geometry.bounds == (0, 0, 10, 10)


@pytest.mark.parametrize("name", ["Exclusion", "EXCLUSION", "_2"])
def test_excluded_groups_are_cut_out(tmp_path: Path, name: str) -> None:
    (found,) = _read(tmp_path, _outline("tumour", 0, 10) + _outline(name, 0, 5))
    assert found.class_name == "tumour"
    assert found.geometry.area == 75


def test_what_is_excluded_can_be_chosen(tmp_path: Path) -> None:
    outlines = _outline("tumour", 0, 10) + _outline("normal", 0, 5)
    assert len(_read(tmp_path, outlines)) == 2
    (found,) = _read(tmp_path, outlines, exclude=("normal",))
    assert found.geometry.area == 75


@pytest.mark.parametrize(
    "groups",
    [
        '<Group Name="Exclusion"/><Group Name="pen" PartOfGroup="Exclusion"/>',
        '<Group Name="Exclusion"><Group Name="pen"/></Group>',
        '<Group Name="Exclusion" PartOfGroup="pen"/><Group Name="pen" PartOfGroup="Exclusion"/>',
    ],
    ids=["by name", "inside", "in a circle"],
)
def test_groups_within_an_excluded_group_are_cut_out(tmp_path: Path, groups: str) -> None:
    (found,) = _read(tmp_path, _outline("tumour", 0, 10) + _outline("pen", 0, 5), groups)
    assert found.geometry.area == 75


def test_coordinates_go_by_order_and_may_have_a_decimal_comma(tmp_path: Path) -> None:
    corners = [(2, "10,5", "10"), (0, "0", "0"), (3, "0", "10"), (1, "10,5", "0")]
    lines = "".join(f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>' for order, x, y in corners)
    (found,) = _read(
        tmp_path, f'<Annotation Type="Polygon"><Coordinates>{lines}</Coordinates></Annotation>'
    )
    assert found.geometry.area == 105
    assert found.class_name is None


def test_coordinates_of_one_order_go_as_they_stand(tmp_path: Path) -> None:
    """A square whose corners all have Order 0, as a converter wrote it."""
    outline = re.sub(r'Order="\d"', 'Order="0"', _outline("a", 0, 10))
    (found,) = _read(tmp_path, outline)
    assert found.geometry.area == 100


@pytest.mark.parametrize("kind", ["Dot", "PointSet", "Measurement"])
def test_what_has_no_area_is_passed_over(tmp_path: Path, kind: str) -> None:
    assert len(_read(tmp_path, _outline("a", 0, 9, kind) + _outline("b", 0, 9, "Spline"))) == 1
    with pytest.raises(PathosegError, match=r"slide\.xml encloses an area"):
        _read(tmp_path, _outline("a", 0, 9, kind))


@pytest.mark.parametrize(
    ("outlines", "problem"),
    [
        ('<Annotation><Coordinate Order="0" Y="1"/></Annotation>', "lacks the attribute 'X'"),
        ('<Annotation><Coordinate X="a" Y="1"/></Annotation>', "could not convert"),
        ('<Coordinate X="1" Y="1"/>', "outside of all Annotations"),
        (_outline("a", float("nan"), 9), "no|not"),
    ],
)
def test_malformed_outlines_are_refused(tmp_path: Path, outlines: str, problem: str) -> None:
    with pytest.raises(PathosegError, match=rf"slide\.xml.*{problem}"):
        _read(tmp_path, outlines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("asap_camelyon16_tumor_076.xml", {"metastasis": 39}),
        ("asap_camelyon16_tumor_085.xml", {"metastasis": 50}),
        ("asap_tissue_TCGA-2G-AAGK.xml", {"tissue": 1, "negative": 6}),
    ],
)
def test_real_files_have_all_their_regions(
    shared_data: Path, name: str, expected: dict[str, int]
) -> None:
    path = shared_data / "annotations" / name
    found = read_asap(path, EXCLUDE).annotations
    assert Counter(one.class_name for one in found) == expected
    assert all(one.geometry.is_valid for one in found)
    # the same numbers without a parser
    groups = re.findall(r'<Annotation [^>]*PartOfGroup="(\w+)"', path.read_text())
    assert Counter(groups) == expected


def test_real_holes_are_cut_out_of_the_tissue(shared_data: Path) -> None:
    path = shared_data / "annotations" / "asap_tissue_TCGA-2G-AAGK.xml"
    everything = read_asap(path, ()).annotations
    (tissue,) = read_asap(path, ("negative",)).annotations
    holes = sum(one.geometry.area for one in everything if one.class_name == "negative")
    whole = sum(one.geometry.area for one in everything if one.class_name == "tissue")
    assert whole - holes <= tissue.geometry.area < whole
