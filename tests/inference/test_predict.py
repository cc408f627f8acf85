"""Predictions of tiles: whatever layout a model takes, in batches within a row, finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from pathoseg.device import MEAN, STD, to_input
from pathoseg.errors import PathosegError
from pathoseg.geometry import Box
from pathoseg.inference.prediction import Context, predict
from pathoseg.models.bundle import Bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs.stitch import TilePrediction
from pathoseg.slides.region import Region

CARD = Bundle(
    model=ModelConfig("theirs:make", "segment", classes=2),
    class_names=("dark",),
    class_colours=((200, 0, 0),),
    mpp=0.5,
    tile=32,
    overlap=0,
    mean=MEAN,
    std=STD,
    multiple=1,
)
TILES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


class Plain(nn.Module):
    """Takes any layout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 2, 1)
        self.layouts: list[bool] = []
        self.batches: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.layouts.append(images.is_contiguous(memory_format=torch.channels_last))
        self.batches.append(len(images))
        logits: torch.Tensor = self.convolve(images)
        return logits


class Viewing(Plain):
    """Asks for a view that only the usual layout has."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        return logits.view(len(images), -1).view_as(logits)


class Greedy(Plain):
    """Asks for more memory than there is."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.empty(2**52))


class Full(Plain):
    """Finds no memory once, and finds some the next time."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        if len(self.layouts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits


class Wrong(Plain):
    """Fails for another reason."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images[:, :2])


class Partial(Plain):
    """Computes a part of its images alone, of which some rows may be lost."""

    lost = 0

    def logits_inside(self, images: torch.Tensor, inside: Box) -> torch.Tensor:
        rows, columns = inside.within(Box(0, 0, 32, 32))
        return super().forward(images[..., rows, columns])[..., self.lost :, :]


def _predicted(
    model: nn.Module, rows: Sequence[Sequence[int]], batch: int, part: Box | None = None
) -> list[TilePrediction]:
    def read(number: int) -> tuple[Region, Context]:
        return Region(TILES[number]), {}

    inside = None if part is None else lambda _: part
    return list(predict(model, CARD, read, rows, batch, 2, None, inside))


@pytest.mark.parametrize(("kind", "channels_last"), [(Plain, True), (Viewing, False)])
def test_a_model_gets_the_layout_it_takes(kind: type[Plain], channels_last: bool) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    predictions = _predicted(model, [range(5)], 1)
    assert model.layouts[-5:] == [channels_last] * 5
    with torch.inference_mode():
        images = to_input(TILES, MEAN, STD, torch.device("cpu"))
        expected = model(images).softmax(1)
    assert [index for index, _, _ in predictions] == list(range(5))
    torch.testing.assert_close(torch.stack([chances for _, chances, _ in predictions]), expected)


def test_no_batch_spans_two_rows() -> None:
    model = Plain().eval()
    predictions = _predicted(model, [[0, 1, 2], [], [3, 4]], 2)
    assert [index for index, _, _ in predictions] == list(range(5))
    assert model.batches[-3:] == [2, 1, 2]


def test_an_answer_that_is_not_finite_is_refused() -> None:
    model = Plain().eval()
    nn.init.constant_(model.convolve.weight, float("inf"))
    with pytest.raises(PathosegError, match="tile 3 with numbers that are not finite"):
        _predicted(model, [[3, 4]], 2)


def test_memory_that_is_used_up_is_told_with_what_to_change() -> None:
    with pytest.raises(PathosegError, match="2 tiles does not fit into memory") as told:
        _predicted(Greedy().eval(), [[3, 4]], 2)
    assert "[infer] batch" in told.value.hint
    with pytest.raises(RuntimeError, match="to have 3 channels"):
        _predicted(Wrong().eval(), [[3, 4]], 2)


def test_memory_that_is_used_up_says_nothing_of_the_layout() -> None:
    model = Full().eval()
    with pytest.raises(PathosegError, match="2 tiles does not fit"):
        _predicted(model, [[3, 4]], 2)
    assert model.layouts == [True]


def test_a_network_that_can_computes_only_the_part_that_is_wanted() -> None:
    part, models = Box(3, 5, 8, 6), (Plain().eval(), Partial().eval())
    models[1].load_state_dict(models[0].state_dict())
    full, cut = (_predicted(model, [[0, 1]], 2, part) for model in models)
    for (_, one, _), (_, other, _) in zip(full, cut, strict=True):
        assert (one.shape, other.shape) == ((2, 32, 32), (2, 6, 8))
        torch.testing.assert_close(one[:, *part.within(Box(0, 0, 32, 32))], other)
    models[1].lost = 1
    with pytest.raises(PathosegError, match="not 6 rows and 8 columns"):
        _predicted(models[1], [[0]], 1, part)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_input_is_scaled_by_channel(layout: torch.memory_format) -> None:
    found = to_input(TILES, MEAN, STD, torch.device("cpu"), layout)
    assert found.is_contiguous(memory_format=layout)
    pixels: NDArray[np.float64] = TILES.transpose(0, 3, 1, 2) / 255.0
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (MEAN, STD))
    np.testing.assert_allclose(found.numpy(), (pixels - mean) / std, rtol=0, atol=2e-6)
