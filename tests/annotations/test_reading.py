"""From a slide to its labels: finding, dispatch, frames, strays, and the table of classes."""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from pathoseg.annotations.annotation import AnnotationReport, ClassTable, Colour
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.annotations.mask_image import MaskLabels
from pathoseg.annotations.raster import PolygonLabels
from pathoseg.annotations.reading import (
    annotation_of,
    class_table,
    colour_names,
    find_annotation,
    read_labels,
    stray_annotations,
    unknown_names,
    what_is_left_out,
    what_is_limited,
)
from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box, Frame, Mpp, Size

SLIDE = Size(100, 100)
ORIGIN = (1000, 500)
TABLE = ClassTable(("tumour",), ((1, 2, 3),))


def _square(left: float, top: float, side: float = 10, name: str = "tumour") -> dict[str, Any]:
    right, bottom = left + side, top + side
    corners = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [corners]},
        "properties": {"classification": {"name": name, "color": [1, 2, 3]}},
    }


def _geojson(folder: Path, *features: dict[str, Any], name: str = "slide.geojson") -> Path:
    path = folder / name
    path.write_text(json.dumps(list(features)))
    return path


def _asap(folder: Path, left: float, top: float) -> Path:
    path = folder / "slide.xml"
    (corners,) = _square(left, top)["geometry"]["coordinates"]
    lines = "".join(
        f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>' for order, (x, y) in enumerate(corners)
    )
    path.write_text(
        '<ASAP_Annotations><Annotations><Annotation Type="Polygon" PartOfGroup="tumour">'
        f"<Coordinates>{lines}</Coordinates></Annotation></Annotations></ASAP_Annotations>"
    )
    return path


def _imagescope(folder: Path, left: float, top: float) -> Path:
    path = folder / "slide.xml"
    (corners,) = _square(left, top)["geometry"]["coordinates"]
    lines = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in corners)
    path.write_text(
        '<Annotations><Annotation Name="tumour"><Regions><Region NegativeROA="0">'
        f"<Vertices>{lines}</Vertices></Region></Regions></Annotation></Annotations>"
    )
    return path


def _left_top(path: Path, options: AnnotationOptions) -> tuple[int, int]:
    labels = read_labels(path, SLIDE, ORIGIN, options)
    frame = Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25)
    rows, columns = np.nonzero(labels.rasterise(Box(0, 0, 100, 100), frame, TABLE))
    return int(columns.min()), int(rows.min())


@pytest.mark.parametrize("write", [_asap, _imagescope])
@pytest.mark.parametrize("frame", ["auto", "full"])
def test_xml_counts_from_the_corner_of_the_scan(
    tmp_path: Path, write: Any, frame: Literal["auto", "full"]
) -> None:
    path = write(tmp_path, 1020, 530)
    assert _left_top(path, AnnotationOptions(frame=frame)) == (20, 30)


@pytest.mark.parametrize("frame", ["auto", "bounds"])
def test_qupath_counts_from_the_corner_of_the_bounds(
    tmp_path: Path, frame: Literal["auto", "bounds"]
) -> None:
    path = _geojson(tmp_path, _square(20, 30))
    assert _left_top(path, AnnotationOptions(frame=frame)) == (20, 30)


def test_the_frame_can_be_overruled(tmp_path: Path) -> None:
    full = _geojson(tmp_path, _square(1020, 530))
    assert _left_top(full, AnnotationOptions(frame="full")) == (20, 30)
    bounds = _asap(tmp_path, 20, 30)
    assert _left_top(bounds, AnnotationOptions(frame="bounds")) == (20, 30)


@pytest.mark.parametrize(("frame", "other"), [("full", "bounds"), ("bounds", "full")])
def test_the_wrong_frame_or_slide_is_noticed(
    tmp_path: Path, frame: Literal["full", "bounds"], other: str
) -> None:
    where = (20, 30) if frame == "full" else (1020, 530)
    path = _geojson(tmp_path, _square(*where))
    with pytest.raises(PathosegError, match=r"1 of the 1 regions in .*slide\.geojson") as refused:
        read_labels(path, SLIDE, ORIGIN, AnnotationOptions(frame=frame))
    assert f'frame = "{other}"' in refused.value.hint


