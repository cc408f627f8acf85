"""The networks, the sides of their tiles, and the ways to train them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.planning.orders import MP_BASIC, SEQUENTIAL
from pathoseg.parallel.planning.partition import even
from pathoseg.parallel.planning.plan import PlanRequest
from pathoseg.parallel.retention.policy_options import AllowedPolicies

SIDES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
RANKS = 8
_KEEP = AllowedPolicies(offload=False, recompute=False)


def networks(quick: bool) -> Mapping[str, Callable[[], nn.Module]]:
    """Return a constructor for each network, by name.

    Args:
        quick: Two networks of a fraction of the width or depth, instead of three.

    Returns:
        Constructors of networks of 2 classes. The full "heavy" trains 512 px on one rank of 16 GiB
        and no more, as in the published table.
    """
    if quick:
        return {
            "unet64": lambda: UNet(2, width=16),
            "heavy": lambda: ResNetV2(2, depth=29, width=32),
        }
    return {
        "unet64": lambda: UNet(2, width=64),
        "resnet110_v2": lambda: ResNetV2(2, depth=110),
        "heavy": lambda: ResNetV2(2, depth=110, width=32),
    }


@dataclass(frozen=True)
class Case:
    """A network by its name, and the threads of a rank that trains it."""

    network: str
    quick: bool
    threads: int


def _naive(graph: LayerGraph, asked: PlanRequest) -> PlanRequest:
    starts = even(graph, asked.ranks).bounds[1:-1]
    cut = tuple(graph.layers[first].name for first in starts)
    return replace(asked, order=MP_BASIC, cut=cut, ways=_KEEP)


# What each asks for, of so many ranks and so large steps.
WAYS: Mapping[str, Callable[[LayerGraph, PlanRequest], PlanRequest]] = {
    "sequential": lambda graph, asked: replace(asked, ranks=1, order=SEQUENTIAL, ways=_KEEP),
    "sequential_planned": lambda graph, asked: replace(asked, ranks=1, order=SEQUENTIAL),
    "naive": _naive,
    "model_aware": lambda graph, asked: replace(
        asked, order=MP_BASIC, stages=asked.ranks, ways=_KEEP
    ),
    "gems_master": lambda graph, asked: replace(
        asked, order="gems-master", stages=asked.ranks, ways=_KEEP
    ),
    "planned": lambda graph, asked: asked,
}
