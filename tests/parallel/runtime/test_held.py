"""Test that forwards hold the bytes that the policy says, and backwards free them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.activations.offload import Overlapped
from pathoseg.parallel.activations.pinned_arena import Arena
from pathoseg.parallel.activations.streams import HostStreams
from pathoseg.parallel.graph.activation_policy import SMALL, ActivationPolicy
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.runtime.stage import Pass, Stage, Training

CPU = torch.device("cpu")
SHAPE = (2, 3, 64, 64)
VISITS = 3
MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(2, width=16, depth=2),
    "unet-group-norm": lambda: UNet(2, width=16, depth=2, norm="group"),
    "resnet-v2": lambda: ResNetV2(2, depth=20),
}


@cache
def _traced(name: str) -> Traced:
    """A stage alone cuts nothing off the model."""
    return Traced(MODELS[name](), torch.randn(SHAPE))


def _held(do: Callable[[], None]) -> int:
    """Bytes that torch's CPU allocator gave to what `do` leaves behind."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        do()
    events = profile.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def _saved(graph: LayerGraph, names: tuple[str, ...]) -> list[int]:
    """Bytes of each storage that these layers make and some backward needs."""
    saved = {storage for layer in graph.layers for storage in layer.saved}
    makers = {storage: graph.storages[storage].layer for storage in saved}
    return [
        graph.storages[storage].bytes
        for storage, maker in makers.items()
        if maker >= 0 and graph.layers[maker].name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["keep", "offload", "recompute", "mixture"])
@pytest.mark.parametrize("name", MODELS)
def test_forwards_hold_what_their_retention_says(name: str, choice: str) -> None:
    images, traced = torch.randn(SHAPE), _traced(name)
    traced.model.zero_grad()
    graph, partition = traced.graph, even(traced.graph, 1)
    names = tuple(layer.name for layer in graph.layers)
    offloaded, recomputed = {
        "keep": ((), ()),
        "offload": (names, ()),
        "recompute": ((), names),
        "mixture": (names[::3], names[1::3]),
    }[choice]
    away = [size for size in _saved(graph, offloaded) if size >= SMALL]
    lost = sum(_saved(graph, recomputed))
    kept = sum(_saved(graph, names)) - sum(away) - lost
    arena = Arena(2 * VISITS * sum(away), CPU)
    stage = Stage(
        traced,
        partition,
        0,
        Training(lambda returned, _: returned.flatten(1).sum(1), torch.optim.SGD),
        CPU,
        alone=True,
        policy=ActivationPolicy(offloaded, recomputed),
        copies=Overlapped(HostStreams(), CPU, arena, max(away, default=0)),
    )
    this = Pass(0, [2] * (VISITS + 1), 1.0, training=True)

    def forward(microbatch: int) -> None:
        stage.feed(microbatch, {next(iter(graph.inputs)): images})
        stage.compare(microbatch, None)
        stage.forward(microbatch, this, keep=True)
        stage.let_go()

    forward(VISITS)  # what libraries set up once, and gradients of parameters
    stage.backward(VISITS)
    held = _held(lambda: [forward(microbatch) for microbatch in range(VISITS)] and None)
    assert held == pytest.approx(VISITS * kept, rel=0.05, abs=2**17)
    assert arena.held == pytest.approx(VISITS * sum(away), rel=0.05)
    # After their backwards nothing of it is left, on the device or on the host.
    left = _held(lambda: [stage.backward(microbatch) for microbatch in range(VISITS)] and None)
    assert left == pytest.approx(-held, abs=2**17)
    assert arena.held == 0
