"""Weights of encoders: files of every form, names of every origin, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.device import MEAN, STD
from pathoseg.errors import PathosegError
from pathoseg.models import encoder_weights, model_options
from pathoseg.models.build import build_model
from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.models.encoder_weights import (
    EncoderWeights,
    fitting_options,
    read_bundle_encoder,
    read_encoder,
    set_encoder,
)
from pathoseg.models.model_options import ModelConfig, ViTShape, vit_shape
from pathoseg.models.unet_resnet import ResNetEncoder
from pathoseg.models.vit_seg import VisionTransformer

Tensors = dict[str, torch.Tensor]
RESNET = ModelConfig("unet_resnet18", "segment", 2)
VIT = ModelConfig("vit_seg", "segment", 2)


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more size of `vit_seg`, which costs nothing."""
    sizes = {**model_options.VIT_SIZES, "tiny": (8, 4, 2)}
    for module in (model_options, encoder_weights):
        monkeypatch.setattr(module, "VIT_SIZES", sizes)


def _state(encoder: torch.nn.Module) -> Tensors:
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    return {name: tensor.detach().clone() for name, tensor in encoder.state_dict().items()}


def _vit(**shape: Any) -> Tensors:
    return _state(VisionTransformer(ViTShape(8, 4, 2, **shape)))


def _resnet() -> Tensors:
    return _state(ResNetEncoder((1, 1), bottleneck=True, width=4))


def _saved(path: Path, state: Any) -> EncoderWeights:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return read_encoder(path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "resnet.pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "encoder.backbone."])
def test_a_resnet_is_read_under_any_prefix(tmp_path: Path, name: str, prefix: str) -> None:
    state = _resnet()
    rest = {"fc.weight": torch.zeros(2, 64), "fc.bias": torch.zeros(2)}
    found = _saved(tmp_path / name, {prefix + key: value for key, value in (state | rest).items()})
    assert set(found.left_over) == set(rest)
    encoder = ResNetEncoder((1, 1), bottleneck=True, width=4)
    assert set_encoder(encoder, found) == ()
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("wrapper", ["teacher", "state_dict", "model"])
def test_checkpoints_are_unwrapped(tmp_path: Path, wrapper: str) -> None:
    state = _resnet()
    found = _saved(
        tmp_path / "whole.pth", {"epoch": torch.tensor(3), wrapper: state, "student": {}}
    )
    assert found.tensors.keys() == state.keys()


def test_of_several_encoders_the_teacher_is_meant(tmp_path: Path) -> None:
    one, two = _resnet(), _resnet()
    both = {f"student.{k}": v for k, v in one.items()} | {f"teacher.{k}": v for k, v in two.items()}
    found = _saved(tmp_path / "dino.safetensors", both)
    assert torch.equal(found.tensors["conv1.weight"], two["conv1.weight"])
    both = {f"{at}.{k}": v for at in "ab" for k, v in _resnet().items()}
    with pytest.raises(PathosegError, match=r"several encoders: a\., b\."):
        _saved(tmp_path / "two.safetensors", both)


@settings(max_examples=20, deadline=None)
@given(
    registers=st.integers(0, 3),
    mlp=st.sampled_from(["gelu", "swiglu"]),
    layer_scale=st.booleans(),
    patch=st.sampled_from([8, 14, 16]),
    positions=st.integers(7, 9),
    counted=st.sampled_from(["patches", "class", "all"]),
)
def test_options_follow_from_a_transformer(
    tmp_path_factory: pytest.TempPathFactory,
    registers: int,
    mlp: Any,
    layer_scale: bool,
    patch: int,
    positions: int,
    counted: str,
) -> None:
    shape: dict[str, Any] = {
        "registers": registers,
        "mlp": mlp,
        "layer_scale": layer_scale,
        "patch": patch,
        "positions": positions,
    }
    state = _vit(**shape)
    given_state = {**state, "head.weight": torch.ones(2)}
    # timm's files hold positions of all tokens, DINOv2's of the class token and the patches.
    before = {"patches": 0, "class": 1, "all": 1 + registers}[counted]
    first = torch.randn(1, before, 8)
    given_state["pos_embed"] = torch.cat([first, state["pos_embed"]], 1)
    found = _saved(tmp_path_factory.mktemp("vit") / "model.safetensors", given_state)
    options = fitting_options(VIT, found)
    assert vit_shape(options) == ViTShape(8, 4, 2, **shape)
    encoder = VisionTransformer(vit_shape(options))
    assert set_encoder(encoder, found) == ()
    assert found.left_over == ("head.weight",)
    assert torch.equal(encoder.pos_embed, state["pos_embed"])
    cls = state["cls_token"] + (first[:, :1] if before else 0)
    assert torch.equal(encoder.cls_token, cls)
    if registers:
        reg = state["reg_token"] + (first[:, 1:] if counted == "all" else 0)
        assert torch.equal(encoder.reg_token, reg)


def test_names_of_dinov2_are_known(tmp_path: Path) -> None:
    state = _vit(registers=2, mlp="swiglu")
    renamed = {"mask_token": torch.zeros(1, 8)}
    for name, tensor in state.items():
        new = name.replace("reg_token", "register_tokens")
        new = new.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        parts = new.split(".")
        if parts[0] == "blocks":  # in two chunks
            new = ".".join(["blocks", str(int(parts[1]) // 2), *parts[1:]])
        renamed[new] = tensor
    found = _saved(tmp_path / "dinov2.pth", renamed)
    assert found.left_over == ("mask_token",)
    assert found.tensors.keys() == state.keys()
    assert vit_shape(fitting_options(VIT, found)).mlp == "swiglu"


def test_half_precision_becomes_single(tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in _vit().items()}
    found = _saved(tmp_path / "half.safetensors", state)
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}


def test_what_is_stated_is_kept_and_refused_by_name(tmp_path: Path) -> None:
    found = _saved(tmp_path / "model.safetensors", _vit(registers=1))
    stated = ModelConfig("vit_seg", "segment", 2, options={"patch": 16})
    options = fitting_options(stated, found)
    assert options["patch"] == 16
    encoder = VisionTransformer(vit_shape(options))
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(PathosegError, match=r"patch_embed\.proj\.weight has the shape \(8, 3, 14"):
        set_encoder(encoder, found)
    for name, tensor in encoder.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_missing_tensors_are_named_and_missing_blocks_refused(tmp_path: Path) -> None:
    state = _vit()
    del state["norm.bias"]
    found = _saved(tmp_path / "model.safetensors", state)
    assert set_encoder(VisionTransformer(ViTShape(8, 4, 2)), found) == ("norm.bias",)
    found = _saved(tmp_path / "short.safetensors", _resnet())
    for units, where in (((1, 1, 1), "the network, but not in the file"), ((1,), "the file alone")):
        with pytest.raises(PathosegError, match=f"is in {where}"):
            set_encoder(ResNetEncoder(units, bottleneck=True, width=4), found)


CONFIG = {
    "architecture": "vit_tiny_patch14",
    "model_args": {"img_size": 224},
    "pretrained_cfg": {"mean": [0.7, 0.5, 0.7], "std": [0.2, 0.25, 0.2], "license": "cc-by-nc-4.0"},
}


def test_the_config_beside_gives_mean_std_name_and_licence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = _saved(tmp_path / "model.safetensors", _vit())
    assert (found.name, found.licence) == ("vit_tiny_patch14", "cc-by-nc-4.0")
    assert (found.mean, found.std) == ((0.7, 0.5, 0.7), (0.2, 0.25, 0.2))
    (tmp_path / "config.json").unlink()
    found = read_encoder(tmp_path / "model.safetensors")
    assert (found.name, found.licence, found.mean) == ("model.safetensors", None, None)


def test_other_heads_in_the_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4}}))
    found = _saved(tmp_path / "model.safetensors", _vit())
    with pytest.raises(PathosegError, match="4 heads of attention"):
        fitting_options(VIT, found)


