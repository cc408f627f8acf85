"""The bundle: what is saved is loaded, what is damaged is told of, and a kill leaves one whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model
from pathoseg.models.bundle import Bundle, load_bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.platform_support import composed
from pathoseg.version import __version__

CONFIG = ModelConfig("unet", "segment", 3, width=4, depth=2)
CARD = Bundle(
    model=CONFIG,
    class_names=("gland", "Dr\u00fcse \u00b5"),
    class_colours=((200, 0, 0), (0, 128, 255)),
    mpp=0.5,
    tile=64,
    overlap=16,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    multiple=4,
    stain={"method": "macenko", "alpha": 1.0},
    training={"epochs": 3, "dice": 0.875, "slides": "a, b", "limited": False, "notes": None},
)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = build_model(CONFIG)
    model(torch.rand(2, 3, 16, 16))  # moves the running statistics
    return model


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, state[name])


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "model.json").read_text())
    change(document)
    (folder / "model.json").write_text(json.dumps(document))


def _set_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Puts other weights in the bundle, with a hash that fits."""
    data = safetensors.torch.save(tensors)
    (folder / "weights.safetensors").write_bytes(data)
    _edit(folder, lambda card: card.update(weights_sha256=hashlib.sha256(data).hexdigest()))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    save_bundle(tmp_path / "run" / "model", _model().state_dict(), CARD)
    return tmp_path / "run" / "model"


def test_what_is_saved_is_loaded(bundle: Path) -> None:
    random = torch.get_rng_state()
    model, card = load_bundle(bundle)
    assert card == CARD
    assert card.pathoseg_version == __version__
    assert not model.training
    assert torch.equal(torch.get_rng_state(), random)
    _assert_same(model, _model())
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(model(images), _model().eval()(images))
    assert all(p.requires_grad for p in model.parameters())
    assert sorted(p.name for p in bundle.iterdir()) == ["model.json", "weights.safetensors"]


