"""A file is replaced whole or stays as it was, and no draft is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pathoseg.outputs.atomic import new_folder, replaced, write_text


def test_the_new_text_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    assert not write_text(path, "old\n")
    assert write_text(path, "µ\n")
    assert path.read_bytes() == "µ\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_of_file_names_stay_and_halves_of_emojis_are_question_marks(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "\udcfc \ud83d \udc00 \ude00 \U0001f600\r\n")
    assert (tmp_path / "a").read_bytes() == b"\xfc ? ? ? \xf0\x9f\x98\x80\r\n"


def test_until_the_block_ends_readers_see_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "regions.geojson.gz"
    path.write_text("old")
    with replaced(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
        assert draft.suffixes == path.suffixes
    assert path.read_text() == "new"


def test_an_error_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replaced(path) as draft:  # noqa: PT012 the block is what fails
        draft.write_text("half")
        raise OSError("full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_data_is_on_disk_before_the_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    seen = []

    def fsync(descriptor: int) -> None:
        seen.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replaced(path) as draft:
        draft.write_text("new")
    assert seen == [(str(draft), False), (str(tmp_path), True)]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_text(tmp_path / "replaced", "")
    assert (tmp_path / "replaced").stat().st_mode == plain.stat().st_mode


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "mask.ome.zarr"
    with pytest.raises(KeyError), new_folder(path) as draft:  # noqa: PT012 the block is what fails
        (draft / "0").mkdir(parents=True)
        (draft / "0" / "file").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with new_folder(path) as draft:
        (draft / "0").mkdir(parents=True)
        (draft / "0" / "file").write_text("whole")
        assert not path.exists()
    assert (path / "0" / "file").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
