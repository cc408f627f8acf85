"""The viewer over a result that `infer` wrote: its probabilities and palette, by the server."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from pathoseg.outputs.report import read_summary
from pathoseg.viewer.drawing import probability_palette
from tests.viewer.conftest import Served
from tests.workflows.test_probability import ASKED, draw

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]


@pytest.mark.slow
def test_probabilities_of_an_inferred_slide_are_shown(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, served: Served
) -> None:
    slide = draw(tmp_path / "slide.png", 1500, 1300)
    (tmp_path / "c.toml").write_text(ASKED)
    code, said = command(
        *("infer", slide, "--model", tiny_bundle(), "--out", tmp_path / "out"),
        *("--config", tmp_path / "c.toml", "--assume-mpp", "0.25"),
    )
    assert code == 0, said
    folder = tmp_path / "out" / "slide"
    # The picture states no resolution, and is shown at the one that `infer --assume-mpp` took.
    client, _, told = served(tmp_path / "out")
    details = client.get("/api/slides/0").json()
    assert (details["slide"], details["mpp"]) == ("slide.png", [0.25, 0.25])
    assert details["probabilities"] == [
        "probability background", "probability gland", "probability stroma", "uncertainty",
    ]  # fmt: skip
    assert [one["colour"] for one in details["classes"]] == [[200, 0, 0], [0, 150, 0]]
    width, height = details["width"], details["height"]
    with tifffile.TiffFile(folder / "probability.ome.tiff") as probability:
        shares = probability.series[0].levels[0].asarray()
    uncertainty = tifffile.imread(folder / "uncertainty.ome.tiff", level=0)
    palette = probability_palette()
    for channel, expected in enumerate([*shares, uncertainty]):
        address = f"/api/slides/0/tile/probability/0/1/1?channel={channel}"
        got = np.array(Image.open(io.BytesIO(client.get(address).content)).convert("RGBA"))
        # A pixel of the page's tile is a level-0 pixel, or one of the mask's where it has these.
        step = expected.shape[1] / width
        x = ((np.arange(512, 512 + got.shape[1]) + 0.5) * step).astype(int)
        y = ((np.arange(512, 512 + got.shape[0]) + 0.5) * step).astype(int)
        colours = palette[expected[np.ix_(y, x)]]
        assert np.array_equal(got[..., 3], colours[..., 3])
        shown = colours[..., 3] > 0
        assert np.array_equal(got[shown], colours[shown])
        assert len(np.unique(expected)) > 20
    # A field of the summary lies on the slide that the page shows.
    fields = read_summary(folder / "summary.json").least_certain
    assert fields
    for field in fields:
        assert 0 <= field.x < field.x + field.width <= width
        assert 0 <= field.y < field.y + field.height <= height
    assert not told
