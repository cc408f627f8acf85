"""ResNet-v2: published sizes, shapes of both heads, reach, traceability."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pathoseg.models.model_options import Norm, Task
from pathoseg.models.resnet_v2 import ResNetV2


def _on_meta(depth: int) -> ResNetV2:
    with torch.device("meta"):
        return ResNetV2(10, "classify", depth)


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_depth_29_has_the_size_that_keras_prints() -> None:
    # Keras' example reports 843,786 trainable parameters; its convolutions have biases.
    model = _on_meta(29)
    biases = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    assert _parameters(model) + biases == 843_786


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "millions"), [(110, 3.3), (1001, 30.3)])
def test_sizes_follow_the_formula(depth: int, millions: float) -> None:
    """Per unit: convolutions 2·outer·inner + 9·inner², norms 2·(outer + 2·inner)."""
    units = (depth - 2) // 9
    unit_sizes = [
        (2 * outer * inner + 9 * inner**2) + 2 * (outer + 2 * inner)
        for inner, outer in ((16, 64), (64, 128), (128, 256))
    ]
    # What the first unit of a group has more or less than the others.
    first = (
        ((16 - 64) * 16 - 2 * 64)  # 16 inputs, normed by the stem
        + ((64 - 128) * 64 + 2 * (64 - 128))
        + ((128 - 256) * 128 + 2 * (128 - 256))
    )
    shortcuts = 16 * 64 + 64 * 128 + 128 * 256
    ends = (3 * 9 * 16 + 2 * 16) + 2 * 256 + (256 * 10 + 10)
    count = _parameters(_on_meta(depth))
    assert count == units * sum(unit_sizes) + first + shortcuts + ends
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


def test_depth_counts_the_weighted_layers() -> None:
    model = _on_meta(110)
    shortcuts = [unit.shortcut for group in model.groups for unit in group]
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m not in shortcuts]
    assert len(convolutions) + 1 == 110  # and the linear layer


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize(("task", "shape"), [("segment", (2, 3, 32, 48)), ("classify", (2, 3))])
def test_logits_have_the_shape_of_the_task(task: Task, shape: tuple[int, ...], norm: Norm) -> None:
    model = ResNetV2(3, task, 20, 4, norm)
    assert model(torch.rand(2, 3, 32, 48)).shape == shape


@pytest.mark.parametrize("depth", [11, 20, 29])
def test_reach_bounds_the_padding_closely(depth: int) -> None:
    torch.manual_seed(depth)
    model = ResNetV2(2, "segment", depth, 2).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.uniform_(module.weight, 0.01, 0.3)
    tile = 128
    whole = torch.rand(1, 3, 3 * tile, 3 * tile, dtype=torch.double)
    inner = slice(tile, 2 * tile)
    with torch.no_grad():
        differ = (model(whole)[..., inner, inner] - model(whole[..., inner, inner])).abs() > 1e-9
    rows = differ.flatten(0, 1).any(0)[:, tile // 2].nonzero().flatten()
    near = int(rows[rows < tile // 2].max()) + 1
    far = tile - int(rows[rows > tile // 2].min())
    assert model.reach == max(near, far)


def test_a_classifier_has_no_reach() -> None:
    assert ResNetV2(2, "classify", 11, 2).reach is None


@pytest.mark.parametrize("task", ["segment", "classify"])
@pytest.mark.parametrize("training", [True, False])
def test_fx_traces_it(task: Task, training: bool) -> None:
    model = ResNetV2(3, task, 20, 4).train(training)
    twin = copy.deepcopy(model)
    graph = torch.fx.symbolic_trace(twin)
    images = torch.rand(2, 3, 16, 24)
    assert torch.equal(graph(images), model(images))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), f"{name} moved otherwise"
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert {"stem.conv", "groups.1.0.residual.conv1", "groups.1.0.shortcut"} <= set(targets)


def test_in_place_relu_changes_no_gradient() -> None:
    model = ResNetV2(2, "segment", 20, 4)
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


def test_only_the_head_has_a_bias() -> None:
    model = ResNetV2(2, "segment", 20, 4)
    biased = [
        n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.bias is not None
    ]
    assert biased == ["head.conv"]
