"""The configuration: round trip, flags over file, typos answered with the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.config import Config, given_options, load_config, write_config
from pathoseg.errors import PathosegError


def test_defaults_round_trip(tmp_path: Path) -> None:
    write_config(Config(), tmp_path / "c.toml")
    assert load_config(tmp_path / "c.toml") == Config()


def test_flags_overrule_the_file_and_the_record_keeps_both(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'seed = 3\n[tiles]\nmpp = 1\ntile = 256\n[data]\nclasses = ["a", "b"]\n'
        '[annotations.rename]\n"Class 1: Positive" = "a"\n'
    )
    config = load_config(path, {"": {"seed": None}, "tiles": {"tile": 512, "mpp": None}})
    assert (config.seed, config.tiles.mpp, config.tiles.tile) == (3, 1.0, 512)
    assert config.data.classes == ("a", "b")
    assert config.annotations.rename == {"Class 1: Positive": "a"}
    write_config(config, tmp_path / "record.toml")
    assert load_config(tmp_path / "record.toml") == config


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("[tiles]\ntille = 3\n", "unknown key `tiles.tille`", "`tile`"),
        ("[trian]\n", "unknown key `trian`", "`train`"),
        ("[train]\nbatch = 'many'\n", "train.batch = 'many'", "configuration.md"),
        ("[model]\nnorm = 'layer'\n", "model.norm = 'layer'", "configuration.md"),
        ("tiles = 3\n", "is a table", r"\[tiles\]"),
        ("[tiles\n", "not valid TOML", "line"),
    ],
)
def test_mistakes_name_the_key_and_the_hint(
    tmp_path: Path, text: str, problem: str, hint: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(PathosegError, match=problem) as caught:
        load_config(path)
    assert caught.match(hint)
    assert str(path) in caught.value.problem


def test_what_is_given_is_told_from_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("seed = 3\n[tiles]\nmpp = 0.5\n[annotations.rename]\na = 'b'\n")
    flags = {"": {"seed": None}, "tiles": {"tile": 64, "mpp": None}, "train": {"epochs": None}}
    given = given_options(path, flags)
    assert {section: values for section, values in given.items() if values} == {
        "": {"seed": 3},
        "tiles": {"mpp": 0.5, "tile": 64},
        "annotations": {"rename": {"a": "b"}},
    }
    (tmp_path / "record.toml").write_text("[tiles]\nmpp = 2.0\n[train]\nepochs = 7\n")
    over = load_config(tmp_path / "record.toml", given)
    assert (over.seed, over.tiles.mpp, over.tiles.tile, over.train.epochs) == (3, 0.5, 64, 7)


@pytest.mark.parametrize("value", ["150", '"2m30s"', '"2.5"'])
def test_a_time_limit_is_seconds_or_a_duration(tmp_path: Path, value: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[train]\ntime_limit = {value}\n")
    assert load_config(path).train.time_limit == 150


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match=r"nothing\.toml cannot be read"):
        load_config(tmp_path / "nothing.toml")
