"""open_slide: the reader by content, and one clear error for what is no slide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Size
from pathoseg.slides.direct_reader import DirectSlide
from pathoseg.slides.image_reader import ImageSlide
from pathoseg.slides.openslide_reader import OpenSlideSlide
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.slides.tiff_reader import TiffSlide

Writer = Callable[..., Path]


def test_the_reader_is_chosen_by_content_not_by_name(
    tmp_path: Path,
    pyramid: Callable[..., Any],
    write_svs: Writer,
    write_ome: Writer,
    write_scn: Writer,
) -> None:
    levels = pyramid(300, 200)
    Image.fromarray(levels[0]).save(tmp_path / "b.png")
    (tmp_path / "b.png").rename(tmp_path / "b.svs")
    for path, reader in [
        (write_svs(tmp_path / "a.tif", levels), DirectSlide),
        (write_ome(tmp_path / "a.svs", levels), DirectSlide),
        (write_scn(tmp_path / "c.tif", Size(900, 900), [(0, 0, levels[0])]), OpenSlideSlide),
        (write_ome(tmp_path / "strips.tif", levels[:1], tile=None), TiffSlide),
        (tmp_path / "b.svs", ImageSlide),
    ]:
        with open_slide(path, assume_mpp=0.5) as slide:
            assert type(slide) is reader


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"<xml/>", "in no format"),
        (b"II*\0", "cannot be read as a TIFF"),
        (b"\x89PNG\r\n\x1a\n", "no whole PNG"),
        (bytes(200), "in no format"),
    ],
)
def test_what_is_no_slide(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "given.svs"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PathosegError, match=said) as refusal:
        open_slide(path)
    assert str(path) in refusal.value.problem
    assert refusal.value.hint


def test_a_directory_is_no_slide(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match="is a directory"):
        open_slide(tmp_path)


def test_names_of_any_letters(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    path = write_svs(tmp_path / "Präparat 1 – Übersicht 組織.svs", pyramid(300, 200))
    with open_slide(path) as slide:
        assert slide.path == path


@pytest.mark.parametrize("suffix", ["svs", "ome.tif"])
def test_a_file_of_which_nothing_decodes_is_refused(
    tmp_path: Path,
    pyramid: Callable[..., Any],
    write_svs: Writer,
    write_ome: Writer,
    spoil: Callable[..., None],
    suffix: str,
) -> None:
    path = tmp_path / f"a.{suffix}"
    write = write_svs if suffix == "svs" else write_ome
    write(path, pyramid(512, 512)[:1], tile=(256, 256), compression="jpeg")
    for index in range(3):
        spoil(path, index)
        with open_slide(path) as slide:  # one tile is left
            assert slide.size.width == 512
    spoil(path, 3)
    with pytest.raises(UnreadableError) as refusal:
        open_slide(path)
    assert str(path) in refusal.value.problem


def test_every_reader_is_a_slide(
    tmp_path: Path, pyramid: Callable[..., Any], write_svs: Writer
) -> None:
    slide: Slide = open_slide(write_svs(tmp_path / "a.svs", pyramid(300, 200)))
    assert slide.origin == (0, 0)
    slide.close()