def test_strays_and_regions_across_the_edge_are_let_be(tmp_path: Path) -> None:
    path = _geojson(tmp_path, _square(-5, -5), _square(500, 500))
    assert list(read_labels(path, SLIDE, (0, 0), AnnotationOptions()).classes()) == ["tumour"]


def test_no_regions_are_no_strays(tmp_path: Path) -> None:
    labels = read_labels(_geojson(tmp_path), SLIDE, (0, 0), AnnotationOptions())
    assert dict(labels.classes()) == {}


def test_options_reach_the_readers(tmp_path: Path) -> None:
    path = _asap(tmp_path, 1020, 530)
    labels = read_labels(path, SLIDE, ORIGIN, AnnotationOptions(exclude=("TUMOUR",)))
    assert dict(labels.classes()) == {}
    mask = tmp_path / "slide_mask.png"
    Image.fromarray(np.full((100, 100), 255, dtype=np.uint8)).save(mask)
    labels = read_labels(mask, SLIDE, ORIGIN, AnnotationOptions(mask="binary"))
    assert isinstance(labels, MaskLabels)
    assert list(labels.classes()) == ["class 1"]


RENAME = {
    "Tumor": "tumour",
    "class 1": "tumour",
    "class 2": "tumour",
    "fold": "x*",
    "class 3": "x*",
}


def _outlines_to_rename(folder: Path) -> Path:
    names = ("Tumor", "tumour", "fold", "stroma")
    return _geojson(folder, *(_square(20 * n, 0, name=name) for n, name in enumerate(names)))


def _mask_to_rename(folder: Path) -> Path:
    values = np.zeros((100, 100), np.uint8)
    for n, value in enumerate((1, 2, 3, 4)):
        values[:10, 20 * n : 20 * n + 10] = value
    path = folder / "slide_mask.png"
    Image.fromarray(values).save(path)
    return path


@pytest.mark.parametrize("write", [_outlines_to_rename, _mask_to_rename])
def test_classes_are_renamed_merged_and_ignored(tmp_path: Path, write: Any) -> None:
    options = AnnotationOptions(rename={**RENAME, "class 4": "stroma", "nowhere": "nothing"})
    labels = read_labels(write(tmp_path), SLIDE, (0, 0), options)
    assert [*labels.classes()] == ["tumour", "stroma"]
    table = ClassTable(("stroma", "tumour"), ((1, 1, 1), (2, 2, 2)))
    found = labels.rasterise(Box(0, 0, 100, 1), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25), table)
    assert [*found[0, ::10]] == [2, 0, 2, 0, 255, 0, 1, 0, 0, 0]
    with pytest.raises(PathosegError, match=r"stroma.+rename"):
        labels.rasterise(Box(0, 0, 100, 1), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25), TABLE)


def test_classes_are_the_same_however_their_letters_are_composed(tmp_path: Path) -> None:
    names = ("Dru\u0308se", "Dr\xfcse", "Mu\u0308ll", "Ro\u0308te")
    path = _geojson(tmp_path, *(_square(20 * n, 0, name=name) for n, name in enumerate(names)))
    rename = {"M\xfcll": "Fla\u0308che"}
    options = AnnotationOptions(rename=rename, roi=("r\xf6te",))
    labels = read_labels(path, SLIDE, (0, 0), options)
    assert {*labels.classes()} == {"Dr\xfcse", "Fl\xe4che"}
    assert labels.report.of_interest == 1
    assert unknown_names([labels], rename) == []
    flags = {"data": {"classes": ["Fla\u0308che"]}}
    assert load_config(None, flags).data.classes == ("Fl\xe4che",)


def test_names_of_outlines_leave_masks_as_they_are(tmp_path: Path) -> None:
    options = AnnotationOptions(rename={"Tumor": "tumour"})
    labels = read_labels(_mask_to_rename(tmp_path), SLIDE, (0, 0), options)
    table = ClassTable(("a", "b", "c", "d"), ((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)))
    found = labels.rasterise(Box(0, 0, 100, 1), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25), table)
    assert [*found[0, ::20]] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("write", [_geojson, _asap, _imagescope])
