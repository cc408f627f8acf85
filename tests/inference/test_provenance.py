"""The options that results depend on, for a slide's key and for the refusal of other options."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import Config, OutputsConfig, TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.inference.provenance import (
    key_options,
    provenance_of,
    refuse_difference,
    refuse_other_results,
)
from pathoseg.inference.result_folder import Provenance, State, write_state
from pathoseg.models.bundle_identity import CARD

OPTIONS = [
    *(("infer", each.name) for each in fields(Config().infer)),
    *(("tissue", each.name) for each in fields(Config().tissue)),
    *(("outputs", each.name) for each in fields(OutputsConfig())),
    ("data", "assume_mpp"),
]


def _changed(config: Config, table: str, key: str) -> Config:
    """Return `config` with another value of one option."""
    values: Any = getattr(config, table)
    old = getattr(values, key)
    words = {"4GiB": "2GiB", "auto": "all", "annotation": "detection"}
    words |= {new: old for old, new in words.items()}
    new = not old if isinstance(old, bool) else words.get(old) or (old or 0.1) + 0.25
    return replace(config, **{table: replace(values, **{key: new})})


@given(before=st.lists(st.sampled_from(OPTIONS), max_size=4), option=st.sampled_from(OPTIONS))
def test_what_the_key_tells_apart_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[tuple[str, str]],
    option: tuple[str, str],
) -> None:
    one = Config()
    for table, key in before:
        one = _changed(one, table, key)
    other = _changed(one, *option)
    is_told = key_options(one) != key_options(other)
    assert is_told == (option != ("infer", "readers"))
    bundle = _bundle(tmp_path_factory.getbasetemp() / "bundle")
    theirs, ours = provenance_of(bundle, one), provenance_of(bundle, other)
    if not is_told:
        refuse_difference(Path("out"), Path("a.json"), theirs, ours)
        return
    with pytest.raises(PathosegError, match=r"a\.json") as refusal:
        refuse_difference(Path("out"), Path("a.json"), theirs, ours)
    values = [getattr(getattr(each, option[0]), option[1]) for each in (one, other)]
    shown = ["none" if value is None else json.dumps(value) for value in values]
    assert f"{'.'.join(option)} = {shown[0]}, which is {shown[1]} in" in refusal.value.problem
    assert "--overwrite" in refusal.value.hint
    assert "--out" in refusal.value.hint


def _bundle(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CARD).write_text(content)
    return folder


def _result(out: Path, name: str, model: str, state: State | None) -> Path:
    folder = out / name
    folder.mkdir(parents=True)
    summary = {
        "slide": f"{name}.svs", "model": model, "mpp": {"x": 1.0, "y": 1.0}, "tissue_mm2": 1.0,
        "classes": [], "tiles": {"done": 1, "skipped": 0, "unread": 0}, "unread_pixels": 0,
        "versions": {}, "seconds": {},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    if state is not None:
        write_state(out / "states" / f"{name}.json", state)
    return folder


def _state(provenance: Provenance | None, status: Any = "done") -> State:
    return State("a.svs", status, "key", 1, "host", provenance=provenance)


def test_results_of_other_slides_count_but_for_what_their_slides_are(tmp_path: Path) -> None:
    bundle, out = _bundle(tmp_path / "bundle"), tmp_path / "out"
    ours = provenance_of(bundle, Config())
    guessed = provenance_of(bundle, _changed(Config(), "data", "assume_mpp"))
    _result(out, "a", ours.model, _state(guessed))
    refuse_other_results(out, ours, [out / "b"])
    with pytest.raises(PathosegError, match="assume_mpp"):
        refuse_other_results(out, ours, [out / "a"])
    wider = provenance_of(bundle, _changed(Config(), "infer", "overlap"))
    _result(out, "c", ours.model, _state(wider))
    with pytest.raises(PathosegError, match=r"c\.json has infer.overlap = 0.35, which is none"):
        refuse_other_results(out, ours, [out / "b"])


def test_of_a_result_without_its_options_the_model_is_compared(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    ours = provenance_of(bundle, Config())
    others = Provenance("0123", "runs/other", ours.options)
    for number, state in enumerate([None, _state(None), _state(others, "begun"), _state(others)]):
        out = tmp_path / str(number)
        _result(out, "a", ours.model, state)  # the state's attempt has not replaced it
        refuse_other_results(out, ours, [out / "a"])
        _result(out, "b", "0123", state)
        with pytest.raises(PathosegError, match=r"another model: .*b.* is by .*0123") as refusal:
            refuse_other_results(out, ours, [out / "a"])
        assert ours.model in refusal.value.problem
        assert str(bundle) in refusal.value.problem
        assert ("runs/other" in refusal.value.problem) == (number == 3)


def test_half_precision_is_an_option_too(tmp_path: Path) -> None:
    """Rows of one slide in two precisions would make one mask."""
    bundle, out = _bundle(tmp_path / "bundle"), tmp_path / "out"
    exact = Config(train=TrainConfig(amp="none"))
    ours = provenance_of(bundle, exact)
    _result(out, "a", ours.model, _state(provenance_of(bundle, Config())))
    with pytest.raises(PathosegError, match=r"train\.amp = .auto., which is .none."):
        refuse_other_results(out, ours, [out / "a"])
    assert key_options(exact) != key_options(Config())
