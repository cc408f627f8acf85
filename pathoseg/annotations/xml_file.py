"""Reads XML as a stream of elements, with entities off and a bound on the size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser, ParseError
from shapely.errors import ShapelyError

from pathoseg.errors import PathosegError, not_permitted

_LARGEST = 1 << 30
_CHUNK = 1 << 20
# Expat before 2.6 parses an unfinished token again with every chunk (CVE-2023-52425).
_LONGEST_TOKEN = 16 << 20


class Elements(Protocol):
    """Is told of every element in turn, so that a file never becomes a tree in memory."""

    def start(self, tag: str, attributes: dict[str, str]) -> None: ...
    def end(self, tag: str) -> None: ...


def read_xml(path: Path, elements: Elements) -> None:
    """Tell `elements` of all that an XML file holds.

    Raises:
        PathosegError: The file cannot be read, is no XML, defines entities, is above 1 GiB, or
            `elements` found an attribute missing (KeyError) or malformed (ValueError,
            OverflowError), or an outline of which no region can be made (ShapelyError).
    """
    for _ in _feed(path, elements):
        pass


def root_tag(path: Path) -> str:
    """The name of a file's outermost element; of the rest no more than needed is read.

    Raises:
        PathosegError: As for `read_xml`.
    """
    root = _Root()
    for _ in _feed(path, root):
        if root.tag:
            break
    return root.tag


class _Root:
    def __init__(self) -> None:
        self.tag = ""

    def start(self, tag: str, _: dict[str, str]) -> None:
        self.tag = self.tag or tag

    def end(self, tag: str) -> None: ...


def _feed(path: Path, elements: Elements) -> Iterator[None]:
    """Parses a file, pausing after each chunk."""
    parser = DefusedXMLParser(target=elements)
    try:
        if path.stat().st_size > _LARGEST:
            raise PathosegError(
                f"{path} is above the bound of {_LARGEST >> 20} MiB for XML.",
                "Simplify the outlines, or export them from QuPath as GeoJSON.",
            )
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                parser.feed(chunk)
                if file.tell() - parser.parser.CurrentByteIndex > _LONGEST_TOKEN:
                    raise ValueError("one tag goes on for more than 16 MiB")
                yield
        parser.close()
    except DefusedXmlException as error:
        raise PathosegError(
            f"{path} defines XML entities, which no annotation needs: {error}.",
            "Export the annotations again from ASAP or ImageScope.",
        ) from error
    except PermissionError:
        raise not_permitted(path) from None
    except (OSError, ParseError, ValueError, LookupError, OverflowError, ShapelyError) as error:
        problem = f"lacks the attribute {error}" if isinstance(error, KeyError) else str(error)
        line = parser.parser.CurrentLineNumber
        raise PathosegError(
            f"{path} cannot be read as annotations in XML: {problem} (line {line}).",
            "Export the annotations again from ASAP or ImageScope.",
        ) from error


def number(text: str) -> float:
    """A number as XML files have it; some locales write a decimal comma.

    Raises:
        ValueError: It is none.
    """
    return float(text.replace(",", "."))


def colour(text: str) -> tuple[int, int, int] | None:
    """The colour "#RRGGBB", or None where the text is none."""
    try:
        red, green, blue = bytes.fromhex(text.removeprefix("#"))
    except ValueError:
        return None
    return red, green, blue