@pytest.mark.parametrize("name", ["Region*", "roi", "REGION", "Box"])
def test_every_program_draws_regions_of_interest(tmp_path: Path, write: Any, name: str) -> None:
    if write is _geojson:
        path = _geojson(tmp_path, _square(20, 30, name="tumour"))
    else:
        path = write(tmp_path, 20, 30)
    path.write_text(path.read_text().replace("tumour", name))
    options = AnnotationOptions(frame="full", roi=("region*", "ROI", "region", "Area"))
    labels = read_labels(path, SLIDE, (0, 0), replace(options, rename={"Box": "area"}))
    assert dict(labels.classes()) == {}
    mask = labels.rasterise(Box(0, 0, 100, 100), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25), TABLE)
    expected = np.full((100, 100), 255)
    expected[30:40, 20:30] = 0
    np.testing.assert_array_equal(mask, expected)


def test_regions_of_interest_that_miss_their_slide_are_refused(tmp_path: Path) -> None:
    path = _geojson(tmp_path, _square(20, 30), _square(40, 30), _square(500, 0, name="ROI"))
    with pytest.raises(PathosegError, match=r"No region of interest in .*slide\.geojson"):
        read_labels(path, SLIDE, (0, 0), AnnotationOptions())
    assert read_labels(path, SLIDE, (0, 0), AnnotationOptions(roi=()))


def test_a_sparse_mask_is_unknown_where_it_is_0(tmp_path: Path) -> None:
    options = AnnotationOptions(unlabelled="ignore", rename={"class 1": "background"})
    table = ClassTable(("class 2", "class 3", "class 4"), ((1, 1, 1), (2, 2, 2), (3, 3, 3)))
    labels = read_labels(_mask_to_rename(tmp_path), SLIDE, (0, 0), options)
    found = labels.rasterise(Box(0, 0, 100, 1), Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25), table)
    assert [*found[0, ::10]] == [0, 255, 1, 255, 2, 255, 3, 255, 255, 255]
    assert [*labels.classes()] == ["class 2", "class 3", "class 4"]


@pytest.mark.parametrize("name", ["", " ", "tumour "])
def test_no_name_is_no_name(name: str) -> None:
    with pytest.raises(PathosegError, match="Tumor"):
        AnnotationOptions(rename={"Tumor": name})


def test_where_nothing_has_a_class_the_one_class_may_be_renamed(tmp_path: Path) -> None:
    square = _square(0, 0)
    del square["properties"]["classification"]
    options = AnnotationOptions(rename={"annotation": "nucleus"})
    labels = read_labels(_geojson(tmp_path, square), SLIDE, (0, 0), options)
    assert class_table([labels], None).names == ("nucleus",)


def _unclassified(left: float, top: float, side: float = 10) -> dict[str, Any]:
    square = _square(left, top, side)
    del square["properties"]["classification"]
    return square


@pytest.mark.parametrize(
    ("unclassified", "around", "alone"),
    [("ignore", 0, 255), ("skip", 0, 0), ("tumour", 1, 1), ("Background", 0, 0)],
)
def test_outlines_without_a_class_are_what_the_options_say(
    tmp_path: Path, unclassified: str, around: int, alone: int
) -> None:
    """One around a tumour, one by itself, and one across a tumour, which shows above it."""
    path = _geojson(
        tmp_path,
        _unclassified(0, 0, 40),
        _unclassified(60, 60, 30),
        _square(10, 10),
        _square(55, 65),
    )
    options = AnnotationOptions(unclassified=unclassified)
    labels = read_labels(path, SLIDE, (0, 0), options)
    frame = Frame.at(SLIDE, Mpp(0.25, 0.25), 0.25)
    found = labels.rasterise(Box(0, 0, 100, 100), frame, TABLE)
    assert [found[y, x] for x, y in ((30, 30), (80, 80), (15, 15), (62, 70))] == [
        around,
        alone,
        1,
        1,
    ]
    with pytest.raises(PathosegError, match=r"slide\.geojson has outlines without a class: 2 of 4"):
        read_labels(path, SLIDE, (0, 0), AnnotationOptions(unclassified="refuse"))


