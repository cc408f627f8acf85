"""GeoJSON as a stream: the same objects as json.loads, in bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pathoseg.annotations import feature_stream
from pathoseg.annotations.feature_stream import features

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def _file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "a.geojson"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.slow
@given(
    elements=st.lists(JSON, max_size=4),
    extra=JSON,
    indent=st.sampled_from([None, 2]),
    chunk=st.integers(1, 9),
    packed=st.booleans(),
)
@example(elements=[0.5, 1.25e-7, 1e22, -12], extra=0.0, indent=None, chunk=1, packed=False)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_elements_are_those_of_the_whole_document(
    tmp_path: Path, elements: list[Any], extra: Any, indent: int | None, chunk: int, packed: bool
) -> None:
    collection = {"type": "FeatureCollection", "more": extra, "features": elements, "end": extra}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_stream, "_CHUNK", chunk)  # every token is cut somewhere
        for document in (collection, elements):
            text = json.dumps(document, indent=indent, ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
            try:
                text.decode()
            except UnicodeDecodeError:
                continue  # lone surrogates are not UTF-8
            path = _file(tmp_path, gzip.compress(text) if packed else text)
            assert list(features(path)) == elements


@pytest.mark.parametrize("single", [{"type": "Feature", "geometry": None}, {"type": "Point"}, {}])
def test_a_single_object_is_itself(tmp_path: Path, single: dict[str, Any]) -> None:
    assert list(features(_file(tmp_path, "\ufeff" + json.dumps(single)))) == [single]


def test_members_that_nobody_needs_are_not_kept(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"bulk": [1, 2, 3], "type": "Feature"}')
    assert list(features(path)) == [{"type": "Feature"}]


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "3", "[1, 2", "[1 2]", "[1,]", "[1]]", "{} {}", "[" * 100_000],
        *["{[1]: 2}", '{"features": [1]', '{"a" 1}', '{"a": tru}', '{"type": "Feature",}'],
        *[b"\xff\xfe[]", b'["\x80"]'],
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        list(features(_file(tmp_path, text)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("\n ", "empty"),
        ("[{}", "cut short"),
        ("{", "cut short"),
        ('{"features": [', "cut short"),
    ],
)
def test_what_ended_early_is_told_as_such(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"it is {reason}$"):
        list(features(_file(tmp_path, text)))


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: packed[:40] + b"??"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: Any) -> None:
    text = json.dumps([{"number": number} for number in range(1000)]).encode()
    with pytest.raises((EOFError, zlib.error, ValueError)):
        list(features(_file(tmp_path, damage(gzip.compress(text)))))


@pytest.mark.parametrize("filler", [b" ", b'{"type":"Feature"},'])
def test_a_gzip_bomb_meets_the_bound(
    tmp_path: Path, filler: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_stream, "_ALWAYS_ALLOWED", 8 << 20)
    path = tmp_path / "bomb.geojson.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(b"[")
        for _ in range(20):
            file.write(filler * ((1 << 20) // len(filler)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="bound of 8 MiB"):
        for _ in features(path):
            pass


def test_one_endless_value_meets_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_stream, "_LARGEST_VALUE", 4 << 20)
    with pytest.raises(ValueError, match="one value is longer"):
        list(features(_file(tmp_path, '["' + "x" * (16 << 20))))
