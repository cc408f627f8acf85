"""Prices a layer of a tile that is cut into strips: its rows, halos and sums over the strips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.cost_model import CostModel, LayerTime
from pathoseg.parallel.cost.hardware import Hardware
from pathoseg.parallel.graph.layer_graph import Layer, LayerGraph

# By kind of layer: numbers in float64 for each channel that a norm's ranks tell one another.
_TOLD_FORWARD, _TOLD_BACKWARD = 3, 2
_NORMS = ("native_batch_norm", "native_group_norm")


@dataclass(frozen=True)
class StripCosts:
    """Prices the layers of one strip: implements CostModel.

        a tile of the strip's height  +  bytes that only strips move  +  halos, sums of norms
        (kernels that were timed)        (rows at halos, norms' passes)  (by the link)

    A rank between two others sends its edge rows to both and waits for theirs, in the forward and,
    as gradients, in the backward; this is priced as if no kernel hid it. A norm's sum is a
    reduce-scatter and an all-gather.

    Args:
        alone: Prices a layer of a whole tile.
        hardware: Its memory moves the bytes, its links join the ranks that share a tile.
        shards: How many they are.
        tile: The layers of a tile of the strip's height.

    Raises:
        PathosegError: A layer to be priced is none of these.
    """

    alone: CostModel
    hardware: Hardware
    shards: int
    tile: LayerGraph

    @property
    def note(self) -> str:
        return f"{self.alone.note}; halos and the sums of norms by the link"

    @cached_property
    def _tile(self) -> Mapping[str, Layer]:
        return {layer.name: layer for layer in self.tile.layers}

    def time(self, layer: Layer) -> LayerTime:
        like = self._tile.get(layer.name)
        if like is None:
            raise PathosegError(
                f"{self.tile.model} has other layers for {self.shards} strips than for a whole "
                "tile, so its strips cannot be planned.",
                "Train it without [parallel] shards.",
            )
        own = self.alone.time(like)
        moved = (
            max(0, strip.read + strip.written - whole.read - whole.written)
            for strip, whole in ((layer.forward, like.forward), (layer.backward, like.backward))
        )
        forward, backward = (
            size / self.hardware.bandwidth + sent
            for size, sent in zip(moved, self._sent(like), strict=True)
        )
        return LayerTime(own.forward + forward, own.backward + backward)

    def _sent(self, like: Layer) -> tuple[float, float]:
        """The seconds for which a layer's forward and backward wait for the other ranks."""
        link = (
            self.hardware.between if self.shards > self.hardware.per_node else self.hardware.inside
        )
        if like.kind in _NORMS:
            channels = like.outputs[0].shape[1]
            share = 2 * (self.shards - 1) / self.shards
            told = (8 * channels * n * share for n in (self.shards * _TOLD_FORWARD, _TOLD_BACKWARD))
            forward, backward = (2 * link.alpha + size * link.beta for size in told)
            return forward, backward
        size = halo_bytes(like)
        sent = link.alpha + size * link.beta if size else 0.0
        return sent, sent


def halo_bytes(layer: Layer) -> int:
    """Return the bytes that a rank between two others sends them in a layer's forward.

    It is exact where strips are cut at multiples of the stride: a window of `span` rows then looks
    `span` - stride rows beyond its strip, on both sides together.
    """
    facts: dict[str, Any] = dict(layer.attributes)
    if layer.kind == "convolution" and len(facts["stride"]) < 2:
        return 0  # no rows
    if layer.kind == "convolution":
        kernel, stride, dilation = (facts[key][-2] for key in ("weight", "stride", "dilation"))
        span = dilation * (kernel - 1) + 1
        rows = -(-(span - stride) // stride) if facts["transposed"] else span - stride
    elif layer.kind.startswith(("max_pool", "avg_pool")):
        rows = facts["kernel_size"][0] - (facts.get("stride") or facts["kernel_size"])[0]
    elif layer.kind.startswith("upsample_bilinear"):
        rows = 2
    else:
        return 0
    *_, height, width = facts["input"]
    element = layer.outputs[0].bytes // max(1, prod(layer.outputs[0].shape))
    return int(max(0, min(rows, 2 * height)) * prod(facts["input"][:-2]) * width * element)
