"""Tests that halos are priced as those that are sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.cost.strip_costs import StripCosts, halo_bytes
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.schedule.costs import Link
from pathoseg.parallel.shards.rows import Split
from pathoseg.parallel.shards.strip import Strip
from pathoseg.parallel.shards.strip_graph import strip_graph
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks
from tests.parallel.shards.strips_on_threads import Place

SIDE, SHARDS = 48, 3


class Mixed(nn.Module):
    """Windows of several sizes, strides and dilations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 5, padding=2),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=2, dilation=2),
            nn.Conv2d(4, 4, 2, stride=2),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.ConvTranspose2d(4, 4, 3, stride=1, padding=1),
            nn.AvgPool2d(3, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


@pytest.mark.parametrize("model", [UNet(2, width=4, depth=2, norm="group"), Mixed()])
def test_halos_are_those_that_are_sent(model: nn.Module) -> None:
    bounds = Split.even(SIDE, SHARDS).bounds
    graph = Traced(model, torch.empty(2, 3, SIDE // SHARDS, SIDE, device="meta")).graph
    sent = Counter[int]()

    class Counting(ThreadTransport):
        def send(self, tensor: Tensor, to: int, tag: int):  # type: ignore[no-untyped-def]
            sent[self.rank] += tensor.nbytes
            return super().send(tensor, to, tag)

    def body(transport: ThreadTransport) -> None:
        counting = Counting(transport._hub, transport.rank)
        place = Place(counting, Split(bounds))
        first, stop = bounds[transport.rank : transport.rank + 2]
        with torch.no_grad():
            model(Strip(torch.randn(2, 3, stop - first, SIDE), 2, bounds, place))

    run_ranks(SHARDS, body)
    assert sent[1] == sum(halo_bytes(layer) for layer in graph.layers)


def test_strips_cost_more_than_their_rows() -> None:
    model = UNet(2, width=4, depth=2)
    whole = Traced(model, torch.empty(1, 3, 64, 64, device="meta"))
    strip = strip_graph(whole, 2).graph
    tile = Traced(model, torch.empty(1, 3, 32, 64, device="meta")).graph
    hardware = replace(load_hardware("v100"), inside=Link(1.0, 0.0), bandwidth=float("inf"))
    alone = cost_model(load_hardware("v100"))
    strips = StripCosts(alone, hardware, 2, tile)
    layers = {layer.name: layer for layer in strip.layers}
    extra = {
        like.name: strips.time(layers[like.name]).forward - alone.time(like).forward
        for like in tile.layers
    }
    assert extra["encoder.0.conv1"] == pytest.approx(1), "one message each way"
    assert extra["encoder.0.norm1"] == pytest.approx(2), "there and back"
    assert extra["encoder.0.relu1"] == extra["encoder.1.pool"] == extra["head"] == 0
    slow = replace(hardware, inside=Link(), bandwidth=1.0)
    moved = StripCosts(alone, slow, 2, tile).time(layers["encoder.0.conv2"])
    row = 4 * 64 * 4  # channels, width, bytes
    assert 0 < moved.forward < 16 * row, "a few rows at the halo, not the 32 of the strip"
    pooled = StripCosts(alone, slow, 2, tile).time(layers["encoder.1.pool"])
    assert pooled.forward == alone.time(layers["encoder.1.pool"]).forward
    other = Traced(UNet(2, width=4, depth=1), torch.empty(1, 3, 32, 64, device="meta")).graph
    with pytest.raises(PathosegError, match="other layers for 2 strips"):
        StripCosts(alone, hardware, 2, other).time(layers["encoder.2.conv1"])


class ChannelAttention(nn.Module):
    """Attention of ECA-Net (Wang et al. 2020): its convolution is over channels, without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.over_channels = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.over_channels(x.mean((2, 3)).unsqueeze(1)).sigmoid()
        return x * weights.transpose(1, 2).unsqueeze(-1)


def test_a_convolution_without_rows_has_no_halo() -> None:
    layers = Traced(ChannelAttention(), torch.empty(1, 4, 16, 16)).graph.layers
    [one] = [layer for layer in layers if layer.kind == "convolution"]
    assert halo_bytes(one) == 0
