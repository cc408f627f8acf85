"""Small versions of networks that the graph parser has to read, each with the shape of an input."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from benchmarks.networks.alexnet import alexnet
from benchmarks.networks.amoebanet import AmoebaNetD
from benchmarks.networks.inception import InceptionV3
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.transformer import transformer
from benchmarks.networks.vgg import vgg19
from pathoseg.models.model_options import ViTShape
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.models.unet_resnet import ResNetUNet
from pathoseg.models.vit_seg import ViTSeg
from pathoseg.parallel.graph.layer_graph import LayerGraph
from pathoseg.parallel.graph.traced import Traced


def short_inception() -> nn.Module:
    """Inception-v3 with two of the blocks of 35 px, and one of those of 8 px: half of its layers.

    It has no blocks of 17 px: the reduction behind them has their rows and columns of 7.
    """
    network = InceptionV3(width=1 / 8)
    wide = (network._wide(192, 64), network._wide(288, 64))
    network.grid35 = nn.Sequential(*wide, network.grid35[-1])
    network.grid17 = nn.Sequential()
    network.grid8 = network.grid8[:2]
    return network


def short_amoebanet(filters: int) -> nn.Module:
    """AmoebaNet-D of one cell of each kind, each after one that halves and after one that does not.

    These are two reductions and two normal cells, the first four of the network of six.
    """
    network = AmoebaNetD(cells=6, filters=filters)
    network.cells = network.cells[:4]
    network.head[-1] = nn.Linear(network.cells[-1].channels, 2)
    return network


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(3, width=8, depth=3), (2, 3, 64, 64)),
    "unet-group-norm": (lambda: UNet(3, width=8, depth=3, norm="group"), (1, 3, 64, 64)),
    "unet-resnet": (lambda: ResNetUNet(3, (1, 1), bottleneck=True, width=4), (2, 3, 16, 32)),
    "vit": (lambda: ViTSeg(3, ViTShape(8, 4, 2, registers=1)), (1, 3, 20, 33)),
    "resnet20-v2": (lambda: ResNetV2(3, depth=20, width=4), (2, 3, 32, 32)),
    "resnet20-v2-tiles": (lambda: ResNetV2(3, "classify", depth=20, width=4), (2, 3, 32, 32)),
    "vgg19": (lambda: vgg19(width=1 / 32), (1, 3, 224, 224)),
    "alexnet": (lambda: alexnet(width=1 / 16), (2, 3, 224, 224)),
    "resnet50": (lambda: resnet50(width=1 / 8, blocks=(1, 2, 1, 1)), (2, 3, 64, 64)),
    "inception-v3": (short_inception, (2, 3, 299, 299)),
    "amoebanet-d": (lambda: short_amoebanet(8), (2, 3, 64, 64)),
    "transformer": (lambda: transformer(32, heads=4, blocks=2), (2, 16, 32)),
}


@cache
def small_traced(name: str, dtype: torch.dtype = torch.float32) -> Traced:
    """Trace a small network, once a process; who runs it leaves its parameters as they were."""
    make, shape = SMALL[name]
    torch.manual_seed(0)
    return Traced(make().to(dtype), torch.empty(shape, dtype=dtype))


def small_graph(name: str) -> LayerGraph:
    """Return the layers of a small network."""
    return small_traced(name).graph
