"""Parts of pages: pictures that hold their pixels, charts that lie on their axes, escaping."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pathoseg.outputs.html_report import (
    Axis,
    Bar,
    Chart,
    Line,
    _environment,
    axis,
    count,
    duration,
    number,
    percent,
    picture,
    write_page,
)


def _part(call: str, **values: object) -> str:
    template = "{% import 'parts.html' as parts %}{{ parts." + call + " }}"
    return _environment().from_string(template).render(**values)


def test_a_picture_is_a_png_of_its_own() -> None:
    rng = np.random.default_rng(0)
    layer = rng.integers(0, 256, (7, 5, 4), np.uint8)
    stained = np.full((60, 40, 3), (225, 170, 200), np.uint8)
    stained[10:30, 5:25] = (120, 60, 140)
    for pixels in (layer, stained):
        head, data = picture(pixels).split(",")
        assert head == "data:image/png;base64"
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        shown = np.asarray(image.convert("RGBA" if pixels.shape[2] == 4 else "RGB"))
        np.testing.assert_allclose(shown, pixels, atol=0 if pixels.shape[2] == 4 else 2)


def test_a_chart_lies_on_its_axes() -> None:
    chart = Chart(
        "x < y",
        Axis("across", 0.5, 1.0, ((0.5, "half"), (1.0, "one"))),
        Axis("up", 0.0, 2.0, ((0.0, "0"), (2.0, "2"))),
        bars=(Bar(0.5, 0.75, 1.5, "a & b"),),
        lines=(Line(((0.5, 0.0), (1.0, 2.0)), dashed=True),),
        width=200,
        height=100,
    )
    drawn = ElementTree.fromstring(_part("chart(chart)", chart=chart).replace("&nbsp;", " "))
    assert drawn.get("aria-label") == "x < y"
    bar = next(each for each in drawn.iter("rect"))
    place = {key: float(bar.get(key, "nan")) for key in ("x", "y", "width", "height")}
    assert place == {"x": 1, "y": 25, "width": 98, "height": 75}
    assert bar.findtext("title") == "a & b"
    line = next(each for each in drawn.iter("polyline"))
    assert line.get("points") == "0.0,100.0 200.0,0.0"
    ticks = {each.text: each.get("x") for each in drawn.iter("text")}
    assert (ticks["half"], ticks["one"]) == ("0.0", "200.0")


def test_tables_show_what_they_are_given_and_no_more() -> None:
    text = _part("table([('Name', False), ('<i>', True)], [['<b>x', '1']])")
    assert "&lt;b&gt;x" in text
    assert "&lt;i&gt;" in text
    assert '<td class="right">1</td>' in text
    heat = _part("heat_table(names, shares, details, 'true', 'found')",
        names=["a", "<b>"], shares=[[1.0, 0.0], [math.nan, 0.25]], details=[["1", "2"], ["3", "4"]],
    )  # fmt: skip
    assert re.findall(r"[\d.–]+(?: %)?(?=<small>)", heat) == ["100.0 %", "0.0 %", "–", "25.0 %"]
    assert "&lt;b&gt;" in heat


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (9999, "9,999"), (10_000, "10 k"), (1_234_567, "1.23 M"), (5e9, "5 G")),
        *((999_499, "999 k"), (999_500, "1 M"), (999_600_000, "1 G"), (2.5e12, "2.5 T")),
    ],
)
def test_counts_are_short(value: float, shown: str) -> None:
    assert count(value) == shown


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.none() | st.just(-1e6))
def test_an_axis_holds_its_values_with_few_ticks(values: list[float], low: float | None) -> None:
    found = axis("loss", values, low)
    near = 1e-6 * (found.high - found.low)
    assert found.low <= min(values) + near
    assert found.high >= max(values) - near
    assert 2 <= len(found.ticks) <= 13
    assert low is None or found.low == low


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.25, "0.25 s"), (59.6, "1 min"), (75, "1 min 15 s"), (3900, "1 h 5 min"), (9e4, "1 d 1 h")],
)
def test_durations_have_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_what_does_not_exist_is_a_dash() -> None:
    assert (number(math.nan), number(0.12345)) == ("–", "0.123")
    assert (percent(math.nan), percent(0.5)) == ("–", "50.0 %")


def test_a_page_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("earlier")
    with pytest.raises(Exception, match="'of' is undefined"):
        write_page(tmp_path / "page.html", "evaluation.html", version="1")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]
