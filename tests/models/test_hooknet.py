"""HookNet: shapes, pixels of its branches that coincide, and how far each looks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model, check_tile, context_reach, declared_inputs
from pathoseg.models.hooknet import HookNet
from pathoseg.models.model_options import ModelConfig, Norm
from tests.models.reach import measured_reach


@settings(max_examples=10)
@given(
    classes=st.integers(2, 4),
    width=st.integers(1, 6),
    depth=st.integers(2, 4),
    norm=st.sampled_from(["batch", "group", "instance"]),
    cells=st.integers(2, 3),
)
def test_logits_are_as_large_as_the_tile(
    classes: int, width: int, depth: int, norm: Norm, cells: int
) -> None:
    model = HookNet(classes, width, depth, norm)
    side = cells * model.multiple
    tile, context = declared_inputs(model, 0.5, side)
    assert (tile.size, context.size, context.mpp, context.name) == (side, side, 2.0, "context")
    image, around = torch.rand(2, 1, 3, side, side)
    assert model.eval()(image, around).shape == (1, classes, side, side)
    of_tile, of_context = model.train()(image, around)  # in training that of the context, too
    assert of_tile.shape == of_context.shape == (1, classes, side, side)
    assert not context_reach(model) or norm == "batch"


@settings(max_examples=8)
@given(
    depth=st.integers(2, 3),
    cells=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    margin=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    axis=st.sampled_from([2, 3]),
)
def test_the_branches_have_one_centre(
    depth: int, cells: tuple[int, int], margin: tuple[int, int], axis: int
) -> None:
    """With mirrored kernels, mirrored inputs give mirrored logits, unless the hook is shifted.

    With sides that the poolings divide, nothing else tells left from right.
    """
    torch.manual_seed(depth)
    model = HookNet(2, 3, depth).double().eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.weight.data += module.weight.data.flip(axis)
    height, wide = (cell * model.multiple for cell in cells)
    step = model.multiple // 4
    image = torch.rand(1, 3, height, wide, dtype=torch.double)
    sides = (side // 4 + 2 * each * step for side, each in zip((height, wide), margin, strict=True))
    context = torch.rand(1, 3, *sides, dtype=torch.double)
    with torch.inference_mode():
        logits = model(image, context)
        mirrored = model(image.flip(axis), context.flip(axis)).flip(axis)
    torch.testing.assert_close(mirrored, logits)


def test_a_shift_of_the_world_by_a_deepest_pixel_shifts_the_logits() -> None:
    """Both fields are cut out of one world; where neither feels its edge, place is no matter."""
    torch.manual_seed(0)
    model = HookNet(2, 3, depth=2).double().eval()
    side, multiple, reach = 8 * model.multiple, model.multiple, model.reach
    assert reach is not None
    world = torch.rand(1, 3, 5 * side, 5 * side, dtype=torch.double)
    coarse = nn.functional.avg_pool2d(world, 4)

    def at(x: int, y: int) -> torch.Tensor:
        (left, top), span = ((x - 3 * side // 2) // 4, (y - 3 * side // 2) // 4), slice
        image = world[..., y : y + side, x : x + side]
        context = coarse[..., top : top + side, span(left, left + side)]
        with torch.inference_mode():
            return model(image, context)

    start = 2 * side
    here, there = at(start, start), at(start + multiple, start - multiple)
    inner = slice(reach + multiple, side - reach - multiple)
    moved = slice(reach, side - reach - 2 * multiple)
    back = slice(reach + 2 * multiple, side - reach)
    torch.testing.assert_close(there[..., back, moved], here[..., inner, inner])


def test_reach_is_exact() -> None:
    torch.manual_seed(0)
    model = HookNet(2, 4, depth=2).double().eval()
    seen = _Seen(model)
    assert measured_reach(seen, 1e-9) == (model.reach, model.reach)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_larger_context_gives_the_same_from_its_reach_on(depth: int) -> None:
    model = HookNet(2, 2, depth).double().eval()
    for module in model.modules():  # keep every ReLU open, so that nothing hides the padding
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.uniform_(module.weight, 0.01, 0.1)
    side, step = model.multiple, model.multiple // 4
    enough = -(-model.context_reach["context"] // step) * step
    image = torch.rand(1, 3, side, side, dtype=torch.double)
    context = torch.rand(1, 3, *2 * (side // 4 + 2 * (enough + step),), dtype=torch.double)
    with torch.inference_mode():
        largest, larger, small = (
            model(image, context[..., cut : context.shape[2] - cut, cut : context.shape[3] - cut])
            for cut in (0, step, 2 * step)
        )
    torch.testing.assert_close(larger, largest, rtol=1e-9, atol=0)
    assert not torch.allclose(small, largest, rtol=1e-6, atol=0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PathosegError, match=r"hooknet cannot have depth 1.*2 to 8"):
        ModelConfig("hooknet", "segment", 2, depth=1)
    with pytest.raises(PathosegError, match="hooknet cannot classify"):
        ModelConfig("hooknet", "classify", 2)
    model = build_model(ModelConfig("hooknet", "segment", 2, width=2, depth=3))
    with pytest.raises(PathosegError, match=r"multiples of 32 px.*Choose 96 or 128 px"):
        check_tile(model, 100)


class _Seen(nn.Module):
    """A HookNet whose context is the same everywhere."""

    def __init__(self, model: HookNet) -> None:
        super().__init__()
        self.model, self.reach, self.multiple = model, model.reach, model.multiple

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        height, width = (side // 4 + 16 * self.multiple for side in image.shape[2:])
        logits: torch.Tensor = self.model(image, image.new_ones(1, 3, height, width))
        return logits
