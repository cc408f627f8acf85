"""Tests sizes of memories: what is read, and what is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.memory_size import memory_text, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GiB", 16 * 2**30),
        ("16G", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("512MiB", 2**29),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "16", "16B", "GiB", "16 gigs", "-1GiB", "0GiB", "16iB", "1e3", "16GiBs", 1.5, None],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="no size of a memory"):
        parse_memory(text)


@given(st.integers(1, 2**50))
def test_the_text_means_hardly_more_and_never_less(size: int) -> None:
    told = parse_memory(memory_text(size))
    assert size - 1 <= told <= max(1.01 * size + 1, 1024, size + 2**20, size + 0.011 * 2**30)


def test_the_unit_is_the_one_that_is_read_with_ease() -> None:
    said = [memory_text(size) for size in (1, 20 * 2**20, 2**30, 2**34 + 1)]
    assert said == ["1 KiB", "20 MiB", "1 GiB", "16.01 GiB"]