@settings(max_examples=10, deadline=None)
@given(
    registers=st.integers(0, 4),
    positions=st.integers(2, 4),
    lora=st.integers(0, 2),
    mlp=st.sampled_from(["gelu", "swiglu"]),
)
def test_the_encoder_of_a_bundle_answers_as_it_did_there(
    tmp_path_factory: pytest.TempPathFactory, registers: int, positions: int, lora: int, mlp: str
) -> None:
    options = {"size": "tiny", "registers": registers, "positions": positions, "mlp": mlp}
    shape = ModelConfig("vit_seg", "segment", 3, options={**options, "lora": lora})
    model = build_model(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    colours = ((1, 2, 3), (4, 5, 6))
    sizes = {"mpp": 1.0, "tile": 28, "overlap": 0, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    training = {"encoder": "vit_tiny", "encoder_licence": "cc-by-nc-4.0"}
    folder = tmp_path_factory.mktemp("bundle")
    card = Bundle(shape, ("one", "two"), colours, **sizes, multiple=1, training=training)
    save_bundle(folder, model.state_dict(), card)

    found = read_bundle_encoder(folder)
    assert (found.mean, found.std) == (card.mean, card.std)
    assert (found.name, found.licence) == ("vit_tiny", "cc-by-nc-4.0")
    encoder = VisionTransformer(vit_shape(fitting_options(VIT, found)))
    assert set_encoder(encoder, found) == ()
    images = torch.randn(1, 3, 42, 56)
    for one, two in zip(encoder(images), model.get_submodule("encoder")(images), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_bundle_without_an_encoder_is_refused(tmp_path: Path) -> None:
    shape = ModelConfig("unet", "segment", 2, width=1, depth=1)
    card = Bundle(shape, ("one",), ((1, 2, 3),), 1.0, 32, 0, MEAN, STD, multiple=2)
    save_bundle(tmp_path, build_model(shape).state_dict(), card)
    with pytest.raises(PathosegError, match=r"The model unet in .* has no encoder"):
        read_bundle_encoder(tmp_path)


class _Code:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("code ran",)


def _write_code(path: Path) -> None:
    torch.save({"model": _Code()}, path.with_suffix(".pth"))


def _write_truncated_archive(path: Path) -> None:
    torch.save(_resnet(), path.with_suffix(".pth"))
    whole = path.with_suffix(".pth").read_bytes()
    path.with_suffix(".pth").write_bytes(whole[: len(whole) // 2])


def _write_truncated(path: Path) -> None:
    safetensors.torch.save_file(_resnet(), path)
    path.write_bytes(path.read_bytes()[:-9])


def _write_others(path: Path) -> None:
    safetensors.torch.save_file({"stem.weight": torch.zeros(1)}, path)


def _write_nothing(path: Path) -> None:
    torch.save({"epoch": 3}, path.with_suffix(".bin"))


def _write_bad_config(path: Path) -> None:
    safetensors.torch.save_file(_vit(), path)
    (path.parent / "config.json").write_text('{"pretrained_cfg": {"mean": [1, 2]}}')


def _write_bad_std(path: Path) -> None:
    safetensors.torch.save_file(_vit(), path)
    (path.parent / "config.json").write_text('{"pretrained_cfg": {"std": [1, 0, 1]}}')


def _write_itself(path: Path) -> None:
    state: dict[str, Any] = {"epoch": 3}
    state["model"] = state
    torch.save(state, path.with_suffix(".bin"))


def _write_flat(name: str) -> Callable[[Path], None]:
    return lambda path: safetensors.torch.save_file({**_vit(), name: torch.zeros(8)}, path)


def _write_odd_positions(path: Path) -> None:
    safetensors.torch.save_file({**_vit(), "pos_embed": torch.zeros(1, 23, 8)}, path)


def _write_no_class_token(path: Path) -> None:
    state = _vit()
    del state["cls_token"]
    safetensors.torch.save_file(state, path)


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda path: None, "cannot be read"),
        (_write_code, "code is not run"),
        (_write_truncated_archive, "cut short"),
        (_write_truncated, "is no safetensors file"),
        (_write_others, r"no encoder that is known: of its 1 tensors \(the first is stem.weight\)"),
        (_write_nothing, "no tensors by name"),
        (_write_bad_config, "config.json, beside the encoder's weights, is no config"),
        (_write_bad_std, "a std is not above 0"),
        (_write_itself, "no tensors by name"),
        *(
            (_write_flat(name), f"{name} is of shape")
            for name in ("cls_token", "pos_embed", "patch_embed.proj.weight")
        ),
        (_write_odd_positions, "pos_embed is of 23 tokens"),
        (_write_no_class_token, "without cls_token"),
    ],
)
def test_bad_files_are_told(
    tmp_path: Path,
    write: Callable[[Path], None],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    files = [each for each in tmp_path.iterdir() if each.name != "config.json"]
    with pytest.raises(PathosegError, match=told) as caught:
        read_encoder(files[0] if files else path)
    assert caught.value.hint
    assert str(tmp_path) in caught.value.problem
    assert "code ran" not in capsys.readouterr().out


def test_the_other_kind_and_unknown_sizes_are_refused(tmp_path: Path) -> None:
    resnet = _saved(tmp_path / "resnet.safetensors", _resnet())
    with pytest.raises(PathosegError, match="holds a ResNet") as caught:
        fitting_options(VIT, resnet)
    assert "unet_resnet50" in (caught.value.hint or "")
    vit = _saved(tmp_path / "vit.safetensors", _vit())
    with pytest.raises(PathosegError, match="holds a vision transformer"):
        fitting_options(RESNET, vit)
    odd = _saved(tmp_path / "odd.safetensors", _state(VisionTransformer(ViTShape(8, 5, 2))))
    with pytest.raises(PathosegError, match="5 blocks with tokens of 8 numbers"):
        fitting_options(VIT, odd)


@pytest.mark.parametrize(
    ("licence", "warned"),
    [
        ("CC-BY-NC-ND-4.0", True),
        ("cc by-nc 4.0", True),
        ("CC_BY_NC_4.0", True),
        ("not for commercial use", True),
        ("Apache-2.0 (Google Research)", False),
        ("Non-commercial research only", True),
        ("Apache-2.0", False),
        ("MIT", False),
        ("BSD-3-Clause, see ncbi.nlm.nih.gov", False),
        (None, False),
    ],
)
def test_licences_without_commercial_use_are_warned_of(licence: str | None, warned: bool) -> None:
    card = Bundle(
        model=RESNET,
        class_names=("gland",),
        class_colours=((200, 0, 0),),
        mpp=0.5,
        tile=64,
        overlap=0,
        mean=MEAN,
        std=STD,
        multiple=32,
        training={"encoder_licence": licence},
    )
    assert (card.licence_warning() is not None) == warned
