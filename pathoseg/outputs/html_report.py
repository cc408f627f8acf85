"""Renders pages of one self-contained HTML file: templates, embedded pictures, charts.

The templates beside this file share `base.html` (the page and its style) and `parts.html` (macros
for tables, heat tables, charts and pictures with layers). All that is put into them is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image

from pathoseg.geometry import area_text
from pathoseg.outputs.atomic import write_text

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, **values: Any) -> None:
    """Replace `path` with a page.

    Args:
        path: The file.
        template: Name of a template that extends `base.html`.
        values: What it shows.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    write_text(path, _environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["percent"] = percent
    environment.filters["count"] = count
    environment.filters["area"] = area_text
    environment.filters["duration"] = duration
    return environment


def number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` decimals, nan as a dash."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def percent(share: float) -> str:
    """Format a share (0…1) in percent with one decimal, nan as a dash."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def count(value: float) -> str:
    """Format a whole number in at most four digits, then in thousands, millions…"""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        shown = f"{value / unit:.3g}"
        if value >= 10_000 and float(shown) >= 1:  # 999,500 is 1 M, not 1000 k
            return f"{shown} {name}"
    return f"{value:,.0f}"


def confusion_shares(confusion: NDArray[Any]) -> NDArray[np.float64]:
    """Each count over its row's sum; nan in rows without any."""
    rows = confusion.sum(axis=1, keepdims=True).astype(np.float64)
    shares = np.full(confusion.shape, math.nan)
    np.divide(confusion, rows, out=shares, where=rows > 0)
    return shares


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as `1 h 5 min`."""
    whole = round(seconds)
    days, hours = divmod(whole // 3600, 24)
    for large, small, names in (
        (days, hours, ("d", "h")),
        (hours, whole // 60 % 60, ("h", "min")),
        (whole // 60, whole % 60, ("min", "s")),
    ):
        if large:
            return f"{large} {names[0]} {small} {names[1]}" if small else f"{large} {names[0]}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{whole} s"


def picture(pixels: NDArray[np.uint8]) -> str:
    """Encode pixels as a small PNG in a data URI.

    Args:
        pixels: Shape (height, width, 3), which is reduced to 256 colours, or (height, width, 4),
            which is kept.
    """
    image = Image.fromarray(pixels)
    if pixels.shape[2] == 3:
        image = image.quantize(256)
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def photograph(data: bytes) -> str:
    """Return a JPEG file as a data URI."""
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def scale_bar(width: int, mpp: float) -> tuple[float, str]:
    """The width and the text of a scale bar over at most a quarter of a picture.

    Args:
        width: Pixels of the picture.
        mpp: Microns per pixel of it.
    """
    longest = width * mpp / 4
    step = 10 ** math.floor(math.log10(longest))
    microns = max(step * of for of in (1, 2, 5) if step * of <= longest)
    text = f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm"
    return round(microns / mpp, 2), text


@dataclass(frozen=True)
class Axis:
    """A linear axis.

    Attributes:
        label: Its title.
        low: Value at its start.
        high: Value at its end.
        ticks: Values that are marked, and what is written there.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]


def axis(label: str, values: Iterable[float], low: float | None = None) -> Axis:
    """Return an axis that holds some values, with round ticks.

    Args:
        label: Its title.
        values: At least one, all finite.
        low: Its start; None has it at the smallest value or below.
    """
    shown = [*values, *([] if low is None else [low])]
    start, end = min(shown), max(shown)
    if end - start < 1e-9 * max(1, abs(start), abs(end)):  # as good as one value
        start, end = start - 0.5, end + 0.5
    step = 10.0 ** math.floor(math.log10((end - start) / 2))
    step = max(step * of for of in (1, 2, 5) if of == 1 or (end - start) / (step * of) >= 3)
    first, last = math.floor(start / step + 1e-9), math.ceil(end / step - 1e-9)
    ticks = tuple((at * step, f"{at * step:g}") for at in range(first, last + 1))
    return Axis(label, first * step if low is None else low, last * step, ticks)


@dataclass(frozen=True)
class Bar:
    """A bar of a chart, from the x axis up to a value.

    Attributes:
        left: Its left edge, as a value of the x axis.
        right: Its right edge.
        value: Its height, as a value of the y axis.
        told: Text under the pointer.
    """

    left: float
    right: float
    value: float
    told: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        points: Pairs (x, y) in values of the axes.
        dashed: Whether it is there to compare with.
        name: What the chart's legend says of it; empty where there is no need.
        colour: RGB; None is the page's own.
    """

    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    name: str = ""
    colour: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Chart:
    """Bars and lines over two axes, drawn as SVG by the macro `chart`.

    Attributes:
        title: Its content in words, for those who cannot see it.
        x: The axis across.
        y: The axis up.
        bars: Drawn first.
        lines: Drawn over them.
        width: Width of the drawing within its axes, in CSS pixels.
        height: Likewise.
    """

    title: str
    x: Axis
    y: Axis
    bars: tuple[Bar, ...] = ()
    lines: tuple[Line, ...] = ()
    width: int = 380
    height: int = 260

    def across(self, value: float) -> float:
        """Return the x pixel of a value of the x axis."""
        return round(self.width * (value - self.x.low) / (self.x.high - self.x.low), 2)

    def down(self, value: float) -> float:
        """Return the y pixel of a value of the y axis."""
        return round(self.height * (self.y.high - value) / (self.y.high - self.y.low), 2)

    def path(self, line: Line) -> str:
        """Return a line's points in pixels, as the `points` of an SVG polyline."""
        return " ".join(f"{self.across(x)},{self.down(y)}" for x, y in line.points)
