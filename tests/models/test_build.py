"""Building by name: sizes, suggestions, and code of the user that runs only when asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.geometry import ModelInput
from pathoseg.models.build import (
    build_model,
    check_tile,
    context_reach,
    declared_inputs,
    edge_reach,
    lay_out,
    tile_multiple,
)
from pathoseg.models.model_options import ModelConfig

FACTORY = '''
"""A network that is not ours."""
from pathlib import Path
from torch import nn

Path(__file__).with_suffix(".imported").touch()

def make(in_channels, classes, width=4):
    return nn.Sequential(nn.Conv2d(in_channels, width, 3, padding=1), nn.Conv2d(width, classes, 1))

def halved(in_channels, classes):
    return nn.Conv2d(in_channels, classes, 2, stride=2)

def picky(in_channels, classes):
    model = nn.Sequential(nn.PixelUnshuffle(6), nn.PixelShuffle(6), nn.Conv2d(3, classes, 1))
    model.multiple = 6
    return model

def unsaid(in_channels, classes):
    return nn.Sequential(nn.PixelUnshuffle(6), nn.PixelShuffle(6), nn.Conv2d(3, classes, 1))

def wrongly_said(in_channels, classes):
    model = make(in_channels, classes)
    model.multiple = 1.5
    return model

def nothing(in_channels, classes):
    return None

def frozen(in_channels, classes):
    return make(in_channels, classes).eval()
'''


@pytest.fixture
def factory_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "labs_network.py"
    path.write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "labs_network", raising=False)
    return path


@pytest.mark.parametrize(
    ("name", "width", "depth"),
    [("unet", 32, 4), ("unet64", 64, 4)],
)
def test_names_imply_sizes(name: str, width: int, depth: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name, "segment", 3))
    assert model.encoder[0].conv1.out_channels == width
    assert tile_multiple(model) == 2**depth
    assert model.head.out_channels == 3


@pytest.mark.parametrize(("name", "units"), [("resnet110_v2", 12), ("resnet1001_v2", 111)])
def test_a_resnets_name_states_its_depth(name: str, units: int) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name, "classify", 3))
    assert [len(group) for group in model.groups] == [units] * 3
    assert tile_multiple(model) == 4


def test_sizes_and_norm_can_be_set() -> None:
    model = build_model(ModelConfig("unet", "segment", 2, width=6, depth=2, norm="instance"))
    assert model.encoder[0].conv1.out_channels == 6
    assert tile_multiple(model) == 4
    assert any(isinstance(m, nn.InstanceNorm2d) for m in model.modules())
    assert edge_reach(model) is None
    model = build_model(ModelConfig("resnet11_v2", "segment", 2, width=8, norm="group"))
    assert model.stem.conv.out_channels == 8
    assert any(isinstance(m, nn.GroupNorm) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("unett", "Did you mean unet?"),
        ("UNet64", "Did you mean unet64?"),
        ("resnet100_v2", "Did you mean resnet101_v2?"),
        ("resnet1010_v2", "Did you mean resnet1001_v2?"),
        ("resnet110v2", "Did you mean resnet110_v2?"),
        ("", "Known are: unet,"),
        ("qqq", "Known are: unet,"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(PathosegError) as error:
        ModelConfig(name, "segment", 2)
    assert error.value.hint.startswith(hint)
    assert repr(name) in error.value.problem


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"classes": 1}, "classes 1"),
        ({"classes": 256}, "classes 256"),
        ({"width": 0}, "width 0"),
        ({"width": 10**9}, "width 1000000000"),
        ({"depth": 9}, "depth 9"),
        ({"task": "classify"}, "classify"),
        ({"options": {"width": 3}}, "options"),
        ({"name": "resnet110_v2", "depth": 4}, "depth"),
        ({"name": "a:b", "depth": 4}, "depth"),
        ({"name": "a:b", "norm": "group"}, "norm"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], what: str) -> None:
    fields: dict[str, object] = {"name": "unet", "task": "segment", "classes": 2}
    with pytest.raises(PathosegError, match=what):
        ModelConfig(**{**fields, **wrong})


def test_tiles_must_fit() -> None:
    model = build_model(ModelConfig("unet", "segment", 2, width=2, depth=3))
    check_tile(model, 64)
    with pytest.raises(PathosegError, match=r"multiples of 8 px.*Choose 96 or 104 px"):
        check_tile(model, 100)
    with pytest.raises(PathosegError, match=r"16 at least.*Choose 16 or 24 px"):
        check_tile(model, 8)


@pytest.mark.parametrize(
    ("name", "depth"),
    [("unet", 3), ("unet64", 1), ("hooknet", 2), ("unet_resnet18", None), ("resnet11_v2", None)],
)
def test_options_know_the_sides_of_a_tile_as_the_network_does(name: str, depth: int | None) -> None:
    width = None if name == "unet_resnet18" else 2
    config = ModelConfig(name, "segment", 2, width, depth)
    multiple = tile_multiple(build_model(config))
    assert config.tile_sides == (multiple, 2 * multiple)


def test_a_transformer_needs_more_than_a_patch() -> None:
    config = ModelConfig("vit_seg", "segment", 2, options={"patch": 16})
    model = build_model(config)
    assert config.tile_sides == (1, 17)
    assert model(torch.zeros(1, 3, 17, 17)).shape == (1, 2, 17, 17)
    check_tile(model, 17)
    with pytest.raises(PathosegError, match=r"needs 17 at least.*Choose 17 or 18 px"):
        check_tile(model, 16)


def test_a_factory_is_called_when_named(factory_file: Path) -> None:
    name = "labs_network:make"
    model = build_model(ModelConfig(name, "segment", 3, options={"width": 7}), factory=name)
    assert model[0].out_channels == 7
    assert model.training
    assert tile_multiple(model) == 1
    assert edge_reach(model) is None


def test_a_factory_is_not_imported_unless_named(factory_file: Path) -> None:
    config = ModelConfig("labs_network:make", "segment", 3)
    for named in (None, "labs_network:halved", "unet"):
        with pytest.raises(PathosegError, match="labs_network:make"):
            build_model(config, factory=named)
    assert not factory_file.with_suffix(".imported").exists()
    build_model(config, factory=config.name)
    assert factory_file.with_suffix(".imported").exists()


def test_a_factorys_multiple_is_respected(factory_file: Path) -> None:
    name = "labs_network:picky"
    model = build_model(ModelConfig(name, "segment", 2), factory=name)
    assert tile_multiple(model) == 6


def test_a_factorys_mode_is_kept(factory_file: Path) -> None:
    name = "labs_network:frozen"
    assert not build_model(ModelConfig(name, "segment", 2), factory=name).training


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("labs_network:absent", "AttributeError"),
        ("no_such_network:make", "ModuleNotFoundError"),
        (":make", "ValueError"),
        ("labs_network:nothing", "returned NoneType"),
        ("labs_network:halved", r"\(1, 2, 32, 32\).*not \(1, 2, 64, 64\)"),
        ("labs_network:unsaid", "multiple"),
        ("labs_network:wrongly_said", "multiple is 1.5"),
    ],
)
def test_a_factory_that_fails_is_told_of(factory_file: Path, name: str, what: str) -> None:
    with pytest.raises(PathosegError, match=what):
        build_model(ModelConfig(name, "segment", 2), factory=name)


def test_a_factorys_wrong_options_are_told_of(factory_file: Path) -> None:
    name = "labs_network:make"
    config = ModelConfig(name, "segment", 2, options={"wdith": 3})
    with pytest.raises(PathosegError, match="wdith"):
        build_model(config, factory=name)


def test_a_factory_that_segments_cannot_classify(factory_file: Path) -> None:
    name = "labs_network:make"
    with pytest.raises(PathosegError, match=r"not \(1, 2\)"):
        build_model(ModelConfig(name, "classify", 2), factory=name)


class _Seeing(nn.Module):
    """A network of given inputs."""

    multiple = 8

    def __init__(self, inputs: dict[str, tuple[float, int]]) -> None:
        super().__init__()
        self._inputs = inputs

    def inputs_at(self, mpp: float, tile: int) -> dict[str, tuple[float, int]]:
        return self._inputs


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "do not begin with the tile"),
        ({"context": (2.0, 64)}, "do not begin with the tile"),
        ({"image": (0.5, 32)}, "do not begin with the tile"),
        ({"image": (0.5, 64), "context": (0.25, 64)}, "no whole multiple"),
        ({"image": (0.5, 64), "context": (0.7, 64)}, "no whole multiple"),
        ({"image": (0.5, 64), "context": (2.0, 60)}, "centres would not meet"),
        ({"image": (0.5, 64), "context": (8.0, 64)}, "centres would not meet"),
        ({"image": (0.5, 64), "context": (2.0, -64)}, "is impossible"),
        ({"image": (0.5, 64), "two words": (2.0, 64)}, "is impossible"),
        ({"image": 3}, "inputs_at"),
    ],
)
def test_inputs_that_have_no_common_centre_are_refused(inputs: Any, said: str) -> None:
    with pytest.raises(PathosegError, match=said):
        declared_inputs(_Seeing(inputs), 0.5, 64)


@pytest.mark.parametrize("reach", ["1", -1, 0.5, True])
def test_a_reach_that_is_no_number_of_pixels_is_refused(reach: Any) -> None:
    model = nn.Conv2d(3, 2, 1)
    model.reach, model.context_reach = reach, {"context": reach}
    with pytest.raises(PathosegError, match=r"Conv2d\.reach is"):
        edge_reach(model)
    with pytest.raises(PathosegError, match=r"Conv2d\.context_reach is"):
        context_reach(model)


def test_a_network_that_declares_nothing_sees_the_tile() -> None:
    assert declared_inputs(nn.Conv2d(3, 2, 1), 0.5, 64) == (ModelInput("image", 0.5, 64),)


def _cpu_is_of(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


@pytest.mark.parametrize("name", ["unet", "resnet11_v2"])
def test_a_network_laid_out_anew_learns_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cpu_is_of("AVX512", monkeypatch)
    images = torch.randn(
        2, 3, 32, 32, dtype=torch.double
    )  # in float32 sums near 0 are all rounding
    made = []
    for anew in (False, True):
        torch.manual_seed(0)
        config = ModelConfig(name, "segment", 2, width=4)
        model = build_model(config).double()
        layout = lay_out(model, config, "cpu") if anew else torch.contiguous_format
        inputs = images.contiguous(memory_format=layout)
        model(inputs).square().mean().backward()
        made.append([parameter.grad for parameter in model.parameters()])
        large = [each for each in model.parameters() if each.dim() == 4 and each[0, 0].numel() > 1]
        assert all(each.is_contiguous(memory_format=layout) for each in large)
    torch.testing.assert_close(made[0], made[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "capability", "layout"),
    [
        ("cpu", "AVX512", torch.channels_last),
        ("cpu", "AVX2", torch.contiguous_format),
        ("cpu", "DEFAULT", torch.contiguous_format),
        ("cuda", "AVX2", torch.channels_last),
    ],
)
def test_kernels_lie_as_the_device_is_fast_with(
    kind: str, capability: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cpu_is_of(capability, monkeypatch)
    config = ModelConfig("unet", "segment", 2, width=4)
    model = build_model(config)
    assert lay_out(model, config, kind) is layout
    kernels = [each for each in model.parameters() if each.dim() == 4 and each.shape[1] > 1]
    assert all(each.is_contiguous(memory_format=layout) for each in kernels)


def test_a_factorys_network_keeps_its_layout(factory_file: Path) -> None:
    name = "labs_network:make"
    config = ModelConfig(name, "segment", 2)
    model = build_model(config, factory=name)
    before = [parameter.stride() for parameter in model.parameters()]
    assert lay_out(model, config, "cuda") is torch.contiguous_format
    assert [parameter.stride() for parameter in model.parameters()] == before