def test_outlines_without_a_class_are_one_where_nothing_has_any(tmp_path: Path) -> None:
    one = read_labels(_geojson(tmp_path, _unclassified(0, 0)), SLIDE, (0, 0), AnnotationOptions())
    assert class_table([one], None).names == ("annotation",)
    assert class_table([one, _Labels(a=RED)], None).names == ("a",)
    with pytest.raises(
        PathosegError, match=r"None of the 1 outlines has a class.*\"a\""
    ) as refused:
        class_table([one], ("a",))
    assert 'unclassified = "a"' in refused.value.hint


@pytest.mark.parametrize("name", ["", " ", "tumour "])
def test_outlines_without_a_class_get_a_name(name: str) -> None:
    with pytest.raises(PathosegError, match="unclassified"):
        AnnotationOptions(unclassified=name)


def test_what_is_not_learnt_from_is_said_once_for_each_kind(tmp_path: Path) -> None:
    point, line = (
        {"type": "Feature", "geometry": {"type": kind, "coordinates": corners}}
        for kind, corners in (("Point", [1, 1]), ("LineString", [[0, 0], [9, 9]]))
    )
    drawn = _geojson(
        tmp_path,
        *(point, point, line),
        *(_square(20, 20, name="Ignore*"), _unclassified(60, 60), _square(300, 0)),
        *(_square(0, 0, 90, name="Region*"), _square(10, 10), _square(91, 91, 5)),
    )
    empty = [_geojson(tmp_path, name=f"{letter}.geojson") for letter in "bcdef"]
    reports = [
        read_labels(path, SLIDE, (0, 0), AnnotationOptions()).report for path in (drawn, *empty)
    ]
    assert reports[0].outlines == {"tumour": 1}
    assert (reports[0].of_interest, reports[0].interest_pixels) == (1, 8100)
    strays = {tmp_path / "slid.geojson": tmp_path / "slide.svs", tmp_path / "x.geojson": None}
    place = "in 1 file (slide.geojson)."
    say = "[annotations] unclassified can say what they are."
    many = "b.geojson, c.geojson, d.geojson, e.geojson and 1 more"
    assert what_is_left_out(reports, strays, TABLE) == [
        f"Points: 2 not used, {place}",
        f"Lines: 1 not used, {place}",
        f"Outlines of Ignore*: 1 not used, {place}",
        f"Outlines off the slide: 1 not used, {place}",
        f"Outlines outside the regions of interest: 1 not used, {place}",
        f"Outlines without a class: 1 not used, {place} {say}",
        "Annotations without a slide of their name: slid.geojson (like slide.svs), x.geojson.",
    ]
    assert what_is_limited(reports) == [
        "Regions of interest in 1 file (slide.geojson): outside is not known.",
        (
            f"No outline counts in 5 files ({many}): all of the slide is unlabelled, which is "
            "background unless [annotations] unlabelled says otherwise."
        ),
    ]


def test_rulers_and_dots_of_the_other_programs_are_counted(tmp_path: Path) -> None:
    asap, imagescope = _asap(tmp_path, 0, 0), tmp_path / "other.xml"
    imagescope.write_text(_imagescope(tmp_path, 0, 0).read_text())
    _asap(tmp_path, 0, 0)
    coordinate = '<Coordinates><Coordinate X="1" Y="1"/></Coordinates>'
    dot = f'<Annotation Type="Dot" PartOfGroup="x">{coordinate}</Annotation>'
    vertices = '<Vertices><Vertex X="1" Y="1"/><Vertex X="9" Y="1"/></Vertices>'
    ruler = f'<Region Type="4">{vertices}</Region>'
    for path, more, where in ((asap, 2 * dot, "</Annotations>"), (imagescope, ruler, "</Regions>")):
        text = path.read_text()
        path.write_text(text.replace(where, more + where, 1))
    found = [
        read_labels(path, SLIDE, (0, 0), AnnotationOptions()).report for path in (asap, imagescope)
    ]
    assert [dict(one.passed_over) for one in found] == [
        {"points": 2},
        {"rulers, arrows and points": 1},
    ]


