"""Test what a training says of the model that it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.training import earlier_model
from pathoseg.training.earlier_model import EarlierModel, warn_of_seen
from pathoseg.training.splits import Member, write_splits


def test_held_out_slides_that_it_has_seen_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(earlier_model, "say", said.append)
    seen = Member("Dr\udcfcse.svs", "p1", "train")
    write_splits(tmp_path / "splits.csv", [seen, Member("b.svs", "p2", "val")], {})
    held_out = [Member(seen.slide, "p1", "val"), Member("b.svs", "p2", "test")]
    earlier = EarlierModel(tmp_path / "model", "1234", {}, None, {})
    warn_of_seen(earlier, {member.slide: member for member in held_out})
    (line,) = said
    assert "held out now (Dr\udcfcse.svs)" in line


def test_a_slide_is_seen_however_its_letters_are_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(earlier_model, "say", said.append)
    write_splits(tmp_path / "splits.csv", [Member("Dru\u0308se.svs", "p1", "train")], {})
    earlier = EarlierModel(tmp_path / "model", "1234", {}, None, {})
    warn_of_seen(earlier, {"Dr\xfcse.svs": Member("Dr\xfcse.svs", "p1", "val")})
    assert "held out now (Dr\xfcse.svs)" in said[0]
