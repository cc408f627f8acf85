"""Rows of a slide: the same bits wherever one begins, whoever computes them, whenever."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from pathoseg.config_file import load_config
from pathoseg.inference.leases import Leases
from pathoseg.inference.segmenter import MaskRow, Segmenter, SlidePlan
from pathoseg.inference.slide_job import SavedRows, SharedSlide
from pathoseg.inference.windows import Windows
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import load_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.grid import TileGrid

SaveBundle = Callable[..., Path]
CALM = Interruption("")
BOTH = pytest.mark.parametrize("overlap", [None, 40])  # windows, and tiles that are blended


@pytest.fixture
def work(
    tmp_path: Path, tiny_bundle: SaveBundle, small_windows: None
) -> Callable[..., tuple[Segmenter, SlidePlan]]:
    def prepare(
        overlap: int | None, batch: int = 3, size: tuple[int, int] = (300, 170), **bundle: object
    ) -> tuple[Segmenter, SlidePlan]:
        """Noise in rows of tiles, two of them without tissue."""
        pixels = np.random.default_rng(3).integers(0, 255, (*size, 3), np.uint8)
        path = tmp_path / "slide.png"
        Image.fromarray(pixels).save(path)
        flags: dict[str, dict[str, object]] = {
            "infer": {"batch": batch, "overlap": overlap, "tile": 100 if overlap is None else None},
            "data": {"assume_mpp": 0.5},
        }
        flags["tissue"] = {"method": "all"}
        net, card = load_bundle(tiny_bundle(overlap=overlap or 0, **bundle))
        segmenter = Segmenter(net, card, load_config(None, flags))
        with open_slide(path, assume_mpp=0.5) as slide:
            plan = segmenter.plan(slide)
        indices = [index for index in plan.indices if plan.grid.row_of(index) not in (2, 3)]
        return segmenter, replace(plan, indices=indices)

    return prepare


def _all(segmenter: Segmenter, plan: SlidePlan, first: int = 0) -> list[MaskRow]:
    with closing(segmenter.rows(plan, CALM, range(first, plan.grid.rows))) as rows:
        return list(rows)


def _same(some: list[MaskRow], others: list[MaskRow]) -> None:
    assert [row.number for row in some] == [row.number for row in others]
    assert [row.unread_tiles for row in some] == [row.unread_tiles for row in others]
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.band, other.band)


@pytest.mark.parametrize("overlap", [None, 0, 16, 40, 56])
def test_rows_are_the_same_wherever_one_begins(
    work: Callable[..., tuple[Segmenter, SlidePlan]], overlap: int | None
) -> None:
    # Of tiles that begin every 8 pixels, fewer.
    segmenter, plan = work(overlap, size=(144, 90) if overlap == 56 else (300, 170))
    assert 0 < len(plan.indices) < len(plan.grid)
    whole = _all(segmenter, plan)
    assert len(whole) == plan.grid.rows
    assert len({row.band.tobytes() for row in whole}) > 2
    for first in range(0, plan.grid.rows, 1 + plan.grid.rows // 5):
        _same(_all(segmenter, plan, first), whole[first:])
    with closing(segmenter.rows(plan, CALM, range(1, 3))) as rows:
        _same(list(rows), whole[1:3])


def test_classified_tiles_come_in_rows_too(
    work: Callable[..., tuple[Segmenter, SlidePlan]],
) -> None:
    segmenter, plan = work(0, network=ModelConfig("resnet11_v2", "classify", 3, width=2), tile=32)
    whole = _all(segmenter, plan)
    assert np.concatenate([row.band for row in whole]).shape == (10, 6)
    _same(_all(segmenter, plan, 4), whole[4:])


@BOTH
def test_several_processes_share_the_rows(
    work: Callable[..., tuple[Segmenter, SlidePlan]], tmp_path: Path, overlap: int | None
) -> None:
    segmenter, plan = work(overlap)
    assert isinstance(plan.grid, Windows if overlap is None else TileGrid)
    folder = tmp_path / "rows"
    folder.mkdir()
    saved: list[int] = []

    class Counted(SavedRows):
        def save(self, row: MaskRow) -> None:
            saved.append(row.number)
            super().save(row)

    with Leases(tmp_path) as lead, Leases(tmp_path) as one, Leases(tmp_path) as other:
        shares = [
            SharedSlide(segmenter, plan, Counted(folder), claims, CALM)
            for claims in (lead, one, other)
        ]

        def help_out(share: SharedSlide) -> None:
            while share.help():
                pass

        helpers = [Thread(target=help_out, args=(share,)) for share in shares[1:]]
        for helper in helpers:
            helper.start()
        found = list(shares[0].rows())
        for helper in helpers:
            helper.join()
    _same(found, _all(segmenter, plan))
    assert sorted(saved) == list(range(plan.grid.rows)), "each row once"
    assert not list(folder.glob("*.claim"))


@BOTH
def test_a_helper_begins_in_the_middle_of_what_is_free(
    work: Callable[..., tuple[Segmenter, SlidePlan]], tmp_path: Path, overlap: int | None
) -> None:
    segmenter, plan = work(overlap)
    assert isinstance(plan.grid, Windows if overlap is None else TileGrid)
    rows, count = SavedRows(tmp_path), plan.grid.rows
    whole = _all(segmenter, plan)
    with Leases(tmp_path) as mine, Leases(tmp_path) as leader:
        share = SharedSlide(segmenter, plan, rows, mine, CALM)
        leader.take(rows.claim(0))
        assert share.help()
        half = 1 + (count - 1) // 2
        assert rows.listed() == (set(range(half, count)), {0})
        for row in range(1, half - 1):
            rows.save(whole[row])
        assert share.help(), "nobody works towards the last one"
        assert not share.help(), "and what another is at is left to it"
        leader.release(rows.claim(0))
        _same(list(share.rows()), whole)


@BOTH
def test_saved_rows_are_not_computed_again(
    work: Callable[..., tuple[Segmenter, SlidePlan]], tmp_path: Path, overlap: int | None
) -> None:
    segmenter, plan = work(overlap)
    assert isinstance(plan.grid, Windows if overlap is None else TileGrid)
    whole = _all(segmenter, plan)
    rows = SavedRows(tmp_path)
    marked = {row.number: MaskRow(row.number, row.planes ^ np.uint8(1), 5) for row in whole[2:4]}
    for row in marked.values():
        rows.save(row)
    (tmp_path / "000006.row").write_bytes(b"cut short")
    with Leases(tmp_path) as claims:
        found = list(SharedSlide(segmenter, plan, rows, claims, CALM).rows())
    _same(found, [marked.get(row.number, row) for row in whole])
