"""A network that sees a tile and what lies around it trains and segments from both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

import pathoseg
from pathoseg.config import Config
from pathoseg.device import MEAN, STD
from pathoseg.errors import PathosegError
from pathoseg.geometry import ModelInput
from pathoseg.models.bundle import Bundle, load_bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.training.read_network import ReadNetwork, read_alone
from pathoseg.training.step_plan import Prices
from tests.two_inputs import TwoFields

NAME = "tests.two_inputs:make"
INPUTS = (ModelInput("image", 0.5, 32), ModelInput("context", 2.0, 32))
CARD = Bundle(
    model=ModelConfig(NAME, "segment", classes=2),
    class_names=("disc",),
    class_colours=((200, 0, 0),),
    mpp=0.5,
    tile=32,
    overlap=8,
    mean=MEAN,
    std=STD,
    multiple=8,
    context=INPUTS[1:],
)


def test_it_trains_a_step_and_infers(
    toy_slides: Path, command: Callable[..., tuple[int, str]]
) -> None:
    text = Path("tiny.toml").read_text().replace("width = 4\ndepth = 2", "")
    text = text.replace("tile = 32", 'tile = 32\ncache = "tiles"')
    Path("own.toml").write_text(text)
    training = ("train", "--slides", toy_slides, "--model", NAME, "--epochs", 1, "--out", "run")
    code, said = command(*training, "--config", "own.toml")
    assert code == 0, said
    assert "The input `context` shows 64 µm around a tile's middle" in said
    trained, card = load_bundle(Path("run/model"), NAME)
    assert card.inputs == INPUTS
    torch.manual_seed(0)
    for before, after in zip(TwoFields(2).parameters(), trained.parameters(), strict=True):
        assert not torch.equal(before, after)
    caches = [
        json.loads(path.read_text()) for path in Path("tiles").glob("slide0.png/*/cache.json")
    ]
    assert sorted(cache["frame"]["mpp"]["x"] for cache in caches) == [0.5, 2.0]
    code, said = command(
        "infer", toy_slides / "slide0.png", "--model", "run", "--factory", NAME,
        "--assume-mpp", 0.5, "--out", "out",
    )  # fmt: skip
    assert code == 0, said
    assert tifffile.imread("out/slide0/mask.ome.tiff", level=0).shape == (96, 96)


@pytest.mark.parametrize("shape", [(100, 72), (20, 24)])
def test_what_is_predicted_lies_where_the_context_is(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    model = TwoFields(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # The class where the context's red is below 127.6: the tile is not looked at.
        model.far.weight[1, 0] = -STD[0]
        assert model.far.bias is not None
        model.far.bias[1] = 127.6 / 255 - MEAN[0]
    save_bundle(tmp_path / "model", model.state_dict(), CARD)
    coarse = np.random.default_rng(3).integers(0, 256, (shape[0] // 4, shape[1] // 4, 3))
    picture = coarse.astype(np.uint8).repeat(4, axis=0).repeat(4, axis=1)
    found = pathoseg.load_model(tmp_path / "model", factory=NAME).predict(picture, mpp=0.5)
    np.testing.assert_array_equal(found.classes, picture[..., 0] < 128)


def test_the_card_and_the_network_must_name_the_same_inputs(tmp_path: Path) -> None:
    one = replace(CARD, context=())
    assert one.inputs == INPUTS[:1]
    save_bundle(tmp_path / "model", TwoFields(2).state_dict(), one)
    with pytest.raises(PathosegError, match=r"names the inputs image .* has image .* context"):
        load_bundle(tmp_path / "model", NAME)


def test_a_plan_prices_both_inputs() -> None:
    config = replace(Config(), model=replace(Config().model, name=NAME))
    config = replace(config, tiles=replace(config.tiles, tile=32))
    hardware = load_hardware("cpu")
    [one, *_] = Prices(ReadNetwork(TwoFields(2), config, None, "cpu"), hardware).graphs()
    shapes = {name: value.shape for name, value in one.graph.inputs.items()}
    assert shapes == {"image": (1, 3, 32, 32), "context": (1, 3, 32, 32)}
    assert {"near", "far"} < {layer.name for layer in one.graph.layers}
    assert read_alone(TwoFields(2), config) is not None


class _OtherNames(TwoFields):
    def forward(self, **seen: torch.Tensor) -> torch.Tensor:
        return super().forward(**seen)


def test_inputs_that_are_no_arguments_train_in_one_process_alone() -> None:
    config = replace(Config(), model=replace(Config().model, name=NAME))
    config = replace(config, tiles=replace(config.tiles, tile=32))
    assert read_alone(_OtherNames(2), config) is None
    with pytest.raises(PathosegError, match="Let it have an argument of the name of each input"):
        ReadNetwork(_OtherNames(2), config, None, "cpu").whole(1)
