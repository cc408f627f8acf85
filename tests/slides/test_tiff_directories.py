"""Chains of directories that end, and that do not."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from pathoseg.errors import PathosegError
from pathoseg.slides.slide import open_slide
from pathoseg.slides.tiff_reader import check_directories

PIXELS = np.zeros((64, 64, 3), np.uint8)


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_real_chains_end(tmp_path: Path, byteorder: Any, bigtiff: bool) -> None:
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path, byteorder=byteorder, bigtiff=bigtiff) as tiff:
        for _ in range(5):
            tiff.write(PIXELS, photometric="rgb", subifds=2, metadata=None)
            tiff.write(PIXELS[::2, ::2], photometric="rgb", metadata=None)
            tiff.write(PIXELS[::4, ::4], photometric="rgb", metadata=None)
    assert check_directories(path)
    whole, found = path.read_bytes(), []
    for end in range(0, len(whole), 499):
        path.write_bytes(whole[:end])
        found.append(check_directories(path))
    assert found == sorted(found), (
        "once the last directory is there, more of the file changes nothing"
    )
    assert not all(found)


def test_a_slide_cut_short_says_so(write_svs: Any, pyramid: Any, tmp_path: Path) -> None:
    path = write_svs(tmp_path / "a.svs", pyramid(1024, 768, (4,)))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    with pytest.raises(PathosegError, match=r"a\.svs is cut short") as refusal:
        open_slide(path)
    assert "Copy it again" in refusal.value.hint
    with open_slide(path, assume_mpp=2.5) as slide:
        assert slide.mpp.x == 0.5, "what the file still states is not overruled"
        assert slide.warnings == (
            "the file is cut short, and what is left of it is read: copy it again",
        )


def _directory(entries: bytes, following: int) -> bytes:
    return struct.pack("<H", len(entries) // 12) + entries + struct.pack("<I", following)


@pytest.mark.parametrize(
    "directories",
    [
        _directory(b"", 8),
        _directory(b"", 14) + _directory(b"", 8),
        b"".join(_directory(b"", 14 + 6 * i) for i in range(2000)),
        _directory(struct.pack("<HHII", 330, 4, 1_000_000, 8), 0),
    ],
    ids=["circle", "wider circle", "too long", "too broad"],
)
def test_endless_chains_are_refused(tmp_path: Path, directories: bytes) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + directories)
    with pytest.raises(ValueError, match=r"no end|smaller ones"):
        check_directories(path)
    with pytest.raises(PathosegError, match=r"a\.tif"):
        open_slide(path)
