"""Pixels per class are those of the masks, and are counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pathoseg.annotations.annotation import ClassTable
from pathoseg.annotations.annotation_options import AnnotationOptions
from pathoseg.errors import PathosegError
from pathoseg.geometry import Size
from pathoseg.tiles.class_pixels import class_counts, count_tiles, count_tiles_once
from pathoseg.tiles.grid import TileGrid


@given(
    masks=hnp.arrays(
        np.uint8,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=6),
        elements=st.sampled_from([0, 1, 2, 255]),
    )
)
def test_counts_are_those_of_a_loop(masks: np.ndarray[Any, Any]) -> None:
    counts = class_counts(masks, 3)
    for mask, row in zip(masks, counts, strict=True):
        assert [int((mask == index).sum()) for index in range(3)] == row.tolist()


def test_tiles_are_counted_as_their_masks_are(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    grid = TileGrid(Size(300, 200), Size(100, 100), 0)
    counts = count_tiles(grid, bench.frame, bench.labels, bench.classes)
    assert counts.sum() == 300 * 200
    assert counts[:, 1].tolist() == [50 * 30, 0, 0, 0, 0, 0]
    assert counts[:, 2].tolist() == [0, 0, 0, 0, 0, 90 * 90]


def test_counts_are_kept_until_what_they_follow_from_changes(
    tmp_path: Path, make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    asked = []
    rasterise = bench.labels.rasterise
    monkeypatch.setattr(
        bench.labels, "rasterise", lambda *args: asked.append(args) or rasterise(*args)
    )
    folder = tmp_path / "cache" / "slide.svs"
    classes: ClassTable = bench.classes
    grid = TileGrid(Size(300, 200), Size(100, 100), 0)
    usual = AnnotationOptions()

    def count(
        grid: TileGrid = grid,
        options: AnnotationOptions = usual,
        classes: ClassTable = classes,
    ) -> int:
        asked.clear()
        counts = count_tiles_once(folder, grid, bench.frame, bench.labels, options, classes)
        assert (counts == count_tiles(grid, bench.frame, bench.labels, classes)).all()
        return len(asked) - len(grid)

    assert count() == 6
    assert count() == 0
    assert count(grid=TileGrid(Size(300, 200), Size(200, 200), 0)) == 2
    assert count(options=AnnotationOptions(mask="binary")) == 6
    assert count(classes=ClassTable(("stroma", "tumor"), classes.colours)) == 6
    bench.labels.path.write_text("[]")
    assert count() == 6
    assert count() == 0
    assert len(list(folder.iterdir())) == 5, "no draft is left"


def test_a_damaged_file_of_counts_is_named(tmp_path: Path, make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    grid = TileGrid(Size(300, 200), Size(100, 100), 0)
    what = (grid, bench.frame, bench.labels, AnnotationOptions(), bench.classes)
    count_tiles_once(tmp_path / "cache", *what)
    [kept] = (tmp_path / "cache").iterdir()
    for content in (b"", b"\x93NUMPY", kept.read_bytes()[:-8]):
        kept.write_bytes(content)
        with pytest.raises(PathosegError, match=f"{kept.name} cannot be read"):
            count_tiles_once(tmp_path / "cache", *what)
