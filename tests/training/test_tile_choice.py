"""A tile that is not given is what most images hold; mostly padded ones are said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config, TileConfig
from pathoseg.errors import PathosegError
from pathoseg.geometry import Frame, Mpp, Size
from pathoseg.training import labelled_slides
from pathoseg.training.labelled_slides import LabelledSlide, LabelledSlides, with_tile

SIDES = st.integers(1, 3000)


def _images(sizes: list[tuple[int, int]]) -> LabelledSlides:
    frames = [Frame(Size(*size), 1.0, 1.0, Mpp(0.5, 0.5)) for size in sizes]
    labels: Any = SimpleNamespace()
    usable = tuple(
        LabelledSlide("slide.png", Path("slide.png"), labels, frame, frame.size) for frame in frames
    )
    return LabelledSlides(usable, ClassTable((), ()), {})


def _chosen(config: Config, images: LabelledSlides, multiple: int) -> tuple[Config, list[str]]:
    said = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labelled_slides, "say", said.append)
        return with_tile(config, images, multiple), said


@given(
    sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=9),
    multiple=st.sampled_from([1, 4, 16, 48]),
)
def test_a_tile_left_out_is_the_largest_that_most_images_hold(
    sizes: list[tuple[int, int]], multiple: int
) -> None:
    config, _ = _chosen(Config(), _images(sizes), multiple)
    tile = config.tiles.tile
    assert tile is not None
    assert tile % multiple == 0
    assert config == replace(Config(), tiles=TileConfig(tile=tile))

    def most_hold(side: int) -> bool:
        return sum(min(size) >= side for size in sizes) > len(sizes) / 2

    assert 2 * multiple <= tile <= 1024
    assert most_hold(-(-100 * tile // 105)) or tile == 2 * multiple, "less than no network takes"
    assert tile + multiple > 1024 or not most_hold(tile + multiple)


@pytest.mark.parametrize(("side", "tile"), [(1000, 1008), (500, 512), (260, 272), (100, 96)])
def test_a_tile_is_rounded_up_where_that_is_little_padding(side: int, tile: int) -> None:
    """A tile of 992 px would leave three padded ones on an image of 1,000 px."""
    config, said = _chosen(Config(), _images([(side, side)]), 16)
    assert config.tiles.tile == tile
    assert (f"images of {side} px" in said[0]) == (tile > side)


@given(
    sizes=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=9),
    tile=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_mostly_padded_tiles_are_said(sizes: list[tuple[int, int]], tile: int | None) -> None:
    config, said = _chosen(Config(tiles=TileConfig(tile=tile)), _images(sizes), 1)
    side = config.tiles.side
    assert tile in (None, side)
    padded = [size for size in sizes if min(side, size[0]) * min(side, size[1]) < side**2 / 2]
    told = [line for line in said if "padding" in line]
    assert len(told) == bool(padded)
    assert all(f"of {side} px" in line for line in said)
    assert all(f"on {len(padded)} of {len(sizes)} images" in line for line in told)


def test_an_overlap_must_fit_the_chosen_tile() -> None:
    config = Config(tiles=TileConfig(overlap=300))
    assert _chosen(config, _images([(2000, 2000)]), 16)[0].tiles.tile == 1024
    with pytest.raises(PathosegError, match="overlap = 300"):
        _chosen(config, _images([(256, 256)]), 16)
