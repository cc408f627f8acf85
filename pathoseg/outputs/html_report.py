"""Renders pages of one self-contained HTML file: templates, embedded pictures, charts.

The templates beside this file share `base.html` (the page and its style) and `parts.html` (macros
for tables, heat tables, charts and pictures with layers). All that is put into them is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from PIL import Image

from pathoseg.outputs.atomic import write_text

_TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, **values: Any) -> None:
    """Replaces `path` with a page.

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
    return environment


def number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` decimals, nan as a dash."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def percent(share: float) -> str:
    """Format a share (0…1) in percent with one decimal, nan as a dash."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def count(value: float) -> str:
    """Format a whole number in at most four digits, then in thousands, millions…"""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 10_000 and value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,.0f}"


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
    """

    points: tuple[tuple[float, float], ...]
    dashed: bool = False


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
