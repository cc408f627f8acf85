"""The configuration: round trip, flags over file, typos answered with the nearest key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pathoseg import _flags, config_file
from pathoseg.config import FORMAT, Config, TileConfig
from pathoseg.config_file import UNNUMBERED, given_options, load_config, write_config
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
        ("classes = ['a']\n", "unknown key `classes`", r"It belongs to \[data\]\.$"),
        ("[model]\nclasses = []\n", "`model.classes`", r"It belongs to \[data\]\.$"),
        ("[train]\ntile = 3\n", "`train.tile`", r"It belongs to \[tiles\] or to \[infer\]\.$"),
        ("[train]\nseed = 3\n", "`train.seed`", "It belongs above the first table"),
        ("[train.data]\n", "`train.data`", r"It belongs to the top level, as \[data\]\.$"),
        ("[train]\nbatch = 'many'\n", "train.batch = 'many'", "configuration.md"),
        ("[model]\nwidth = '16'\n", "stands without quotation marks", "configuration.md"),
        ("[train]\nlr = '0.1'\n", "stands without quotation marks", "configuration.md"),
        ("[data]\nclasses = 'gland'\n", r"must be a list: \[ … \]", "configuration.md"),
        ("[annotations]\nrename = ['a']\n", "must be a table: { … }", "configuration.md"),
        ("[data]\nclasses = [1]\n", 'must be a text: " … "', "configuration.md"),
        ("[model]\nnorm = 'layer'\n", "model.norm = 'layer'", "configuration.md"),
        ("tiles = 3\n", "is a table", r"\[tiles\]"),
        ("[tiles\n", "not valid TOML", "line"),
        (f"format = {FORMAT + 1}\n[new]\n", f"is of format {FORMAT + 1}", "newer"),
        ("format = 0\n", "format = 0", "configuration.md"),
        ("format = true\n", "format = True", "configuration.md"),
        ("seed = -1\n", "seed = -1", "configuration.md"),
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


def test_what_windows_writes_is_read_or_told(tmp_path: Path) -> None:
    """A mark ahead of UTF-8, as Notepad sets it, and another code page."""
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf[tiles]\r\nmpp = 4.0\r\n")
    assert load_config(path).tiles.mpp == 4.0
    path.write_bytes("# Müller\nseed = 1\n".encode("cp1252"))
    with pytest.raises(PathosegError, match=r"c\.toml is not in UTF-8") as told:
        load_config(path)
    assert told.value.hint == "Save it as UTF-8."


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"train": {"epoch": 3}}, "train.epoch"),
        ({"tile": {"mpp": 1.0}}, "tile"),
        ({"sead": 3}, "sead"),
        ({"train.epochs": 1}, "train.epochs"),
    ],
)
def test_unknown_keys_of_python_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(PathosegError, match=f"The options: unknown key `{key}`"):
        load_config(None, _flags(options))


def test_options_of_python_are_those_of_the_file() -> None:
    assert load_config(None, _flags({"seed": 3, "train": {"epochs": 2}}, "s")).seed == 3
    for options in ({"train": 3}, {"data": 3}):
        with pytest.raises(PathosegError, match="is a table"):
            load_config(None, _flags(options, "s"))


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


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """One as bash makes of `--config <(…)` gives its options once, and then none."""
    os.mkfifo(tmp_path / "options")
    with pytest.raises(PathosegError, match="options is a pipe"):
        load_config(tmp_path / "options")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathosegError, match=r"nothing\.toml cannot be read"):
        load_config(tmp_path / "nothing.toml")


def test_a_run_keeps_the_defaults_of_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = {
        1: {"": {"seed": 7}, "tiles": {"overlap": 5}, "train": {"batch": 1, "lr": 0.5}},
        2: {"tiles": {"overlap": 6, "balance": "none"}},
    }
    monkeypatch.setattr(config_file, "_FORMER_DEFAULTS", former)
    monkeypatch.setattr(config_file, "FORMAT", 3)
    path = tmp_path / "config.toml"

    def defaults(text: str, unnumbered: int) -> tuple[object, ...]:
        path.write_text(text + "[train]\nbatch = 9\n")
        found = load_config(path, {"train": {"lr": 0.25}}, unnumbered)
        assert (found.train.batch, found.train.lr) == (9, 0.25), "what is given holds"
        write_config(found, path)
        assert load_config(path) == found, "so it does where the record is read"
        return found.format, found.seed, found.tiles.overlap, found.tiles.balance

    today = TileConfig()
    assert defaults("", UNNUMBERED) == (1, 7, 5, "none"), "the older of two former defaults"
    assert defaults("format = 1\n", 3) == (1, 7, 5, "none")
    assert defaults("format = 2\n", UNNUMBERED) == (2, 0, 6, "none")
    assert defaults("", 3) == (3, 0, today.overlap, today.balance)


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_former_defaults_are_values_that_keys_take(tmp_path: Path, number: int) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"format = {number}\n")
    assert load_config(path).format == number


def test_a_retired_key_is_accepted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config_file, "_RETIRED", {"tiles.sieve": "no tile is sieved any more"})
    path = tmp_path / "config.toml"
    path.write_text("[tiles]\nsieve = 3\ntile = 64\n")
    assert load_config(path) == load_config(None, {"tiles": {"tile": 64}})
    assert "`tiles.sieve` is ignored: no tile is sieved any more." in capsys.readouterr().err
