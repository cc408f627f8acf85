"""Slides are opened when they are needed, lent to one thread at a time, and closed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from pathoseg.slides import slide as slide_file
from pathoseg.slides.slide import Slide, is_picture
from pathoseg.tiles.slide_pool import SlidePool


class Opened:
    """Counts what is open; of a slide, only the path and `close` matter here."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def open(self, path: Path) -> Slide:
        slide = type("Opened", (), {})()
        slide.path, slide.open = path, True
        slide.close = lambda: setattr(slide, "open", False)
        self.log.append(slide)
        return cast(Slide, slide)

    def still(self) -> list[str]:
        return sorted(str(slide.path) for slide in self.log if slide.open)


def test_a_slide_is_opened_once_and_again_only_for_another_reader() -> None:
    opened = Opened()
    pool = SlidePool(opened.open)
    for _ in range(3):
        with pool.borrow(Path("a")) as first:
            pass
    assert len(opened.log) == 1
    with pool.borrow(Path("a")) as first, pool.borrow(Path("a")) as second:
        assert first is not second
    assert len(opened.log) == 2
    pool.close()
    assert opened.still() == []


def test_a_plain_picture_is_decoded_once_for_all_its_readers(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(picture)
    opened, together = Opened(), threading.Barrier(4)

    def read() -> None:
        together.wait(timeout=10)
        with pool.borrow(picture):
            time.sleep(0.05)  # while the others ask

    pool = SlidePool(opened.open)
    with ThreadPoolExecutor(4) as readers:
        for done in [readers.submit(read) for _ in range(4)]:
            done.result()
    assert len(opened.log) == 1


def test_only_so_many_stay_open_and_the_newest_of_them() -> None:
    opened = Opened()
    pool = SlidePool(opened.open, idle=2)
    for name in "abcab":
        with pool.borrow(Path(name)):
            pass
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

    def read(number: int) -> None:
        with pool.borrow(Path(str(number % 4))) as slide:
            with guard:
                assert id(slide) not in in_use
                assert slide.path == Path(str(number % 4))
                in_use.add(id(slide))
            with guard:
                in_use.remove(id(slide))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(400)))
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
