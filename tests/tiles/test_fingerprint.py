"""A fingerprint changes with the file and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.tiles.fingerprint import Fingerprint

PART = 64 * 1024


def written(path: Path, data: bytes) -> Fingerprint:
    path.write_bytes(data)
    os.utime(path, ns=(10**18, 10**18))
    return Fingerprint.of(path)


@given(size=st.integers(0, 3 * PART))
def test_small_files_are_hashed_whole(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = tmp_path_factory.mktemp("file") / "a.svs"
    before = written(path, bytes(size))
    assert written(path, bytes(size)) == before
    for place in {0, size // 3, size // 2, size - 1} if size else ():
        data = bytearray(size)
        data[place] = 1
        assert written(path, data) != before


def test_large_files_are_hashed_in_three_places(tmp_path: Path) -> None:
    size = 10 * PART
    before = written(tmp_path / "a.svs", bytes(size))
    for place in (0, size // 2, size - 1):
        data = bytearray(size)
        data[place] = 1
        assert written(tmp_path / "a.svs", data) != before


def test_size_and_time_count(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    before = written(path, bytes(100))
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert Fingerprint.of(path) != before
    assert written(path, bytes(101)) != before


def test_the_folder_of_an_mrxs_file_counts(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    written(folder / "Data0000.dat", bytes(100))
    mrxs, svs = written(tmp_path / "a.mrxs", b"x"), written(tmp_path / "a.svs", b"x")
    written(folder / "Data0000.dat", bytes(101))
    assert Fingerprint.of(tmp_path / "a.mrxs") != mrxs
    assert Fingerprint.of(tmp_path / "a.svs") == svs


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match=r"none\.svs cannot be read"):
        Fingerprint.of(tmp_path / "none.svs")