def test_a_region_of_interest_without_an_area_is_refused(tmp_path: Path) -> None:
    flat = _square(0, 0, 0, name="Region*")
    path = _geojson(tmp_path, flat, _square(20, 20))
    with pytest.raises(PathosegError, match=r"in .*slide\.geojson encloses no area"):
        read_labels(path, SLIDE, (0, 0), AnnotationOptions())
    path = _geojson(tmp_path, flat, _square(20, 20), _square(0, 0, 50, name="Region*"))
    assert read_labels(path, SLIDE, (0, 0), AnnotationOptions()).report.of_interest == 1


@pytest.mark.parametrize("name", ["slide.csv", "slide.tsv", "slide.jpg", "slide.gz", "slide"])
def test_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(PathosegError, match=f"{name} is no annotation") as refused:
        read_labels(tmp_path / name, SLIDE, (0, 0), AnnotationOptions())
    assert "GeoJSON" in refused.value.hint


def test_other_xml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slide.xml"
    path.write_text("<html/>")
    with pytest.raises(PathosegError, match=r"slide\.xml is XML, but .*<html>"):
        read_labels(path, SLIDE, (0, 0), AnnotationOptions())


def test_a_real_slide_with_its_real_annotation(shared_data: Path) -> None:
    slide = shared_data / "slides" / "monusac_A9K0_1.svs"
    path = find_annotation(slide, None)
    assert path == slide.with_suffix(".xml")
    size = Size(1307, 1153)
    labels = read_labels(path, size, (0, 0), AnnotationOptions())
    assert isinstance(labels, PolygonLabels)
    table = class_table([labels], None)
    assert table.names == ("Epithelial", "Macrophage")
    assert table.colours == ((255, 0, 0), (0, 255, 0))
    frame = Frame.at(size, Mpp(0.1945, 0.1945), 0.1945)
    mask = labels.rasterise(Box(0, 0, size.width, size.height), frame, table)
    assert set(np.unique(mask)) == {0, 1, 2}


@pytest.mark.parametrize(
    "suffix",
    [
        *(".geojson", ".geojson.gz", ".json", ".xml", "_mask.png", "_mask.tif", "_mask.tiff"),
        *("_mask.ome.tif", "_mask.TIF", "_mask.PNG"),
    ],
)
@pytest.mark.parametrize("stem", ["a.b", "a.b.svs"])
def test_the_annotation_is_found_beside_the_slide_and_elsewhere(
    tmp_path: Path, suffix: str, stem: str
) -> None:
    name = f"{stem}{suffix}"
    slides, elsewhere = tmp_path / "slides", tmp_path / "elsewhere"
    slides.mkdir()
    elsewhere.mkdir()
    slide = slides / "a.b.svs"
    assert find_annotation(slide, None) is None
    assert find_annotation(slide, elsewhere) is None
    (elsewhere / name).touch()
    assert find_annotation(slide, None) is None
    assert find_annotation(slide, elsewhere) == elsewhere / name
    (slides / name).touch()
    assert find_annotation(slide, None) == slides / name


@pytest.mark.parametrize("name", ["a.ome.geojson", "a.geojson", "a_mask.png", "a.ome_mask.png"])
def test_an_ome_tiff_is_known_by_both_of_its_stems(tmp_path: Path, name: str) -> None:
    slide = tmp_path / "a.ome.tif"
    (tmp_path / name).touch()
    assert find_annotation(slide, None) == tmp_path / name
    (tmp_path / "a.ome.xml").touch()
    with pytest.raises(PathosegError, match="several annotation files"):
        find_annotation(slide, None)


def test_a_slide_is_never_its_own_mask(tmp_path: Path) -> None:
    slide = tmp_path / "a.png"
    slide.touch()
    assert find_annotation(slide, None) is None
    assert find_annotation(slide, tmp_path / "." / "") is None
    masks = tmp_path / "masks"
    masks.mkdir()
    shutil.copy(slide, masks)
    assert find_annotation(slide, masks) == masks / "a.png"


