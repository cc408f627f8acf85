"""The page of a batch: the figures of the files, what is far off, names that are hostile."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pathoseg.annotations.annotation import ClassTable
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.outputs.batch_report import (
    FARTHEST,
    BatchResults,
    BatchSlide,
    outliers,
    overlay_picture,
    write_batch_report,
)
from pathoseg.outputs.overlay import write_overlay
from pathoseg.outputs.report import (
    ClassSummary,
    InterestSummary,
    Level0,
    Summary,
    TileCounts,
    class_summaries,
    write_summary_table,
)
from pathoseg.outputs.uncertain_fields import UncertainField
from tests.outputs.test_report import rows_of

EVIL = "<script>alert('1')</script>"
CLASSES = ClassTable((f"tumour {EVIL}", "stroma"), ((200, 0, 0), (0, 150, 0)))
MASK = Frame(Size(1000, 800), 4.0, 4.0, Mpp(1.0, 1.0))
_EMPTY = {"meta", "br", "img", "input", "hr", "link"}


class _Nesting(HTMLParser):
    """Checks that every element that is opened is closed, in order, and collects what is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids = list[str](), Counter[str](), list[str]()
        self.references = list[str]()
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        assert len(self.ids) == len(set(self.ids)), "an id twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} on {tag}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "srcset", "data", "action"):
                self.references.append(value or "")
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"


def parsed(page: Path) -> _Nesting:
    """Parse a page, which must be one file without scripts whose links lead to places in it."""
    text = page.read_text(encoding="utf-8")
    found = _Nesting(text)
    assert not found.tags["script"]
    assert not re.search(r"url\(|@import|\bnan\b", text)
    for reference in found.references:
        if not reference.startswith("data:image/"):
            assert reference.startswith("#"), reference
            assert reference[1:] in found.ids, reference
    return found


def _summary(number: int, share: float, tissue_mm2: float = 0.4, **more: object) -> Summary:
    pixels = {1: round(share * tissue_mm2 / MASK.pixel_area_mm2), 2: 50_000}
    classes = class_summaries(CLASSES, pixels, {1: 3}, MASK, tissue_mm2, {1: 1200 + number})
    summary = Summary(
        slide=f"case {number:03}.svs",
        model="a1b2",
        mpp=MASK.mpp,
        tissue_mm2=tissue_mm2,
        classes=classes,
        tiles=TileCounts(done=4, skipped=2, unread=0),
        unread_pixels=0,
        versions={"pathoseg": "0.1.0", "torch": "2"},
        seconds={"plan": 1.0, "segment": 9.0},
        level0=Level0(Size(4000, 3200), Mpp(0.25, 0.25)),
    )
    return replace(summary, **more)  # type: ignore[arg-type]  # names of its fields


def _batch(*slides: BatchSlide, **more: object) -> BatchResults:
    batch = BatchResults(
        folder="results",
        model="runs/latest/model",
        colours=dict(zip(CLASSES.names, CLASSES.colours, strict=True)),
        slides=slides,
        failures={},
        begun=(),
        waiting=(),
        is_stopped=False,
        version="0.1.0",
    )
    return replace(batch, **more)  # type: ignore[arg-type]  # names of its fields


def _slide(summary: Summary, picture: bytes | None = None) -> BatchSlide:
    return BatchSlide(summary, summary.slide.removesuffix(".svs"), 12.0, picture)


