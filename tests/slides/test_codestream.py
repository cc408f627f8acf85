"""The sizes that streams announce."""

from __future__ import annotations

from typing import Any

import imagecodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.geometry import Size
from pathoseg.slides.jpeg_stream import announced_size

PIXELS = np.zeros((37, 91, 3), np.uint8)


@pytest.mark.parametrize(
    "stream",
    [
        imagecodecs.jpeg8_encode(PIXELS),
        imagecodecs.jpeg2k_encode(PIXELS, codecformat="J2K"),
        imagecodecs.jpeg2k_encode(PIXELS, codecformat="JP2"),
    ],
    ids=["jpeg", "codestream", "jp2"],
)
def test_the_size_is_found_and_no_cut_breaks_it(stream: Any) -> None:
    assert announced_size(bytes(stream)) == Size(91, 37)
    for end in range(200):
        assert announced_size(bytes(stream)[:end]) in (None, Size(91, 37))


@given(st.binary() | st.binary().map(lambda tail: b"\xff\xd8\xff" + tail))
def test_anything_else_announces_nothing_or_something(data: bytes) -> None:
    announced = announced_size(data)
    assert announced is None or announced.pixels is not None


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", bytes(1000)])
def test_no_stream_no_size(data: bytes) -> None:
    assert announced_size(data) is None