def test_loading_draws_no_weights(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load without `kaiming_normal_`, for which torch imports its compiler on the meta device."""
    monkeypatch.delattr(nn.init, "kaiming_normal_")
    load_bundle(bundle)


def test_weights_open_in_plain_pytorch(bundle: Path) -> None:
    tensors = safetensors.torch.load_file(bundle / "weights.safetensors")
    build_model(CONFIG).load_state_dict(tensors, strict=True)


@given(
    mpp=st.floats(1e-3, 100, allow_nan=False),
    names=st.lists(st.text(min_size=1), min_size=2, max_size=2, unique_by=composed),
    training=st.dictionaries(
        st.text(),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.floats(-1e99, 1e99)
        | st.lists(st.floats(-1e99, 1e99)).map(tuple),
    ),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_possible_card_survives(
    tmp_path: Path, mpp: float, names: list[str], training: dict[str, Any]
) -> None:
    card = replace(CARD, mpp=mpp, class_names=tuple(names), training=training, stain=None)
    save_bundle(tmp_path, _model().state_dict(), card)
    assert load_bundle(tmp_path)[1] == card


def test_the_letters_of_classes_are_composed() -> None:
    assert replace(CARD, class_names=("a", "Dru\u0308se")).class_names == ("a", "Dr\xfcse")


@given(st.lists(st.floats(0.05, 5), min_size=1, max_size=4).map(tuple), st.floats(0.05, 5))
def test_a_resolution_unlike_all_that_were_trained_on_is_told(
    known: tuple[float, ...], mpp: float
) -> None:
    told = replace(CARD, training={"slide_mpps": known}).unseen_resolution(mpp)
    ratios = [max(mpp / seen, seen / mpp) for seen in known]
    if abs(min(ratios) - 1.2) > 1e-6:
        assert (told is not None) == all(ratio > 1.2 for ratio in ratios)
    assert CARD.unseen_resolution(mpp) is None, "not recorded"


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    save_bundle(tmp_path, _model().state_dict(), replace(CARD, training={"dice": float("nan")}))
    assert load_bundle(tmp_path)[1].training == {"dice": None}


def test_a_resnet_and_half_precision_travel_too(tmp_path: Path) -> None:
    config = ModelConfig("resnet11_v2", "classify", 3, width=4)
    model = build_model(config)
    save_bundle(tmp_path, model.state_dict(), replace(CARD, model=config))
    _assert_same(load_bundle(tmp_path)[0], model)
    channels_last = _model().to(memory_format=torch.channels_last)
    save_bundle(tmp_path, channels_last.state_dict(), CARD)
    _assert_same(load_bundle(tmp_path)[0], channels_last)


def test_tied_tensors_stay_tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tied_network.py").write_text(
        "from torch import nn\n"
        "def make(in_channels, classes):\n"
        "    one, other = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)\n"
        "    other.weight = one.weight\n"
        "    return nn.Sequential(one, other)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = ModelConfig("tied_network:make", "segment", 3)
    model = build_model(config, factory=config.name)
    save_bundle(tmp_path / "b", model.state_dict(), replace(CARD, model=config, multiple=1))
    loaded = load_bundle(tmp_path / "b", factory=config.name)[0]
    _assert_same(loaded, model)
    assert loaded.get_parameter("0.weight") is loaded.get_parameter("1.weight")


def test_a_bundle_alone_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_network.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = ModelConfig("hostile_network:make", "segment", 3)
    save_bundle(
        tmp_path / "b", nn.Conv2d(3, 3, 1).state_dict(), replace(CARD, model=config, multiple=1)
    )
    for named in (None, "other:make"):
        with pytest.raises(PathosegError, match="hostile_network:make"):
            load_bundle(tmp_path / "b", factory=named)
    assert "hostile_network" not in sys.modules


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Conv2d):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    with pytest.raises(PathosegError, match="_extra_state"):
        save_bundle(tmp_path, Odd(3, 3, 1).state_dict(), CARD)


@pytest.mark.parametrize("name", ["model.json", "weights.safetensors"])
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(PathosegError, match=rf"{name} is missing"):
        load_bundle(bundle)


@given(keep=st.floats(0, 0.999))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["model.json", "weights.safetensors"])
def test_a_file_cut_short_is_named(bundle: Path, name: str, keep: float) -> None:
    whole = (bundle / name).read_bytes()
    try:
        (bundle / name).write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(PathosegError, match=name):
            load_bundle(bundle)
    finally:
        (bundle / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema": 2}, "schema version 2"),
        ({"schema": None}, "schema version None"),
        ({"weights_sha256": "../../x"}, "hash"),
        ({"mpp": float("nan")}, "NaN is no JSON number"),
        ({"mpp": 0}, "mpp 0.0 is no positive"),
        ({"mpp": "0.5"}, "`mpp` is '0.5'"),
        ({"mpp": True}, "`mpp` is True"),
        ({"mpp": 10**400}, "`mpp` is"),
        ({"class_names": ["gland"]}, "3 classes"),
        ({"class_names": ["a", "b", "c"], "class_colours": [[0, 0, 0]] * 3}, "3 classes"),
        ({"class_names": ["a", "a"]}, "twice"),
        ({"class_colours": [[0, 0, 0], [0, 0, 256]]}, "class_colours"),
        ({"class_colours": [[0, 0, 0], [0, 0]]}, "`class_colours`"),
        ({"tile": 63}, "tile 63"),
        ({"tile": 2**40}, "tile"),
        ({"overlap": 64}, "overlap 64"),
        ({"multiple": 0}, "multiple 0"),
        ({"multiple": 8}, "multiple is 8"),
        ({"std": [1, 0, 1]}, "std"),
        ({"mean": [0.5, 0.5]}, "`mean`"),
        ({"stain": [1]}, "`stain`"),
        ({"stain": {"a": [1]}}, "`stain`"),
        ({"training": {"a": {}}}, "`a`"),
        ({"colour": 1}, "unknown key, `colour`"),
        ({"model": None}, "`model` is None"),
        ({"model": {"name": "unet"}}, "`model` lacks `classes`"),
    ],
)
def test_an_impossible_card_is_told_of(bundle: Path, change: dict[str, Any], what: str) -> None:
    _edit(bundle, lambda card: card.update(change))
    with pytest.raises(PathosegError, match="model.json.*" + what) as error:
        load_bundle(bundle)
    assert error.value.hint


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"name": "unett"}, "unett.*Did you mean unet"),
        ({"classes": 4}, "2 class names.* 4 classes"),
        ({"width": 10**6}, "width 1000000"),
        ({"norm": "layer"}, "`norm` is 'layer'"),
        ({"task": "detect"}, "`task` is 'detect'"),
        ({"width": 8}, "another model.*encoder.0.conv1.weight"),
        ({"depth": 1}, "another model.*is unknown"),
        ({"norm": "group"}, "another model.*num_batches_tracked is unknown"),
        ({"width": 1024, "depth": 8}, "another model.*is missing"),
    ],
)
def test_a_card_of_another_model_is_told_of(
    bundle: Path, change: dict[str, Any], what: str
) -> None:
    _edit(bundle, lambda card: card["model"].update(change))
    with pytest.raises(PathosegError, match=what):
        load_bundle(bundle)


@pytest.mark.parametrize("text", ["", "[]", "{", "1", "\xff\xfe", "[" * 100_000, '"' + "x" * 2**21])
def test_what_is_no_card_is_told_of(bundle: Path, text: str) -> None:
    (bundle / "model.json").write_text(text, encoding="latin-1")
    with pytest.raises(PathosegError, match=r"model\.json"):
        load_bundle(bundle)


def test_a_card_without_a_key_is_told_of(bundle: Path) -> None:
    _edit(bundle, lambda card: card.pop("mpp"))
    with pytest.raises(PathosegError, match="lacks `mpp`"):
        load_bundle(bundle)


def test_other_weights_are_told_of(bundle: Path) -> None:
    tensors = safetensors.torch.load_file(bundle / "weights.safetensors")
    for change, what in (
        ({"extra": torch.zeros(1)}, "extra is unknown"),
        ({"head.bias": torch.zeros(4)}, r"head.bias is torch.float32 \(4,\)"),
        ({"head.bias": torch.zeros(3, dtype=torch.int8)}, "head.bias is torch.int8"),
    ):
        _set_weights(bundle, {**tensors, **change})
        with pytest.raises(PathosegError, match=f"weights.safetensors.*{what}"):
            load_bundle(bundle)


@given(data=st.binary(max_size=64))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_weights_that_are_no_safetensors_are_told_of(bundle: Path, data: bytes) -> None:
    header = len(data).to_bytes(8, "little") + data
    (bundle / "weights.safetensors").write_bytes(header)
    _edit(bundle, lambda card: card.update(weights_sha256=hashlib.sha256(header).hexdigest()))
    with pytest.raises(PathosegError, match=r"weights\.safetensors"):
        load_bundle(bundle)


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathosegError, match="cannot be written"):
        save_bundle(tmp_path / "file" / "model", _model().state_dict(), CARD)


class Killed(BaseException):
    """Stands for SIGKILL: after it, the process changes nothing on the disk any more."""


def _kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Makes the `moment`-th and every later change of the disk raise; a write is left half done."""
    done = 0

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > moment:
                if change is fsync:
                    os.ftruncate(args[0], 100) if os.fstat(args[0]).st_size > 4096 else None
                raise Killed
            return change(*args, **kwargs)

        return run

    fsync = os.fsync
    for where, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
        monkeypatch.setattr(where, name, deadly(getattr(where, name)))


@pytest.mark.slow
@pytest.mark.parametrize("same_weights", [True, False])
@pytest.mark.parametrize("second", [0, 3, 5])
@pytest.mark.parametrize("first", range(12))
def test_a_kill_leaves_the_old_or_the_new_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, same_weights: bool
) -> None:
    """Kills two saves one after the other, then lets one pass."""
    seeds = {0.5: 0, 0.25: 1, 0.125: 2, 1.0: 3}  # mpp tells whose card is there
    models = {mpp: _model(0 if same_weights else seed) for mpp, seed in seeds.items()}
    for mpp, moment in ((0.25, first), (0.125, second)):
        with monkeypatch.context() as deadly:
            _kill_at(deadly, moment)
            with contextlib.suppress(Killed):
                save_bundle(bundle, models[mpp].state_dict(), replace(CARD, mpp=mpp))
        model, card = load_bundle(bundle)
        _assert_same(model, models[card.mpp])
    save_bundle(bundle, models[1.0].state_dict(), replace(CARD, mpp=1.0))
    assert load_bundle(bundle)[1].mpp == 1.0
    assert sorted(p.name for p in bundle.iterdir()) == ["model.json", "weights.safetensors"]


