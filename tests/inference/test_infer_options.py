"""Options of `infer`: those by which a model could segment no slide are refused at its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pathoseg.config import InferConfig
from pathoseg.errors import PathosegError
from pathoseg.inference.infer_options import refuse_unfit, trained_overlap


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (InferConfig(overlap=18), r"\[infer\] overlap = 18: Tiles of 64 px with 18 px overlap"),
        (InferConfig(overlap=64), "overlap = 64: Tiles of 64 px with 64 px overlap"),
        (InferConfig(tile=32, overlap=32), "tile = 32, overlap = 32: Tiles of 32 px with 32 px"),
        (InferConfig(margin=30), "margin = 30: .* between two margins of 30 px"),
        (InferConfig(object_um=500), "object_um = 500 is 1,000 px at 0.5 µm"),
    ],
)
def test_what_fits_no_slide_is_refused_ahead_of_the_training(
    options: InferConfig, told: str
) -> None:
    with pytest.raises(PathosegError, match=told):
        refuse_unfit(options, "objects", 0.5, 64, 16, 20)


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        (InferConfig(), 20),
        (InferConfig(), None),
        (InferConfig(tile=100), 20),  # bounds windows
        (InferConfig(tile=256, overlap=128, margin=64), 20),
        (InferConfig(overlap=0, margin=5), None),
    ],
)
def test_what_fits_is_taken(options: InferConfig, reach: int | None) -> None:
    refuse_unfit(options, "segment", 0.5, 64, 16, reach)
    refuse_unfit(InferConfig(overlap=18, object_um=1e6), "classify", 0.5, 64, 16, reach)


def test_a_bundle_records_the_overlap_of_its_own_tiles() -> None:
    assert trained_overlap(InferConfig(overlap=32), 64, 16, None) == 32
    assert trained_overlap(InferConfig(tile=256, overlap=128), 64, 16, None) == 16


@pytest.mark.parametrize("command_name", ["train", "check"])
def test_train_and_check_name_the_option(
    toy_slides: Path, command: Callable[..., tuple[int, str]], command_name: str
) -> None:
    text = Path("tiny.toml").read_text() + "[infer]\noverlap = 18\n"
    Path("tiny.toml").write_text(text)
    code, said = command(
        command_name, "--config", "tiny.toml", "--slides", toy_slides, "--out", "o"
    )
    told = "[infer] overlap = 18: Tiles of 32 px with 18 px overlap do not fit"
    assert (code, told in " ".join(said.split())) == (2, True), said
    assert not Path("o/config.toml").exists()
