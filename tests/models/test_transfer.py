"""Weights of an earlier model: classes go by name in every head there is, all else is copied."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.models.transfer import class_dimensions, transfer, transfer_fitting

NAMES = ("gland", "stroma", "tumour", "necrosis")


class TwoHeads(nn.Module):
    """Heads that are not the last module, a matrix of class by class, and widths like classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.side = nn.Conv2d(3, classes, 1)
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 5, 1))
        self.head = nn.Conv2d(5, classes, 1)
        self.mix = nn.Parameter(torch.randn(classes, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.stem(images)) + self.side(images)
        return torch.einsum("nchw,cd->ndhw", logits, self.mix)


class PairsOfClasses(TwoHeads):
    """A tensor that grows by more than one with each class."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.pairs = nn.Parameter(torch.randn(classes * (classes - 1) // 2))


class HeadPerClass(nn.Module):
    """Tensors that exist only for some numbers of classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(3, 1, 1) for _ in range(classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(images) for head in self.heads], 1)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """The module `networks_of_a_user` with a factory for each network above."""
    module = ModuleType("networks_of_a_user")
    for network in (TwoHeads, PairsOfClasses, HeadPerClass):
        setattr(module, network.__name__, lambda in_channels, classes, net=network: net(classes))
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


CONVOLUTION = {"head.weight": (0,), "head.bias": (0,)}
HEADS = [
    (ModelConfig("unet", "segment", 4, width=4, depth=2), CONVOLUTION),
    (ModelConfig("unet", "segment", 255, width=4, depth=1), CONVOLUTION),
    (
        ModelConfig("resnet11_v2", "segment", 4, width=4),
        {"head.conv.weight": (0,), "head.conv.bias": (0,)},
    ),
    (
        ModelConfig("resnet11_v2", "classify", 4, width=4),
        {"head.linear.weight": (0,), "head.linear.bias": (0,)},
    ),
    (
        ModelConfig("networks_of_a_user:TwoHeads", "segment", 3),
        {"side.weight": (0,), "side.bias": (0,), **CONVOLUTION, "mix": (0, 1)},
    ),
]


def _build(config: ModelConfig, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build_model(config, _factory(config))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
    return model


def _factory(config: ModelConfig) -> str | None:
    return config.name if config.is_factory else None


@pytest.mark.parametrize(("config", "heads"), HEADS)
def test_the_heads_are_found(config: ModelConfig, heads: dict[str, tuple[int, ...]]) -> None:
    assert class_dimensions(_build(config, 0), config, _factory(config)) == heads


@given(
    st.sampled_from(["unet", "networks_of_a_user:TwoHeads"]),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
)
@settings(max_examples=12)
def test_classes_go_by_name_and_all_else_is_copied(
    network: str, before: list[str], after: list[str]
) -> None:
    sizes = {"width": 2, "depth": 1} if network == "unet" else {}
    there, here = (
        ModelConfig(network, "segment", 1 + len(names), **sizes) for names in (before, after)
    )
    earlier, model, fresh = _build(there, 1).state_dict(), _build(here, 2), _build(here, 2)
    dimensions = class_dimensions(model, here, _factory(here))
    matches = [0, *(before.index(name) + 1 if name in before else None for name in after)]
    transfer(model, earlier, there.classes, matches, dimensions)
    drawn = fresh.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in dimensions:
            assert torch.equal(tensor, earlier[name]), name
            continue
        along = tensor.ndim if dimensions[name] == (0, 1) else 1
        for entry in torch.cartesian_prod(*[torch.arange(len(matches))] * along).view(-1, along):
            ours = tuple(entry.tolist())
            theirs = tuple(match for match in map(matches.__getitem__, ours) if match is not None)
            known = len(theirs) == len(ours)
            assert torch.equal(tensor[ours], earlier[name][theirs] if known else drawn[name][ours])


def test_what_follows_the_classes_otherwise_is_drawn_anew() -> None:
    config = ModelConfig("networks_of_a_user:PairsOfClasses", "segment", 4)
    model, fresh = _build(config, 2), _build(config, 2).state_dict()
    dimensions = class_dimensions(model, config, config.name)
    earlier = _build(ModelConfig(config.name, "segment", 3), 1).state_dict()
    transfer(model, earlier, 3, [0, 1, 2, None], dimensions)
    assert torch.equal(model.state_dict()["pairs"], fresh["pairs"])
    assert torch.equal(model.state_dict()["head.bias"][:3], earlier["head.bias"])


def test_tensors_named_by_class_cannot_be_matched() -> None:
    config = ModelConfig("networks_of_a_user:HeadPerClass", "segment", 3)
    with pytest.raises(PathosegError, match=r"heads\.3\.bias"):
        class_dimensions(_build(config, 0), config, config.name)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (ModelConfig("unet", "segment", 3, width=4, depth=1), r"encoder\.0\.conv1\.weight"),
        (ModelConfig("unet", "segment", 3, width=2, depth=2), "alone"),
    ],
)
def test_another_architecture_is_refused_and_changes_nothing(other: ModelConfig, told: str) -> None:
    config = ModelConfig("unet", "segment", 3, width=2, depth=1)
    model, before = _build(config, 0), _build(config, 0).state_dict()
    with pytest.raises(PathosegError, match=told):
        transfer(model, _build(other, 1).state_dict(), 3, [0, 1, 2], {})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_of_another_program_what_fits_is_taken() -> None:
    config = ModelConfig("unet", "segment", 3, width=2, depth=1)
    model, before = _build(config, 0), _build(config, 0).state_dict()
    theirs = _build(ModelConfig("unet", "segment", 9, width=2, depth=1), 1).half().state_dict()
    theirs["unknown"] = torch.zeros(2)
    del theirs["encoder.0.conv1.weight"]
    theirs["encoder.0.conv2.weight"] = theirs["encoder.0.conv2.weight"].long()
    left = {"head.weight", "head.bias", "encoder.0.conv1.weight", "encoder.0.conv2.weight"}
    assert set(transfer_fitting(model, theirs)) == left
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in left else theirs[name].to(tensor.dtype)
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda name: f"module.{name}", r"the network has encoder\.0\.conv1\.weight, the file mod"),
        (lambda name: name, r"\(encoder\.0\.conv1\.weight: \(4, 3, 3, 3\), here \(2, 3, 3, 3\)\)"),
    ],
    ids=["names", "shapes"],
)
def test_a_file_of_which_nothing_fits_is_refused(rename: object, told: str) -> None:
    assert callable(rename)
    config = ModelConfig("unet", "segment", 3, width=2, depth=1)
    model, before = _build(config, 0), _build(config, 0).state_dict()
    other = _build(ModelConfig("unet", "segment", 9, width=4, depth=1), 1).state_dict()
    # Counters of batch norm fit any network: they alone make nothing of it.
    with pytest.raises(PathosegError, match=told):
        transfer_fitting(model, {rename(name): tensor for name, tensor in other.items()})
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