@pytest.mark.parametrize("moment", range(10))
def test_a_killed_first_save_leaves_none_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    with monkeypatch.context() as deadly, contextlib.suppress(Killed):
        _kill_at(deadly, moment)
        save_bundle(tmp_path / "model", _model().state_dict(), CARD)
    if (tmp_path / "model" / "model.json").exists():
        _assert_same(load_bundle(tmp_path / "model")[0], _model())
    else:
        with pytest.raises(PathosegError, match="is missing"):
            load_bundle(tmp_path / "model")


def test_a_full_disk_leaves_the_old_bundle_and_no_litter(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as deadly:
        deadly.setattr(os, "fsync", full)
        with pytest.raises(PathosegError, match="No space left"):
            save_bundle(bundle, _model(1).state_dict(), replace(CARD, mpp=1.0))
    assert load_bundle(bundle)[1] == CARD
    assert sorted(p.name for p in bundle.iterdir()) == ["model.json", "weights.safetensors"]


def test_a_card_names_its_inputs(bundle: Path) -> None:
    one = {"name": "image", "mpp": 0.5, "size": 64}
    assert json.loads((bundle / "model.json").read_text())["inputs"] == [one]
    _edit(bundle, lambda card: card.pop("inputs"))  # as earlier versions wrote it
    assert load_bundle(bundle)[1] == CARD
    _edit(bundle, lambda card: card.update(inputs=[{**one, "size": 32}]))
    with pytest.raises(PathosegError, match=r"model\.json: `inputs` does not begin with the tile"):
        load_bundle(bundle)
    _edit(bundle, lambda card: card.update(inputs=[one, {**one, "name": "context"}]))
    with pytest.raises(PathosegError, match=r"names the inputs image .*context .* has image"):
        load_bundle(bundle)