@pytest.mark.parametrize("suffix", [".geojson", "_mask.png"])
@pytest.mark.parametrize("spelt", [("M\xfcller", "Mu\u0308ller"), ("Mu\u0308ller", "M\xfcller")])
def test_an_annotation_is_found_however_its_letters_are_composed(
    tmp_path: Path, suffix: str, spelt: tuple[str, str]
) -> None:
    slide, file = tmp_path / f"{spelt[0]}/{spelt[0]}.svs", f"{spelt[1]}{suffix}"
    slide.parent.mkdir()
    for folder in (slide.parent, tmp_path / "notes" / spelt[1]):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    assert find_annotation(slide, None) == slide.parent / file
    assert stray_annotations(slide.parent, [slide]) == {}
    name = slide.relative_to(tmp_path).as_posix()
    found = annotation_of(name, slide, tmp_path / "notes", {})
    assert found == tmp_path / "notes" / spelt[1] / file


def test_two_annotations_of_one_slide_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xml").touch()
    (tmp_path / "a_mask.png").touch()
    with pytest.raises(PathosegError, match=r"a\.svs has several.*a\.xml.*a_mask\.png"):
        find_annotation(tmp_path / "a.svs", None)


def test_outlines_of_no_slide_are_found_with_the_slide_they_are_named_like(tmp_path: Path) -> None:
    slides = [tmp_path / name for name in ("case 1.svs", "case 2.ome.tif", "other.png")]
    for name in (
        *("case 1.geojson", "case 2.xml", "case 2.ome.tif.json", "other_mask.png", ".case 1.xml"),
        *("Case_1.geojson", "case 2 corrected.xml", "CASE 1.json", "lab.geojson", "notes.json"),
    ):
        (tmp_path / name).touch()
    assert stray_annotations(tmp_path, slides) == {
        tmp_path / "CASE 1.json": slides[0],
        tmp_path / "Case_1.geojson": slides[0],
        tmp_path / "case 2 corrected.xml": slides[1],
        tmp_path / "lab.geojson": None,
    }


