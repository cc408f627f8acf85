"""Rows on disk: as they were, or not there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pathoseg.inference.segmenter import MaskRow
from pathoseg.inference.slide_job import _HEAD, SavedRows

PLANES = arrays.arrays(
    np.uint8, st.tuples(st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 40))
)


@given(PLANES, st.integers(0, 10**7), st.integers(0, 2**40), st.data())
def test_a_row_comes_back_whole_or_not_at_all(
    planes: np.ndarray, number: int, unread: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = SavedRows(folder, len(planes))
        assert rows.load(number) is None
        rows.save(MaskRow(number, planes, unread))
        [file] = folder.iterdir()
        back = rows.load(number)
        assert back is not None
        np.testing.assert_array_equal(back.planes, planes)
        assert (back.number, back.unread_tiles) == (number, unread)
        assert rows.has(number)

        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert rows.load(number) is None
        assert not rows.has(number)


@pytest.mark.parametrize("sides", [(2**63, 2**63), (2**40, 2**12), (2, 0)])
def test_a_row_whose_header_is_damaged_is_removed(tmp_path: Path, sides: tuple[int, int]) -> None:
    rows = SavedRows(tmp_path, 1)
    rows.save(MaskRow(3, np.zeros((1, 2, 2), np.uint8), 0))
    [file] = tmp_path.iterdir()
    magic, _, _, unread = _HEAD.unpack_from(whole := file.read_bytes())
    file.write_bytes(_HEAD.pack(magic, *sides, unread) + whole[_HEAD.size :])
    assert rows.load(3) is None
    assert not rows.has(3)


def test_what_lies_there_is_listed(tmp_path: Path) -> None:
    rows = SavedRows(tmp_path)
    for number in (3, 1, 1_234_567):
        rows.save(MaskRow(number, np.zeros((1, 2, 2), np.uint8), 0))
    rows.claim(2).touch()
    (tmp_path / ".draft.row").touch()
    assert rows.listed() == ({1, 3, 1_234_567}, {2})
