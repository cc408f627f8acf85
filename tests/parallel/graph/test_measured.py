"""Tests what a layer graph says of its layers against torch's own counts on real tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.networks.alexnet import alexnet
from benchmarks.networks.amoebanet import AmoebaNetD
from benchmarks.networks.inception import InceptionV3
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.vgg import vgg19
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.traced import Traced
from tests.parallel.networks.small import SMALL, small_graph
from tests.parallel.networks.stages import allocated, saved_by_hooks


@pytest.mark.parametrize("name", SMALL)
def test_saved_bytes_are_those_that_hooks_count(name: str) -> None:
    make, shape = SMALL[name]
    assert small_graph(name).saved_bytes() == saved_by_hooks(make(), torch.randn(shape))


@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    make, shape = SMALL[name]
    with FlopCounterMode(display=False) as forward:
        made = make()(torch.randn(shape))
    with FlopCounterMode(display=False) as backward:
        sum(part.sum() for part in (made if isinstance(made, tuple) else (made,))).backward()
    layers = small_graph(name).layers
    # The table of torch 2.13 knows no flash attention on a CPU, that of 2.15 does.
    knows = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    own = [layer for layer in layers if knows or "attention" not in layer.kind]
    assert sum(layer.forward.flops for layer in own) == forward.get_total_flops()
    assert sum(layer.backward.flops for layer in own) == backward.get_total_flops()
    assert all(layer.forward.flops for layer in layers if layer not in own)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_and_buffer_has_its_layer(name: str) -> None:
    model, graph = SMALL[name][0](), small_graph(name)
    assert not graph.notes
    used = {name for layer in graph.layers for name in layer.parameters}
    assert used == set(graph.parameters) == {name for name, _ in model.named_parameters()}
    assert graph.parameter_bytes() == sum(p.nbytes for p in model.parameters())
    held = {name for layer in graph.layers for name in layer.buffers}
    assert held == set(graph.buffers) == {name for name, _ in model.named_buffers()}


@pytest.mark.parametrize(
    ("make", "parameters"), [(vgg19, 139_578_434), (alexnet, 57_012_034), (resnet50, 23_512_130)]
)
def test_full_networks_have_the_published_parameters(make: Any, parameters: int) -> None:
    with torch.device("meta"):
        model = make(2)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.slow
def test_a_full_inception_is_read() -> None:
    """Read one network at full size; of the others the small versions are read."""
    with torch.device("meta"):
        model = InceptionV3(2)
    graph = Traced(model, torch.empty(2, 3, 299, 299, device="meta")).graph
    assert graph.parameter_bytes() == 4 * 24_348_900
    assert not graph.notes


@pytest.mark.parametrize(
    ("cells", "filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1060), (72, 512, 1840)],
)
def test_amoebanets_have_the_published_parameters(
    cells: int, filters: int, millions: float
) -> None:
    # Kim et al., "torchgpipe", 2020, table of memory; GPipe has 82, 318, 542, 1050 and 1800.
    with torch.device("meta"):
        model = AmoebaNetD(1000, cells, filters)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(millions * 1e6, rel=0.005)


def test_a_large_tile_takes_no_memory() -> None:
    with torch.device("meta"):
        model = UNet(4, width=64)
    graphs = []
    example = torch.empty(1, 3, 2048, 2048, device="meta")
    assert allocated(lambda: graphs.append(Traced(model, example).graph)) < 2**20
    assert graphs[0].saved_bytes() > 20 * 2**30


def test_bytes_read_and_written_are_those_of_the_tensors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten())
    graph = Traced(model, torch.randn(2, 3, 16, 16)).graph
    convolution, relu, flatten = graph.layers
    images, features, weight, bias = 2 * 3 * 256 * 4, 2 * 8 * 256 * 4, 3 * 8 * 9 * 4, 8 * 4
    assert convolution.forward.read == images + weight + bias
    assert convolution.forward.written == relu.forward.read == relu.forward.written == features
    assert relu.backward.read == 2 * features
    assert flatten.is_free
    assert not relu.is_free


def test_a_layer_keeps_what_its_cost_depends_on() -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), nn.Upsample(None, 2))
    convolution, upsample = Traced(model, torch.randn(2, 6, 16, 16)).graph.layers
    assert convolution.kind == "convolution"
    assert convolution.attributes["weight"] == (8, 3, 3, 3)
    assert convolution.attributes["input"] == (2, 6, 16, 16)
    assert convolution.attributes["stride"] == (2, 2)
    assert convolution.attributes["groups"] == 2
    assert upsample.kind == "upsample_nearest2d"
    assert upsample.outputs[0].shape == (2, 8, 16, 16)


def test_nothing_of_the_model_changes() -> None:
    model = ResNetV2(3, depth=11, width=4).eval()
    model.stem.train()
    modes = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    example = torch.randn(1, 3, 16, 16)
    dice = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    Traced(model, example)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert dice == now
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_fall_into_the_mode_that_modules_were_left_in() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
    model[1].eval()
    layers = Traced(model, torch.randn(2, 3, 4, 4)).graph.layers
    assert layers[1].attributes["training"] is False
    assert not layers[2].is_free
