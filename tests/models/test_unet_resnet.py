"""The ResNet U-Net: sizes, torchvision's names, reach of its padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.models.build import build_model, edge_reach, tile_multiple
from pathoseg.models.model_options import ModelConfig, Norm
from pathoseg.models.unet_resnet import RESNETS, ResNetUNet
from tests.models.reach import measured_reach

NORMS: list[Norm] = ["batch", "group", "instance"]


@settings(max_examples=10, deadline=None)
@given(
    classes=st.integers(2, 4),
    units=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    bottleneck=st.booleans(),
    norm=st.sampled_from(NORMS),
    cells=st.tuples(st.integers(2, 3), st.integers(2, 3)),
)
def test_logits_are_as_large_as_the_tile(
    classes: int, units: list[int], bottleneck: bool, norm: Norm, cells: tuple[int, int]
) -> None:
    model = ResNetUNet(classes, units, bottleneck, norm, width=2)
    height, wide = (cell * model.multiple for cell in cells)
    assert model.multiple == 2 ** (len(units) + 1)
    assert model(torch.rand(1, 3, height, wide)).shape == (1, classes, height, wide)


@pytest.mark.parametrize(
    ("depth", "published"),
    # torchvision's figures, less the classifier's (channels + 1) × 1,000.
    [(18, 11_689_512 - 513_000), (34, 21_797_672 - 513_000), (50, 25_557_032 - 2_049_000)],
)
def test_encoders_have_the_published_size(depth: int, published: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(f"unet_resnet{depth}", "objects", 3))
    assert sum(p.numel() for p in model.encoder.parameters()) == published
    assert model.head.out_channels == 4
    assert tile_multiple(model) == 32
    assert edge_reach(model) == model.reach


def test_names_are_those_of_torchvision() -> None:
    units, bottleneck = RESNETS[50]
    with torch.device("meta"):
        encoder = ResNetUNet(2, units, bottleneck).encoder
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", *(f"bn1.{part}" for part in norm)}
    for group, count in enumerate(units, 1):
        for unit in range(count):
            place = f"layer{group}.{unit}."
            for number in (1, 2, 3):
                expected |= {f"{place}conv{number}.weight"}
                expected |= {f"{place}bn{number}.{part}" for part in norm}
        expected |= {f"layer{group}.0.downsample.0.weight"}
        expected |= {f"layer{group}.0.downsample.1.{part}" for part in norm}
    assert encoder.state_dict().keys() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "bottleneck"), [((1,), False), ((1, 1), True), ((2, 1), True), ((1, 2), False)]
)
def test_reach_is_exact(units: tuple[int, ...], bottleneck: bool) -> None:
    torch.manual_seed(0)
    model = ResNetUNet(2, units, bottleneck, width=2).double().eval()
    upper, lower = measured_reach(model, 1e-12)
    assert model.reach == upper >= lower


def test_norms_that_see_the_whole_tile_have_no_reach() -> None:
    assert ResNetUNet(2, (1,), False, "group", width=2).reach is None
