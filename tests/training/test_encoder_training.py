"""Encoders that are tuned, frozen or changed by low-rank additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pathoseg.config import Config, NetConfig, TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.models.model_options import ViTShape
from pathoseg.models.unet import UNet
from pathoseg.models.unet_resnet import ResNetUNet
from pathoseg.models.vit_seg import ViTSeg
from pathoseg.parallel.graph.traced import Traced
from pathoseg.training.encoder_training import prepare_encoder, rate_factors, with_low_rank
from pathoseg.training.optimizer import make_optimizer, scale_rates, set_rate


def _resnet() -> ResNetUNet:
    return ResNetUNet(2, (1, 1), bottleneck=True, width=2)


def _vit(lora: int = 0) -> ViTSeg:
    return ViTSeg(2, ViTShape(8, 4, 2, lora=lora))


@pytest.mark.parametrize("make", [_resnet, _vit])
def test_a_frozen_encoder_stays_to_the_bit_and_saves_nothing(make: Any) -> None:
    torch.manual_seed(0)
    config = TrainConfig(encoder="frozen", optimizer="sgd")
    model, images = make(), torch.rand(2, 3, 16, 16)
    tuned = Traced(model, images).graph
    prepare_encoder(model, config)
    frozen = Traced(model, images).graph
    encoder = [layer for layer in frozen.layers if layer.name.startswith("encoder.")]
    assert not any(layer.saved for layer in encoder)
    assert frozen.saved_bytes() < tuned.saved_bytes()
    assert not any(
        parameter.trained
        for name, parameter in frozen.parameters.items()
        if name.startswith("encoder.")
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make_optimizer(model.parameters(), config)
    model.train()
    model(images).square().sum().backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        if name.startswith("encoder."):  # running statistics among them
            assert torch.equal(tensor, before[name]), name
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_low_rank_additions_begin_as_nothing_and_alone_are_trained() -> None:
    torch.manual_seed(0)
    model = _vit(lora=2).eval()
    plain = _vit().eval()
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if ".lora_" not in n})
    images = torch.rand(1, 3, 20, 20)
    torch.testing.assert_close(model(images), plain(images))
    prepare_encoder(model, TrainConfig(encoder="lora"))
    trained = {name for name, p in model.encoder.named_parameters() if p.requires_grad}
    parts = ("qkv.lora_a", "qkv.lora_b", "proj.lora_a", "proj.lora_b")
    assert trained == {f"blocks.{at}.attn.{part}" for at in range(4) for part in parts}
    model(images).square().sum().backward()
    assert all(block.attn.qkv.lora_b.grad.abs().sum() > 0 for block in model.encoder.blocks)


@pytest.mark.parametrize("make", [_resnet, _vit])
def test_each_block_has_its_rate(make: Any) -> None:
    model = make()
    config = TrainConfig(lr=0.5, encoder_lr=0.1, layer_decay=0.5)
    factors = rate_factors(model, config)
    own = {f"encoder.{name}" for name, _ in model.encoder.named_parameters()}
    assert factors.keys() == own
    first, last = (
        ("conv1", "layer2.0.conv1") if make is _resnet else ("cls_token", "blocks.3.norm1")
    )
    blocks = 2 if make is _resnet else 4
    rate = {name: factor for name, factor in factors.items() if first in name or last in name}
    assert min(rate.values()) == pytest.approx(0.1 * 0.5**blocks)
    assert max(rate.values()) == pytest.approx(0.1)
    optimizer = make_optimizer(model.parameters(), config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    scale_rates(optimizer, names, factors)
    set_rate(optimizer, 0.25)
    seen = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[names[parameter]] = group["lr"]
            assert group["weight_decay"] == (0.01 if parameter.ndim > 1 else 0)
    assert seen == {name: 0.25 * factors.get(name, 1.0) for name in names.values()}


def test_the_whole_step_follows_the_factors() -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 3, 16, 16)
    moved = []
    for encoder_lr in (1.0, 0.25):
        torch.manual_seed(1)
        model = _resnet()
        config = TrainConfig(optimizer="sgd", encoder_lr=encoder_lr, weight_decay=0.0)
        optimizer = make_optimizer(model.parameters(), config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        scale_rates(optimizer, names, rate_factors(model, config))
        set_rate(optimizer, 0.1)
        before = model.encoder.conv1.weight.detach().clone()
        model(images).square().sum().backward()
        optimizer.step()
        moved.append(model.encoder.conv1.weight.detach() - before)
    torch.testing.assert_close(moved[1], 0.25 * moved[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"encoder": "frozen"}, {"encoder_lr": 0.1}, {"layer_decay": 0.9}]
)
def test_networks_without_an_encoder_refuse_its_options(options: dict[str, Any]) -> None:
    for model in (UNet(2, 2, 1), nn.Conv2d(3, 2, 1)):
        with pytest.raises(PathosegError, match="has none"):
            prepare_encoder(model, TrainConfig(**options))


def test_low_rank_is_for_attention() -> None:
    train = TrainConfig(encoder="lora")
    with pytest.raises(PathosegError, match="asks for attention"):
        with_low_rank(Config(model=NetConfig("unet_resnet50"), train=train))
    config = Config(model=NetConfig("vit_seg"), train=train)
    assert with_low_rank(config).model.options == {"lora": 8}
    stated = Config(model=NetConfig("vit_seg", options={"lora": 4}), train=train)
    assert with_low_rank(stated).model.options == {"lora": 4}
