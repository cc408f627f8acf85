"""The U-Net: shapes, published size, reach of its padding, traceability, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.geometry import Box
from pathoseg.models.layers import fold_norms
from pathoseg.models.model_options import Norm
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from tests.models.reach import measured_reach

NORMS: list[Norm] = ["batch", "group", "instance"]


@settings(max_examples=15)
@given(
    classes=st.integers(2, 5),
    width=st.integers(1, 6),
    depth=st.integers(1, 4),
    norm=st.sampled_from(NORMS),
    cells=st.tuples(st.integers(2, 4), st.integers(2, 4)),
)
def test_logits_are_as_large_as_the_tile(
    classes: int, width: int, depth: int, norm: Norm, cells: tuple[int, int]
) -> None:
    model = UNet(classes, width, depth, norm)
    height, wide = (cell * model.multiple for cell in cells)
    assert model.multiple == 2**depth
    assert model(torch.rand(2, 3, height, wide)).shape == (2, classes, height, wide)


def test_size_is_the_published_one() -> None:
    # The widely used PyTorch U-Net (width 64, transposed convolutions, two classes).
    with torch.device("meta"):
        model = UNet(2, width=64)
    assert sum(p.numel() for p in model.parameters()) == 31_037_698


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reach_is_exact(depth: int) -> None:
    torch.manual_seed(depth)
    model = UNet(2, 4, depth).double().eval()
    assert measured_reach(model, 1e-9) == (model.reach, model.reach)


def test_norms_that_see_the_whole_tile_have_no_reach() -> None:
    assert UNet(2, 4, 2, "group").reach is None
    assert UNet(2, 4, 2, "instance").reach is None


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_fx_traces_it(norm: Norm, training: bool) -> None:
    model = UNet(3, 4, 3, norm).train(training)
    twin = copy.deepcopy(model)
    graph = torch.fx.symbolic_trace(twin)
    images = torch.rand(2, 3, 32, 48)
    assert torch.equal(graph(images), model(images))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), f"{name} moved otherwise"
    assert graph.state_dict().keys() == model.state_dict().keys()


def test_convolutions_before_a_norm_have_no_bias_and_names_read_well() -> None:
    graph = torch.fx.symbolic_trace(UNet(2, 4, 2))
    called = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert [n.target for n in called if n.target.startswith("decoder.0")] == [
        "decoder.0.up",
        *(f"decoder.0.convolve.{part}{i}" for i in (1, 2) for part in ("conv", "norm", "relu")),
    ]
    norms = [n for n in called if isinstance(graph.get_submodule(n.target), nn.BatchNorm2d)]
    assert len(norms) == 10
    for node in norms:
        assert graph.get_submodule(node.args[0].target).bias is None


@pytest.mark.parametrize("norm", NORMS)
def test_in_place_relu_changes_no_gradient(norm: Norm) -> None:
    model = UNet(2, 4, 2, norm)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    images = torch.rand(2, 3, 16, 16)
    for net in (model, plain):
        net(images).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


@given(
    left=st.integers(0, 79), top=st.integers(0, 63), width=st.integers(1, 80),
    height=st.integers(1, 64), depth=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_part_alone_is_what_the_whole_gives(
    left: int, top: int, width: int, height: int, depth: int
) -> None:
    torch.manual_seed(depth)
    model = UNet(3, width=4, depth=depth).eval()
    inside = Box(left, top, min(width, 80 - left), min(height, 64 - top))
    images = torch.randn(2, 3, 64, 80)
    with torch.inference_mode():
        whole = model(images)[..., inside.y : inside.bottom, inside.x : inside.right]
        torch.testing.assert_close(model.logits_inside(images, inside), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make", [partial(UNet, 3, width=4, depth=2), partial(ResNetV2, 3, depth=20)]
)
def test_folded_norms_change_no_answer(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    for name, values in model.named_buffers():
        if values.is_floating_point():
            values.uniform_(*((-0.5, 0.5) if name.endswith("mean") else (0.5, 2.0)))
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        before = model(images)
        norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        fold_norms(model)
        assert 2 * sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) < norms
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)


def test_weights_follow_the_seed_and_he() -> None:
    def draw(seed: int) -> UNet:
        torch.manual_seed(seed)
        return UNet(2, 32, 3)

    first, again, other = draw(1), draw(1), draw(2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not torch.equal(first.head.weight, other.head.weight)
    convolution = first.encoder[3].conv2.weight
    assert convolution.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    up = first.decoder[0].up.weight
    assert up.std().item() == pytest.approx((1 / 256) ** 0.5, rel=0.02)


@pytest.mark.parametrize("norm", NORMS)
def test_it_learns_where_the_dark_disc_is(norm: Norm) -> None:
    torch.manual_seed(0)
    model = UNet(2, 8, 2, norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grid = torch.arange(32.0)
    truth = ((grid[:, None] - 12) ** 2 + (grid - 18) ** 2 < 64).long()[None]
    images = torch.rand(1, 3, 32, 32) * 0.5 + 0.5 * (1 - truth[:, None])
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), truth).backward()
        optimizer.step()
    assert (model(images).argmax(1) == truth).float().mean() > 0.98
