"""Test that a library's exception is told to the user in one short printable line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.slides.slide_file import reason


@given(st.text() | st.binary().map(repr))
def test_one_short_printable_line(text: str) -> None:
    for error in (ValueError(text), KeyError(text), RuntimeError(text)):
        said = reason(error)
        assert said
        assert said.isprintable()
        assert len(said) < 250


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("not a TIFF."), "not a TIFF"),
        (OSError(), "OSError"),
        (KeyError("Tile"), "KeyError 'Tile'"),
        (ValueError("bad \x1b[31m\r\nsyntax"), "bad [31m syntax"),
    ],
)
def test_texts(error: Exception, said: str) -> None:
    assert reason(error) == said
