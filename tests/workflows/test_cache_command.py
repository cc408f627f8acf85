"""Filling the tile cache ahead: what it holds, going on, and that training draws from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str]]


def _shards(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/*/pixels/c.*")}


def test_it_is_filled_once_and_used_by_training(toy_slides: Path, command: Command) -> None:
    arguments = ("--slides", toy_slides, "--config", "tiny.toml")
    (toy_slides / "slide 0.geojson").touch()
    stray = "Annotations without a slide of their name: slide 0.geojson (like slide0.png)."
    code, said = command("cache", *arguments, "--out", "kept")
    assert code == 0, said
    assert said.count(stray) == 1
    assert 'cache = "kept"' in said
    assert all(f"slide{number}.png: " in said for number in range(4))
    shards = _shards(Path("kept"))
    assert len(shards) == 4
    assert command("cache", *arguments, "--out", "kept")[0] == 0
    assert _shards(Path("kept")) == shards

    text = Path("tiny.toml").read_text().replace("epochs = 4", "epochs = 1")
    Path("tiny.toml").write_text(text)
    text = text.replace("[tiles]", '[tiles]\ncache = "kept"')
    Path("cached.toml").write_text(text)
    for run, config in (("plain", "tiny.toml"), ("cached", "cached.toml")):
        code, said = command("train", "--slides", toy_slides, "--config", config, "--out", run)
        assert code == 0, said
        assert said.count(stray) == 1
    assert _shards(Path("kept")) == shards, "training reads what is there"
    plain, cached = (Path(run, "model/weights.safetensors") for run in ("plain", "cached"))
    assert plain.read_bytes() == cached.read_bytes()


def test_a_changed_slide_is_cut_anew_and_told(
    toy_slides: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("cache", "--slides", toy_slides, "--config", "tiny.toml")
    assert command(*arguments)[0] == 0
    before = _shards(Path("tiles"))
    (toy_slides / "slide0.png").write_bytes((toy_slides / "slide1.png").read_bytes())
    assert command(*arguments)[0] == 0
    after = _shards(Path("tiles"))
    assert len(after) == len(before)
    assert len(before.keys() - after.keys()) == 1
    assert "slide0.png has changed" in caplog.text


def test_a_bad_slide_is_named_and_what_was_filled_stays(toy_slides: Path, command: Command) -> None:
    (toy_slides / "slide2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    code, said = command("cache", "--slides", toy_slides, "--config", "tiny.toml")
    assert code == 2
    assert str(toy_slides / "slide2.png") in said
    assert not Path("tiles").exists()