def _overlay(folder: Path, seed: int = 0) -> Path:
    """An overlay.png as `publish` writes it for the level 0 of `_summary`."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(150, 240, (9, 12, 3), np.uint8))
    image = np.asarray(coarse.resize((2000, 1600), Image.Resampling.BICUBIC))
    mask = np.zeros((1600, 2000), np.uint8)
    mask[200:900, 300:1100], mask[1000:1400, 900:1700] = 1, 2
    write_overlay(folder / "overlay.png", image, mask, CLASSES)
    return folder / "overlay.png"


def test_its_figures_are_those_of_the_table(tmp_path: Path) -> None:
    region = InterestSummary(f"core {EVIL}", 0.05, _summary(0, 0.1).classes, 10)
    summaries = [
        _summary(number, 0.2, 0.4 + number / 100, regions_of_interest=(region,) * (number == 1))
        for number in range(4)
    ]
    write_summary_table(tmp_path / "summary.csv", summaries)
    write_batch_report(tmp_path / "report.html", _batch(*map(_slide, summaries)))
    parsed(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    columns, *table = rows_of(tmp_path / "summary.csv")
    shown = re.findall(
        r'<td class="right">([\d.]+)<small>([\d.]+) % of (?:tissue|it)</small>'
        r"<small>(?:(\d+) regions?; )?(\d[\d,]*) objects?, ([\d.,]+) per mm²</small>",
        text,
    )
    assert len(shown) == len(table) == 2 * 4 + 2
    rows = [dict(zip(columns, row, strict=True)) for row in table]
    for row, (area, share, regions, objects, density) in zip(
        sorted(rows, key=lambda row: row["region_of_interest"] != ""), shown, strict=True
    ):
        assert float(area) == pytest.approx(float(row["area_mm2"]), rel=1e-3)
        assert float(share) / 100 == pytest.approx(float(row["share_of_tissue"]), rel=5e-3)
        assert (regions or "", objects.replace(",", "")) == (row["regions"], row["objects"])
        assert float(density.replace(",", "")) == pytest.approx(
            float(row["objects_per_mm2"]), rel=1e-3
        )
    [far] = re.findall(r'Far from the rest</div>\s*<div class="value">([^<]*)<', text)
    assert far == "–", "four slides tell nothing"


def test_large_areas_are_written_out(tmp_path: Path) -> None:
    large = _slide(_summary(0, 0.2, 12_500.0, unread_pixels=2_000_000_000))
    write_batch_report(tmp_path / "report.html", _batch(large))
    text = (tmp_path / "report.html").read_text()
    assert {"12,500.0", "2,500.0", "2,000.0"} <= set(re.findall(r"[\d,]+\.\d", text))
    assert not re.search(r"\de[+-]\d", text)


@given(
    st.lists(st.floats(0.1, 0.2), min_size=4, max_size=30),
    st.floats(0.9, 1.2),
    st.integers(0, 30),
)
def test_a_share_far_from_the_rest_is_found_wherever_it_stands(
    shares: list[float], far: float, place: int
) -> None:
    place = min(place, len(shares))
    given = [*shares[:place], far, *shares[place:]]
    found = outliers([_summary(number, share, 1.0) for number, share in enumerate(given)])
    tumour = [one for one in found if one.name == CLASSES.names[0]]
    assert tumour[0].slide == place
    assert all(abs(one.distance) > FARTHEST for one in tumour)
    assert [one for one in found if one.name == "stroma"] == [], "the same share everywhere"
    assert outliers([_summary(0, 0.1)] * 3 + [_summary(0, far)]) == []


def test_one_slide_that_has_what_no_other_has_is_far_and_a_trace_is_not() -> None:
    shares = [0.0] * 9
    [one] = outliers([_summary(n, share) for n, share in enumerate([*shares, 0.02])])
    assert (one.slide, one.middle) == (9, 0.0)
    assert outliers([_summary(n, share) for n, share in enumerate([*shares, 0.004])]) == []
    glass = _summary(10, 0.0, 0.0)
    assert outliers([*(_summary(n, 0.3) for n in range(9)), glass]) == []


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    evil = f'{EVIL}"><img src=x onerror=alert(2)>'
    fields = (UncertainField(1000, 2000, 512, 512, 0.75),)
    summary = _summary(0, 0.2, slide=f"{evil}, 1.svs", warnings=(evil,), model=evil,
        least_certain=fields, versions={evil: evil},
        regions_of_interest=(InterestSummary(evil, 0.1, _summary(0, 0.1).classes, 0),),
    )  # fmt: skip
    batch = _batch(
        BatchSlide(summary, evil, None, None),
        failures={evil: PathosegError(evil, evil)},
        begun=[evil],
        waiting=[evil],
        folder=evil,
        model=evil,
        is_stopped=True,
    )
    write_batch_report(tmp_path / "report.html", batch)
    assert parsed(tmp_path / "report.html").tags["img"] == 0
    text = (tmp_path / "report.html").read_text()
    [link] = re.findall(r"<code>#([^<]*)</code>", text)
    name, x, y, times = link.replace("&#39;", "'").split(",")
    assert (unquote(name), x, y) == (summary.slide, "1256", "2256")
    assert float(times) == 40, "600 px of 10 µm over a field of 128 µm are more than there is"


def test_two_hundred_slides_are_a_small_page_with_what_matters_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    picture = overlay_picture(_overlay(tmp_path), tmp_path / "small.jpg", _summary(0, 0.1))
    field = UncertainField(1000, 2000, 512, 512, 0.75)
    shares = [0.25 + 0.02 * float(value) for value in rng.normal(size=200)]
    shares[120] = 0.9
    slides = [
        _slide(_summary(number, share, least_certain=(field,) * 10), picture)
        for number, share in enumerate(shares)
    ]
    slides[77] = replace(slides[77], summary=replace(slides[77].summary, unread_pixels=5))
    batch = _batch(
        *slides,
        failures={f"bad {number}.svs": PathosegError("It is cut.", "Copy it.") for number in "ab"},
        waiting=[f"later {number}.svs" for number in range(50)],
        is_stopped=True,
    )
    write_batch_report(tmp_path / "report.html", batch)
    found = parsed(tmp_path / "report.html")
    assert found.tags["img"] == 200
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 4_000_000
    order = [found.ids.index(each) for each in ("failed", "open", "far", "slides", "made")]
    assert order == sorted(order)
    rows = [each for each in found.ids if each.startswith("slide-")]
    assert (rows[0], len(rows)) == ("slide-121", 200)
    assert rows.index("slide-78") < rows.index("slide-1")
    assert "90 % of its tissue; of the middle slide 25" in text
    assert "stopped before its end" in text


def test_a_small_overlay_is_the_picture_without_the_legend_and_made_once(tmp_path: Path) -> None:
    overlay, kept, summary = _overlay(tmp_path), tmp_path / "kept.jpg", _summary(0, 0.1)
    data = overlay_picture(overlay, kept, summary)
    assert data is not None
    with Image.open(io.BytesIO(data)) as small:
        assert small.size == (200, 160)
    assert len(data) < 15_000
    assert kept.read_bytes() == data
    kept.write_bytes(b"kept")
    assert overlay_picture(overlay, kept, summary) == b"kept"
    _overlay(tmp_path, seed=1)
    other = overlay_picture(overlay, kept, summary)
    assert other is not None
    assert other not in (data, b"kept")
    overlay.write_bytes(overlay.read_bytes()[:5000])
    assert overlay_picture(overlay, kept, summary) is None
    assert overlay_picture(tmp_path / "none.png", kept, summary) is None


def test_a_class_of_some_slides_alone_is_open_on_the_others(tmp_path: Path) -> None:
    other = replace(_summary(1, 0.2), classes=(ClassSummary("fat", 5, 0.1, 0.2, 1),), model="c3")
    write_batch_report(tmp_path / "report.html", _batch(*map(_slide, (_summary(0, 0.2), other))))
    text = (tmp_path / "report.html").read_text()
    parsed(tmp_path / "report.html")
    assert "by 2 different models" in text
    assert text.count('<td class="right">–</td>') >= 3


@pytest.mark.parametrize(
    ("open_slides", "told", "counts"),
    [
        ({"failures": ("case 001.svs", "x.svs")}, "failed", [2, 2, 0]),
        ({"begun": ("case 001.svs", "x.svs")}, "are not finished", [2, 0, 2]),
        (
            {"failures": ("case 001.svs",), "begun": ("case 002.svs",)},
            "failed or are not finished",
            [1, 1, 1],
        ),
    ],
)
def test_a_slide_that_keeps_its_former_result_is_no_slide_that_is_done(
    tmp_path: Path, open_slides: dict[str, tuple[str, ...]], told: str, counts: list[int]
) -> None:
    summaries = [_summary(number, 0.2) for number in range(3)]
    why = PathosegError("It is cut.", "Copy it.")
    failures = dict.fromkeys(open_slides.get("failures", ()), why)
    batch = _batch(*map(_slide, summaries), failures=failures)
    batch = replace(batch, begun=open_slides.get("begun", ()))
    write_batch_report(tmp_path / "report.html", batch)
    parsed(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    keys = re.findall(r'(Done|Failed|Not finished)</div>\s*<div class="value">([^<]*)<', text)
    assert keys == [*zip(("Done", "Failed", "Not finished"), map(str, counts), strict=True)]
    assert f"<h1>{counts[0]} slide" in text
    rows = re.findall(r'<tr id="slide-\d+">.*?</tr>', text, re.DOTALL)
    kept = {name for names in open_slides.values() for name in names} - {"x.svs"}
    for row in rows:
        assert ("of an earlier call" in row) == any(name in row for name in kept)
    plain = re.sub(r"<a [^>]*>|</a>", "", text)
    assert f"{len(kept)} of the slides that {told} keep" in plain


def test_a_batch_of_nothing_is_a_page(tmp_path: Path) -> None:
    failed = {"a.svs": PathosegError("It is cut.", "Copy it.")}
    write_batch_report(tmp_path / "report.html", _batch(failures=failed))
    parsed(tmp_path / "report.html")
