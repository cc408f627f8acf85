"""Yields the features of a GeoJSON file one at a time, within a bound of memory."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

_CHUNK = 1 << 20
_LARGEST_VALUE = 256 << 20
_LARGEST_TEXT = 4 << 30
# Outlines shrink by 5 to 20 times; a file that grows more than this was made to.
_LARGEST_EXPANSION = 100
_ALWAYS_ALLOWED = 64 << 20

_BLANK = re.compile(r"[ \t\n\r]*")
# What a feature or a bare geometry needs; other members are read and dropped.
_MEMBERS = {"type", "id", "geometry", "properties", "coordinates", "geometries"}


def features(path: Path) -> Iterator[Any]:
    """The features of a FeatureCollection or array, or the single object of any other file.

    Gzipped files are known by their first bytes. No more than one feature and a chunk of text
    is held at a time.

    Raises:
        OSError, EOFError, zlib.error: The file cannot be read or unpacked.
        ValueError: It is no JSON (or no UTF-8), or meets a bound: 4 Gi characters of text, 256 Mi
            for one feature, 100 times its own size when unpacked.
        RecursionError: It is nested too deeply.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        limit = _LARGEST_TEXT
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if packed:
            limit = min(limit, max(_ALWAYS_ALLOWED, _LARGEST_EXPANSION * path.stat().st_size))
        bytes_ = stack.enter_context(gzip.GzipFile(fileobj=file)) if packed else file
        text = _Text(stack.enter_context(io.TextIOWrapper(bytes_, encoding="utf-8-sig")), limit)
        if not text.peek():
            raise ValueError("it is empty")
        yield from _top_level(text)
        if text.peek():
            raise ValueError("text goes on after the end of the JSON")


def _top_level(text: _Text) -> Iterator[Any]:
    if text.peek() == "[":
        yield from text.array()
        return
    collection = False
    rest: dict[str, Any] = {}
    text.expect("{")
    more = not text.take("}")
    while more:
        key = text.value()
        if not isinstance(key, str):
            raise ValueError("a member's name is no text")
        text.expect(":")
        if key == "features" and text.peek() == "[":
            collection = True
            yield from text.array()
        else:
            value = text.value()
            if key in _MEMBERS:
                rest[key] = value
        more = text.take(",")
        if not more:
            text.expect("}")
    if not collection:
        yield rest


class _Text:
    """JSON text that is read as far as the next value needs."""

    def __init__(self, stream: TextIO, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._taken = 0
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._at = 0

    def peek(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            blank = _BLANK.match(self._buffer, self._at)
            assert blank is not None  # it matches nothing, too
            self._at = blank.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def take(self, character: str) -> bool:
        """Steps over `character` if it comes next."""
        found = self.peek() == character
        self._at += found
        return found

    def expect(self, character: str) -> None:
        if not self.take(character):
            if not self.peek():
                raise ValueError("it is cut short")
            raise ValueError(f"{self.peek()!r} comes where {character!r} should")

    def value(self) -> Any:
        """The next whole value."""
        self.peek()
        all_read = False
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if all_read:
                    told = f"{error.msg}, or it" if self.peek() else "it"
                    raise ValueError(f"{told} is cut short") from error
            else:
                # Near the buffer's end a number may go on: 1 | 2, 1. | 5, 1e+ | 5.
                if all_read or end + 3 <= len(self._buffer):
                    self._at = end
                    return value
            all_read = not self._fill()

    def array(self) -> Iterator[Any]:
        """The elements of the array that comes next."""
        self.expect("[")
        more = not self.take("]")
        while more:
            yield self.value()
            more = self.take(",")
            if not more:
                self.expect("]")

    def _fill(self) -> bool:
        """Read on; twice as far each time, so that a long value costs linear time."""
        rest = self._buffer[self._at :]
        if len(rest) > _LARGEST_VALUE:
            raise ValueError(f"one value is longer than {_LARGEST_VALUE >> 20} Mi characters")
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        self._taken += len(chunk)
        if self._taken > self._limit:
            raise ValueError(f"its text is longer than the bound of {self._limit >> 20} MiB")
        self._buffer, self._at = rest + chunk, 0
        return bool(chunk)
