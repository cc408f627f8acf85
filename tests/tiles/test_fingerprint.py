"""A fingerprint changes with the file and with nothing else."""

from __future__ import annotations

import hashlib
import os
import struct
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


def test_all_files_of_a_dicom_series_count(tmp_path: Path) -> None:
    def write(name: str, series: str, kind: str = "77.1.6") -> Path:
        named = ((0x0008_0016, f"1.2.840.10008.5.1.4.1.1.{kind}"), (0x0020_000E, series))
        content = bytes(128) + b"DICM"
        for tag, text in named:
            value = text.encode() + bytes(len(text) % 2)
            content += struct.pack("<HH2sH", tag >> 16, tag & 0xFFFF, b"UI", len(value)) + value
        (tmp_path / name).write_bytes(content + bytes(200))
        return tmp_path / name

    slide = write("1.dcm", "1.23")
    alone = Fingerprint.of(slide)
    write("2.dcm", "1.24")
    write("mask.dcm", "1.23", "66.4")
    state = slide.stat()
    digest = hashlib.sha256(3 * slide.read_bytes()).hexdigest()
    expected = Fingerprint(state.st_size, state.st_mtime_ns, digest)
    assert Fingerprint.of(slide) == alone == expected, "as earlier versions have it"
    other = write("3", "1.23")
    whole = Fingerprint.of(slide)
    assert whole.size == 2 * alone.size
    with other.open("ab") as file:
        file.write(b"more")
    assert Fingerprint.of(slide).size == whole.size + 4


@pytest.mark.parametrize("suffix", [".vms", ".vmu"])
def test_the_images_that_an_index_names_count(tmp_path: Path, suffix: str) -> None:
    index = tmp_path / f"a{suffix}"
    written(index, b"[Virtual]\nImageFile=a-0.jpg\nMapFile = map.jpg\nNoLayers=1\nFolder=x/y\n")
    alone = Fingerprint.of(index)
    written(tmp_path / "b.jpg", bytes(100))
    assert Fingerprint.of(index) == alone
    written(tmp_path / "a-0.jpg", bytes(100))
    assert Fingerprint.of(index).size == alone.size + 100
    written(tmp_path / "map.jpg", bytes(10))
    assert Fingerprint.of(index).size == alone.size + 110


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match=r"none\.svs cannot be read"):
        Fingerprint.of(tmp_path / "none.svs")
