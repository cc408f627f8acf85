"""Damaged JPEG tiles: unread wherever OpenSlide refuses them, and right wherever they are shown."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from openslide import OpenSlide, OpenSlideError
from PIL import Image

from pathoseg.errors import UnreadableError
from pathoseg.geometry import Box
from pathoseg.slides.direct_reader import DirectSlide
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.slides.tiff_reader import TiffSlide

TILE = 128
ACROSS, DOWN, BROKEN = 3, 2, 4
PLACE = Box(TILE, TILE, TILE, TILE)
KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:4:4": {"subsampling": 0},
    "restarts": {"restart_marker_blocks": 5},
    "progressive": {"progressive": True},
    "gray": {},
}
STRICTER = {"restarts", "progressive", "gray"}


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Something that happens to a stream: bytes that change, a piece lost, an end lost."""
    places = st.floats(0, 1, exclude_max=True)
    kind = draw(st.sampled_from(["flips", "zeros", "cut", "marker"]))
    start, length = draw(places), draw(st.sampled_from([1, 2, 16, 512, 4096]))
    flips = draw(st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=4))

    def damage(stream: bytes) -> bytes:
        damaged, first = bytearray(stream), int(start * len(stream))
        if kind == "flips":
            for place, bits in flips:
                damaged[int(place * len(stream))] ^= bits
        elif kind == "zeros":
            piece = damaged[first : first + length]
            damaged[first : first + length] = bytes(len(piece))
        elif kind == "cut":
            del damaged[first:]
        else:
            damaged[first : first + 2] = bytes((0xFF, flips[0][1]))
        return bytes(damaged)

    return damage


def _write(path: Path, streams: list[bytes], aperio: bool, gray: bool) -> None:
    width, height = ACROSS * TILE, DOWN * TILE
    says = f"Aperio Image Library v12\r\n{width}x{height} (128x128)|AppMag = 20|MPP = 0.5"
    tifffile.imwrite(
        path,
        iter(streams),
        shape=(height, width) if gray else (height, width, 3),
        dtype="uint8",
        tile=(TILE, TILE),
        description=says if aperio else None,
        metadata=None,
        photometric="minisblack" if gray else "ycbcr",
        compression=7,
    )


def _streams(picture: Callable[..., Any], kind: str) -> list[bytes]:
    streams = []
    for seed in range(ACROSS * DOWN):
        image = Image.fromarray(picture(TILE, TILE, seed))
        file = BytesIO()
        image.convert("L" if kind == "gray" else "RGB").save(file, "jpeg", **KINDS[kind])
        streams.append(file.getvalue())
    return streams


def _openslides(path: Path) -> Any:
    """Read the tile at `PLACE` by OpenSlide.

    Returns:
        RGB, shape (TILE, TILE, 3), or None where OpenSlide refuses.
    """
    try:
        with OpenSlide(path) as peer:
            shown = peer.read_region((PLACE.x, PLACE.y), 0, (TILE, TILE))
    except OpenSlideError:
        return None
    return np.asarray(shown)[..., :3]


def _assert_agrees_on_damage(
    path: Path, streams: list[bytes], kind: str, opened: Callable[[Path], Slide], aperio: bool
) -> None:
    gray = kind == "gray"
    _write(path, streams, aperio, gray)
    with opened(path) as slide:
        sound = slide.read_level(0, Box(0, 0, ACROSS * TILE, DOWN * TILE))

    @settings(max_examples=40)
    @given(damages())
    def check(damage: Callable[[bytes], bytes]) -> None:
        damaged = [*streams]
        damaged[BROKEN] = damage(streams[BROKEN])
        _write(path, damaged, aperio, gray)
        theirs = _openslides(path)
        with opened(path) as slide:
            if theirs is None:
                # neither the whole tile nor rows of it that lie before the damage
                for box in (PLACE, Box(PLACE.x, PLACE.y, TILE, 8)):
                    with pytest.raises(UnreadableError, match=r"a\.svs"):
                        slide.read_level(0, box)
            elif damaged[BROKEN]:
                try:
                    ours = slide.read_level(0, PLACE)
                except UnreadableError:
                    # here pathoseg is the stricter one: OpenSlide does not look at what follows
                    # the last row, and leaves gray to libtiff
                    assert kind in STRICTER or damaged[BROKEN][-8:] != streams[BROKEN][-8:]
                else:
                    np.testing.assert_array_equal(ours, theirs)
            beside = Box(0, 0, ACROSS * TILE, TILE)
            np.testing.assert_array_equal(slide.read_level(0, beside), sound[:TILE])

    check()


@pytest.mark.parametrize("kind", ["4:2:0", "4:4:4", "restarts", "progressive"])
@pytest.mark.parametrize("aperio", [True, False])
def test_the_direct_reader_shows_no_damaged_tile(
    tmp_path: Path, picture: Callable[..., Any], kind: str, aperio: bool
) -> None:
    def opened(path: Path) -> Slide:
        slide = open_slide(path, assume_mpp=0.5)
        assert isinstance(slide, DirectSlide)
        return slide

    _assert_agrees_on_damage(tmp_path / "a.svs", _streams(picture, kind), kind, opened, aperio)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_tiff_reader_shows_no_damaged_tile(
    tmp_path: Path, picture: Callable[..., Any], kind: str
) -> None:
    _assert_agrees_on_damage(
        tmp_path / "a.svs",
        _streams(picture, kind),
        kind,
        lambda path: TiffSlide(path, assume_mpp=0.5),
        aperio=False,
    )