def test_of_many_outlines_of_no_slide_the_first_are_compared_by_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work for 30 files beside 20 slides, where 100 pairs of names may be compared."""
    compared, get_close_matches = list[int](), difflib.get_close_matches

    def counted(name: str, others: Collection[str], **options: Any) -> list[str]:
        compared.append(len(others))
        return get_close_matches(name, others, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    monkeypatch.setattr("pathoseg.annotations.reading._MOST_COMPARED", 100)
    slides = [tmp_path / f"case {number}.svs" for number in range(20)]
    files = [tmp_path / f"Case-{number}.geojson" for number in range(20)]
    files += [tmp_path / f"case {number} corrected.xml" for number in range(10, 20)]
    for path in files:
        path.touch()
    strays = stray_annotations(tmp_path, slides)
    assert strays.keys() == set(files)
    assert strays[tmp_path / "Case-0.geojson"] == slides[0]
    assert strays[tmp_path / "case 19 corrected.xml"] == slides[19]
    assert 0 < sum(compared) <= 100


def test_names_that_no_file_has_are_told_with_those_that_are_there(tmp_path: Path) -> None:
    point = _square(0, 0, name="Mark")
    point["geometry"] = {"type": "Point", "coordinates": [5, 5]}
    marked, bare = _square(0, 0, name="Stroma"), _square(0, 0)
    del bare["properties"]["classification"]
    files = [_outlines_to_rename(tmp_path), _mask_to_rename(tmp_path)]
    files += [_geojson(tmp_path, marked, point, name="b.json")]
    files += [_geojson(tmp_path, bare, name="c.json")]

    def told(rename: Mapping[str, str]) -> list[str]:
        options = AnnotationOptions(rename=rename)
        labels = [read_labels(path, SLIDE, (0, 0), options) for path in files]
        return unknown_names(labels, rename)

    assert told({}) == told({**RENAME, "Mark": "x*", "annotation": "tumour"}) == []
    [line] = told({**RENAME, "class1": "tumour"})
    assert (
        'has a class "class1"; there are "class 1", "class 2", "class 3", "class 4" and 7 more.'
        in line
    )
    [line] = told({"tumor ": "tumour"})
    assert 'has a class "tumor "; there are "Tumor", "tumour", ' in line


def test_a_class_without_a_name_is_told_of() -> None:
    assert colour_names(ClassTable(("#tumour", "#12"), ((1, 2, 3), (4, 5, 6)))) == []
    [line] = colour_names(ClassTable(("#00FF00", "tumour"), ((0, 255, 0), (1, 2, 3))))
    assert '"#00FF00"' in line
    assert '`[annotations] rename = { "#00FF00" = "tumour" }`' in line


class _Labels:
    def __init__(self, **classes: Colour | None) -> None:
        self.path = Path("x.geojson")
        self.report = AnnotationReport(self.path)
        self._classes = classes

    def classes(self) -> Mapping[str, Colour | None]:
        return self._classes

    def rasterise(self, box: Box, frame: Frame, classes: ClassTable) -> Any:
        raise NotImplementedError


RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_classes_are_sorted_with_numbers_by_value() -> None:
    names = {f"class {number}": None for number in (10, 9, 1)}
    assert class_table([_Labels(**names, b=None), _Labels(a=None)], None).names == (
        "a",
        "b",
        "class 1",
        "class 9",
        "class 10",
    )


def test_wanted_classes_keep_their_order() -> None:
    table = class_table([_Labels(a=RED, b=BLUE)], ("b", "z", "a"))
    assert table.names == ("b", "z", "a")
    assert (table.colours[0], table.colours[2]) == (BLUE, RED)


def test_colours_come_from_files_and_are_all_different() -> None:
    table = class_table([_Labels(a=None, b=RED), _Labels(a=BLUE, c=RED, d=None)], None)
    assert table.colours[:2] == (BLUE, RED)
    assert len(set(table.colours)) == 4
    many = class_table([], tuple(map(str, range(254))))
    assert len(set(many.colours)) == 254


@pytest.mark.parametrize("wanted", [("a", "a"), tuple(map(str, range(255)))])
def test_impossible_wishes_are_refused(wanted: tuple[str, ...]) -> None:
    with pytest.raises(PathosegError, match=f"names {len(wanted)} classes"):
        class_table([], wanted)


@pytest.mark.parametrize("name", ["background", "Background"])
def test_background_among_the_wanted_classes_is_refused(name: str) -> None:
    """The class of index 0, listed as one to learn; of a mask of 0 and 1, value 1 would be it."""
    with pytest.raises(PathosegError, match=f'class "{name}"; background is index 0') as refused:
        class_table([_Labels(**{"class 1": None})], (name, "tumour"))
    assert "Leave it out of `[data] classes`" in refused.value.hint


def test_no_class_at_all_is_refused() -> None:
    with pytest.raises(PathosegError, match="no region of any class"):
        class_table([_Labels()], None)
    with pytest.raises(PathosegError, match="no region of any class"):
        class_table([_Labels(a=RED)], ())
    with pytest.raises(PathosegError, match="no region of any class"):
        class_table([_Labels(), _Labels()], ("a",))


def test_instances_taken_for_classes_are_noticed() -> None:
    instances = _Labels(**{f"class {number}": None for number in range(1, 72)})
    with pytest.raises(PathosegError, match="71 classes, class 1 to class 71") as refused:
        class_table([instances], None)
    assert 'mask = "binary"' in refused.value.hint


@pytest.mark.parametrize(("name", "to"), [("Tumor", "tumour"), ("fat", "fat*")])
def test_a_class_beside_the_runs_is_refused_with_the_line_that_renames_it(
    name: str, to: str
) -> None:
    with pytest.raises(PathosegError, match=f'regions of class "{name}"') as refused:
        TABLE.indices({"tumour", name}, Path("a.geojson"))
    assert f'`[annotations] rename = {{ "{name}" = "{to}" }}`' in refused.value.hint
