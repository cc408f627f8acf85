"""The vision transformer: any tile, published sizes, timm's names, positions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model, edge_reach, tile_multiple
from pathoseg.models.model_options import ModelConfig, Norm, ViTShape, vit_shape
from pathoseg.models.vit_seg import VisionTransformer, ViTSeg

TINY = ViTShape(8, 4, 2)


@settings(max_examples=15, deadline=None)
@given(
    patch=st.sampled_from([8, 14, 16]),
    registers=st.integers(0, 2),
    mlp=st.sampled_from(["gelu", "swiglu"]),
    layer_scale=st.booleans(),
    norm=st.sampled_from(["batch", "group", "instance"]),
    sides=st.tuples(st.integers(17, 50), st.integers(17, 50)),
)
def test_any_tile_gives_logits_of_its_size(
    patch: int, registers: int, mlp: Any, layer_scale: bool, norm: Norm, sides: tuple[int, int]
) -> None:
    shape = ViTShape(8, 4, 2, patch, registers, mlp, layer_scale, positions=3)
    model = ViTSeg(3, shape, norm).eval()
    assert model(torch.rand(1, 3, *sides)).shape == (1, 3, *sides)


def test_padding_is_what_the_mean_colour_would_be() -> None:
    torch.manual_seed(0)
    model = ViTSeg(2, TINY).eval()
    images = torch.zeros(1, 3, 28, 42)
    images[..., :20, :33] = torch.rand(1, 3, 20, 33)
    with torch.no_grad():
        padded, own = (model.encoder(each) for each in (images, images[..., :20, :33]))
    for one, other in zip(padded, own, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "options", "published"),
    [
        # ViT-S/16 and L/16 of the paper, less the classifier; ViT-H/14 of Virchow (632 M).
        ("S", {"patch": 16, "layer_scale": False}, 21_665_664),
        ("L", {"patch": 16, "layer_scale": False}, 303_301_632),
        ("H", {}, 631_229_184),
    ],
)
def test_encoders_have_the_published_size(
    size: str, options: dict[str, Any], published: int
) -> None:
    config = ModelConfig("vit_seg", "segment", 3, options={"size": size, **options})
    with torch.device("meta"):
        model = build_model(config)
    class_position = model.encoder.norm.weight.numel()  # here it is part of the class token
    assert sum(p.numel() for p in model.encoder.parameters()) == published - class_position
    assert tile_multiple(model) == 1
    assert edge_reach(model) is None


@pytest.mark.parametrize(("mlp", "scaled"), [*product(("gelu", "swiglu"), (False, True))])
def test_names_are_those_of_timm(mlp: Any, scaled: bool) -> None:
    encoder = VisionTransformer(ViTShape(8, 4, 2, registers=2, mlp=mlp, layer_scale=scaled))
    pairs = ["patch_embed.proj", "norm"]
    for block in range(4):
        parts = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        pairs += [f"blocks.{block}.{part}" for part in parts]
    expected = {f"{pair}.{kind}" for pair in pairs for kind in ("weight", "bias")}
    expected |= {"cls_token", "reg_token", "pos_embed"}
    if scaled:
        expected |= {f"blocks.{block}.ls{at}.gamma" for block in range(4) for at in (1, 2)}
    assert encoder.state_dict().keys() == expected


def test_positions_are_as_learnt_on_their_grid_and_resampled_on_others() -> None:
    encoder = VisionTransformer(ViTShape(8, 4, 2, positions=3))
    learnt = encoder.pos_embed.reshape(1, 3, 3, 8).permute(0, 3, 1, 2)
    assert torch.equal(encoder._positions_of(torch.empty(1, 8, 3, 3)), learnt)
    torch.nn.init.constant_(encoder.pos_embed, 0.25)
    wide = encoder._positions_of(torch.empty(1, 8, 5, 2))
    torch.testing.assert_close(wide, torch.full((1, 8, 5, 2), 0.25))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": "XL"}, "size 'XL'"),
        ({"patch": 15}, "patch 15"),
        ({"registers": -1}, "registers -1"),
        ({"registers": True}, "registers True"),
        ({"mlp": "relu"}, "mlp 'relu'"),
        ({"layer_scale": 1}, "layer_scale 1"),
        ({"heads": 3}, "no option 'heads'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PathosegError, match=told) as caught:
        ModelConfig("vit_seg", "segment", 2, options=options)
    assert caught.value.hint


def test_sizes_imply_the_rest() -> None:
    assert vit_shape({}) == ViTShape(384, 12, 6)
    assert vit_shape({"size": "H"}) == ViTShape(1280, 32, 16, mlp="swiglu")
    assert vit_shape({"size": "L", "patch": 16}).positions == 14
    assert vit_shape({"size": "H"}).hidden == 3416  # as of Virchow: 5.3375 × 1280 / 2
    assert vit_shape({"size": "g"}).hidden == 4096


@pytest.mark.parametrize("name", ["vit_seg", "unet_resnet18"])
@pytest.mark.parametrize("wrong", [{"task": "classify"}, {"depth": 3}, {"width": 8}])
def test_what_an_encoder_decides_is_no_option(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(PathosegError):
        ModelConfig(**{"name": name, "task": "segment", "classes": 2} | wrong)
