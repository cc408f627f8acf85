"""A mosaic of tiles with known truth is segmented, and scores, as its tiles one by one."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from numpy.typing import NDArray
from PIL import Image

from pathoseg.models.build import edge_reach
from pathoseg.models.bundle import load_bundle, save_bundle

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]

SIDE, ACROSS, DOWN = 128, 3, 2
MPP = ("--assume-mpp", "0.5")


def _pasted(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    rows = [images[start : start + ACROSS] for start in range(0, len(images), ACROSS)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _draw(path: Path, seed: int) -> None:
    """Stained blobs of several sizes; the truth is where they are red."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 230, (8, 8, 3), np.uint8))
    pixels = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(int)
    red = (pixels[..., 0] > pixels[..., 1]).astype(np.uint8)
    pixels = (pixels + rng.normal(0, 12, pixels.shape)).clip(0, 255)
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    Image.fromarray(red).save(path.with_name(f"{path.stem}_mask.png"))


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """`tiles/` with annotated tiles, and `whole/` with the one slide that they make."""
    for folder in ("tiles", "whole"):
        (tmp_path / folder).mkdir()
    for number in range(ACROSS * DOWN):
        _draw(tmp_path / "tiles" / f"{number:02}.png", number)
    for suffix in ("", "_mask"):
        tiles = sorted((tmp_path / "tiles").glob(f"[0-9][0-9]{suffix}.png"))
        pixels = _pasted([np.asarray(Image.open(tile)) for tile in tiles])
        Image.fromarray(pixels).save(tmp_path / "whole" / f"mosaic{suffix}.png")
    return tmp_path


def _mask(folder: Path) -> NDArray[np.uint8]:
    return np.asarray(tifffile.imread(folder / "mask.ome.tiff"))


def _scores(command: Command, slides: Path, folder: str) -> dict[str, Any]:
    """The row of `evaluation.csv` for all slides of a folder taken together."""
    out = slides / f"evaluated {folder}"
    code, said = command(
        "evaluate", "--slides", slides / folder, "--model", slides / "model", "--out", out,
        "--config", slides / "all.toml", *MPP,
    )  # fmt: skip
    assert code == 0, said
    with (out / "evaluation.csv").open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def test_a_mosaic_scores_what_its_tiles_score(
    slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """The truth is class 1 of 2, so every pixel of the other one is an error that counts.

    Beside the seams a network sees the neighbour instead of an edge; what it answers further away
    than it can see is equal to the pixel. Nothing else may differ, so the scores differ by no more
    than the share of pixels beside seams.
    """
    net, card = load_bundle(tiny_bundle())
    weights = net.state_dict()
    # Where no feature answers, all classes would tie, to be parted by rounding.
    weights["head.bias"] += torch.tensor([0.0, 0.1, 0.05])
    save_bundle(slides / "model", weights, card)
    reach = edge_reach(net)
    assert reach is not None
    assert 2 * reach < SIDE
    (slides / "all.toml").write_text(
        '[data]\nclasses = ["gland", "stroma"]\n[tissue]\nmethod = "all"\n'
    )
    for folder in ("tiles", "whole"):
        code, said = command(
            "infer", slides / folder, "--model", slides / "model", "--out", slides / "out",
            "--config", slides / "all.toml", *MPP,
        )  # fmt: skip
        assert code == 0, said
    whole = _mask(slides / "out" / "mosaic")
    tiles = [slides / "out" / f"{number:02}" for number in range(ACROSS * DOWN)]
    one_by_one = _pasted([_mask(tile) for tile in tiles])
    y, x = np.mgrid[: DOWN * SIDE, : ACROSS * SIDE]
    near = np.zeros(whole.shape, bool)
    for at, count in ((x, ACROSS), (y, DOWN)):
        for seam in range(SIDE, count * SIDE, SIDE):
            near |= (seam - reach <= at) & (at < seam + reach)
    assert set(np.unique(whole)) == {0, 1, 2}
    np.testing.assert_array_equal(whole[~near], one_by_one[~near])

    both = [_scores(command, slides, folder) for folder in ("whole", "tiles")]
    assert both[0]["pixels"] == both[1]["pixels"] == str(whole.size)
    truth = np.asarray(Image.open(slides / "whole" / "mosaic_mask.png"))
    for row, mask in zip(both, (whole, one_by_one), strict=True):
        hits = np.count_nonzero((mask == 1) & (truth == 1))
        dice = 2 * hits / (np.count_nonzero(mask == 1) + np.count_nonzero(truth == 1))
        assert float(row["dice_gland"]) == pytest.approx(dice, rel=1e-9)
    differing = np.count_nonzero(whole != one_by_one)
    counted = min(np.count_nonzero(mask == 1) for mask in (whole, one_by_one))
    tolerance = 2 * differing / (counted + np.count_nonzero(truth == 1))
    found = [float(row["dice_gland"]) for row in both]
    assert abs(found[0] - found[1]) <= tolerance
