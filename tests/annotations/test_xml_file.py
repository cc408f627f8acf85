"""Reading XML without a tree: bombs, entities, broken files, numbers and colours."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.annotations.xml_file import colour, number, read_xml, root_tag
from pathoseg.errors import PathosegError


class _Seen:
    def __init__(self) -> None:
        self.tags: list[str] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.tags.append(tag)

    def end(self, tag: str) -> None: ...


def _file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "a.xml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_elements_come_in_order(tmp_path: Path) -> None:
    seen = _Seen()
    read_xml(_file(tmp_path, "<a><b x='1'/><c>text</c></a>"), seen)
    assert seen.tags == ["a", "b", "c"]


def test_the_root_is_known_without_the_rest(tmp_path: Path) -> None:
    whole_chunks = "<root>" + "<a/>" * 600_000
    assert root_tag(_file(tmp_path, whole_chunks + "<broken")) == "root"


LAUGHS = "".join(
    f'<!ENTITY l{depth} "{f"&l{depth - 1};" * 10}">' if depth else '<!ENTITY l0 "ha">'
    for depth in range(12)
)


@pytest.mark.parametrize(
    "text",
    [
        f"<!DOCTYPE a [{LAUGHS}]><a>&l11;</a>",
        f'<!DOCTYPE a [<!ENTITY big "{"x" * 100_000}">]><a>{"&big;" * 10_000}</a>',
        '<!DOCTYPE a [<!ENTITY file SYSTEM "file:///etc/passwd">]><a>&file;</a>',
        '<!DOCTYPE a [<!ENTITY % remote SYSTEM "http://127.0.0.1/x.dtd"> %remote;]><a/>',
    ],
    ids=["billion laughs", "quadratic", "file", "remote"],
)
def test_entities_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PathosegError, match=r"a\.xml defines XML entities"):
        read_xml(_file(tmp_path, text), _Seen())


def test_a_tag_without_an_end_is_refused_before_it_costs_quadratic_time(tmp_path: Path) -> None:
    path = _file(tmp_path, b'<a x="' + b"y" * (24 << 20))
    with pytest.raises(PathosegError, match="16 MiB"):
        read_xml(path, _Seen())


def test_a_file_above_the_bound_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse.xml"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(PathosegError, match=r"sparse\.xml is above the bound"):
        root_tag(path)


@pytest.mark.parametrize(
    "text",
    [b"", b"<a>", b"<a></b>", b"\xff\xfe\x00", b'<?xml version="1.0" encoding="klingon"?><a/>'],
)
def test_what_is_no_xml_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(PathosegError, match=r"a\.xml cannot be read"):
        read_xml(_file(tmp_path, text), _Seen())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match=r"none\.xml.*No such file"):
        read_xml(tmp_path / "none.xml", _Seen())


def test_numbers_and_colours() -> None:
    assert number("1,5") == number("1.5") == 1.5
    assert colour("#0A00ff") == (10, 0, 255)
    assert colour("red") is colour("") is colour("#fff") is colour("#00112233") is None
