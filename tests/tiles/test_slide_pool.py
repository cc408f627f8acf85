"""Slides are opened when they are needed, lent to one thread at a time, and closed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tifffile
from PIL import Image

from pathoseg.slides import slide as slide_file
from pathoseg.slides import tiff_reader
from pathoseg.slides.slide import Slide, is_picture, open_slide
from pathoseg.tiles.slide_pool import SlidePool


class FakeSlide:
    """Counts what is open; only the path, what it holds and `close` matter here."""

    def __init__(self, path: Path, log: list[FakeSlide], held_pixels: int = 0) -> None:
        self.path, self.held_pixels, self.open, self._log = path, held_pixels, True, log
        log.append(self)

    def __copy__(self) -> FakeSlide:
        copied = FakeSlide(self.path, self._log, self.held_pixels)
        copied.open = False
        return copied

    def read(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


class Opened:
    """Opens fakes and counts them, and the copies of those."""

    def __init__(self, held_pixels: int = 0) -> None:
        self.log: list[FakeSlide] = []
        self.opened: list[str] = []
        self._held_pixels = held_pixels

    def open(self, path: Path) -> Slide:
        self.opened.append(str(path))
        return cast(Slide, FakeSlide(path, self.log, self._held_pixels))

    def still(self) -> list[str]:
        return sorted(str(slide.path) for slide in self.log if slide.open)


def read(slide: Slide) -> None:
    cast(FakeSlide, slide).read()


def test_a_slide_is_opened_once_and_copied_only_for_another_reader() -> None:
    opened = Opened()
    pool = SlidePool(opened.open)
    for _ in range(3):
        with pool.borrow(Path("a")) as first:
            pass
    assert opened.opened == ["a"]
    assert opened.still() == ["a"]
    with pool.borrow(Path("a")) as first, pool.borrow(Path("a")) as second:
        assert first is not second
        read(second)
    assert opened.opened == ["a"]
    assert opened.still() == ["a", "a"]
    pool.close()
    assert opened.still() == []


def test_what_is_decoded_whole_has_one_reader_at_a_time() -> None:
    opened, together, reading = Opened(held_pixels=1), threading.Barrier(4), list[bool]()

    def take() -> None:
        together.wait(timeout=10)
        with pool.borrow(Path("a")):
            reading.append(True)
            assert len(reading) == 1
            time.sleep(0.02)  # while the others ask
            reading.clear()

    pool = SlidePool(opened.open)
    with ThreadPoolExecutor(4) as readers:
        for done in [readers.submit(take) for _ in range(4)]:
            done.result()
    assert opened.opened == ["a"]
    assert opened.still() == ["a"]


def test_readers_of_one_slide_wait_for_none_that_is_not_decoded_whole() -> None:
    pool, together = SlidePool(Opened().open), threading.Barrier(4)

    def take() -> None:
        with pool.borrow(Path("a")):
            together.wait(timeout=10)

    with ThreadPoolExecutor(4) as readers:
        for done in [readers.submit(take) for _ in range(4)]:
            done.result()


@pytest.mark.parametrize(
    ("pixels", "left"), [(100_000_000, "d"), (30_000_000, "cd"), (1_000_000, "abcd")]
)
def test_pictures_that_wait_hold_little_together(pixels: int, left: str) -> None:
    opened = Opened(pixels)
    pool = SlidePool(opened.open)
    for name in "abcd":
        with pool.borrow(Path(name)):
            pass
    assert opened.still() == [*left]


def test_plain_pictures_and_tiffs_in_large_pieces_are_decoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale: dict[str, Any] = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    picture = np.zeros((40, 50, 3), np.uint8)
    Image.fromarray(picture).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "a.tif", picture, photometric="rgb", metadata=None, **scale)
    for name, least, held in [("a.png", 10**6, 2000), ("a.tif", 1999, 2000), ("a.tif", 2000, 0)]:
        monkeypatch.setattr(tiff_reader, "_LARGE_SEGMENT_PIXELS", least)
        with open_slide(tmp_path / name, assume_mpp=0.5) as slide:
            assert slide.held_pixels == held


def test_a_slide_that_was_open_before_is_not_read_anew(tmp_path: Path) -> None:
    """Its header and table of tiles are known, unless the file is another by now."""
    opened = Opened()
    for name in "abc":
        (tmp_path / name).write_text(name)
    pool = SlidePool(opened.open, idle=1, known=2)

    def take(name: str) -> None:
        with pool.borrow(tmp_path / name) as slide:
            read(slide)
        assert opened.still() == [str(tmp_path / name)]

    for name in "abab":
        take(name)
    assert opened.opened == [str(tmp_path / name) for name in "ab"]
    take("c")
    take("b")
    assert len(opened.opened) == 3
    take("a")
    assert len(opened.opened) == 4, "forgotten, as two others came after it"
    take("c")
    (tmp_path / "a").write_text("another")
    take("a")
    assert len(opened.opened) == 6


def test_only_so_many_stay_open_and_the_newest_of_them() -> None:
    opened = Opened()
    pool = SlidePool(opened.open, idle=2)
    for name in "abcab":
        with pool.borrow(Path(name)) as slide:
            read(slide)
    assert opened.still() == ["a", "b"]


def test_a_slide_that_failed_is_not_lent_again() -> None:
    opened = Opened()
    pool = SlidePool(opened.open)
    with pytest.raises(ValueError, match="broken"), pool.borrow(Path("a")):
        raise ValueError("broken")
    assert opened.still() == []


def test_threads_never_share_a_slide() -> None:
    opened = Opened()
    pool = SlidePool(opened.open, idle=3)
    in_use: set[int] = set()
    guard = threading.Lock()

    def take(number: int) -> None:
        with pool.borrow(Path(str(number % 4))) as slide:
            read(slide)
            with guard:
                assert id(slide) not in in_use
                assert slide.path == Path(str(number % 4))
                in_use.add(id(slide))
            with guard:
                in_use.remove(id(slide))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(take, range(400)))
    assert len(opened.still()) <= 3
    pool.close()
    assert opened.still() == []


def test_a_mirax_slide_begins_as_a_picture_and_is_none(tmp_path: Path) -> None:
    """Lend it to several readers at once: OpenSlide decodes tiles, not the whole."""
    slide = tmp_path / "a.mrxs"
    slide.write_bytes(b"\xff\xd8\xff\xe0" + bytes(64))
    assert is_picture(slide), "OpenSlide knows nothing of it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slide_file, "scanner_format", lambda _: "mirax")
        assert not is_picture(slide)
