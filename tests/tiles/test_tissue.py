"""Tissue is found on every kind of slide, and its share of a box is exact."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import ndimage

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import Box, Frame, Level, Mpp, Size
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.tile_options import TissueOptions
from pathoseg.tiles.tissue import Tissue, find_tissue

HAEMATOXYLIN = (0.65, 0.70, 0.29)
EOSIN = (0.15, 0.75, 0.45)
DAB = (0.27, 0.57, 0.78)
GLASS = (243, 242, 240)
HEIGHT, WIDTH = 400, 600
MPP = 8.0


class ArraySlide:
    """A slide of one level in memory; blocks that touch `broken` cannot be read."""

    path = Path("memory")
    vendor = "memory"
    origin = (0, 0)
    reduced: tuple[Level, ...] = ()
    warnings: tuple[str, ...] = ()
    held_pixels = 0

    def __init__(self, pixels: NDArray[np.uint8], mpp: float, broken: Box | None = None) -> None:
        self._pixels = pixels
        self._broken = broken
        self.mpp = Mpp(mpp, mpp)
        self.size = Size(pixels.shape[1], pixels.shape[0])
        self.levels = (Level(self.size, 1.0),)

    def read_level(self, level: int, box: Box) -> NDArray[np.uint8]:
        if self._broken is not None and box.intersection(self._broken) is not None:
            raise UnreadableError("memory: broken.", "Repair it.")
        return self._pixels[box.y : box.bottom, box.x : box.right]

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def _found(pixels: NDArray[np.float64], mpp: float = MPP) -> NDArray[np.bool_]:
    """The mask of an image after a scanner's noise."""
    noise = np.random.default_rng(1).normal(0, 2, pixels.shape)
    seen = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return find_tissue(ArraySlide(seen, mpp), TissueOptions()).mask


def _iou(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> float:
    return float((found & truth).sum() / (found | truth).sum())


@pytest.fixture
def section() -> NDArray[np.bool_]:
    """An egg-shaped section of 2.4 × 1.7 mm with a bay, left of the middle."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    egg = ((x - 220) / 150) ** 2 + ((y - 200) / (90 + 0.1 * x)) ** 2 < 1
    bay = (x - 220) ** 2 + (y - 90) ** 2 < 30**2
    return egg & ~bay


def _stained(
    truth: NDArray[np.bool_],
    stain: tuple[float, float, float],
    amount: float,
    glass: tuple[int, int, int] = GLASS,
) -> NDArray[np.float64]:
    """Glass with a slight gradient, and a textured section on it."""
    rng = np.random.default_rng(0)
    texture = ndimage.gaussian_filter(rng.normal(0, 1, truth.shape), 1.5)
    density = amount * (1 + 0.35 * texture / texture.std()).clip(0.3) * truth
    slope = np.linspace(1, 0.98, truth.shape[1])[:, None]
    return np.array(glass) * slope * np.exp(-density[..., None] * np.array(stain))


@pytest.mark.parametrize(
    ("stain", "amount"),
    [
        (HAEMATOXYLIN, 0.6),
        (EOSIN, 0.5),
        (EOSIN, 0.12),  # faint: green falls from 242 to 221
        (HAEMATOXYLIN, 0.2),  # the pale blue counterstain of immunohistochemistry
        (DAB, 0.5),
    ],
)
def test_sections_of_any_stain(
    section: NDArray[np.bool_], stain: tuple[float, float, float], amount: float
) -> None:
    assert _iou(_found(_stained(section, stain, amount)), section) > 0.92


def test_dab_in_a_pale_blue_section(section: NDArray[np.bool_]) -> None:
    spots = np.random.default_rng(2).random(section.shape) < 0.02
    brown = ndimage.binary_dilation(spots, iterations=2) & section
    pixels = _stained(section, HAEMATOXYLIN, 0.18) * _stained(brown, DAB, 1.5) / 243
    assert _iou(_found(pixels), section) > 0.92


@pytest.mark.parametrize(("dark", "bright"), [(2, 25), (12, 120)])
def test_fluorescence(section: NDArray[np.bool_], dark: int, bright: int) -> None:
    rng = np.random.default_rng(3)
    cells = ndimage.gaussian_filter((rng.random(section.shape) < 0.05).astype(float), 1.5)
    light = dark + bright * section * (0.4 + 0.6 * cells / cells.max())
    pixels = np.stack([0.1 * light, 0.2 * light, light], axis=2)
    assert _iou(_found(pixels), section) > 0.92


@pytest.mark.parametrize(
    "ink",
    [(45, 70, 160), (60, 110, 200), (25, 120, 70), (30, 30, 33), (195, 30, 45)],
    ids=["blue", "light blue", "green", "black", "red"],
)
def test_pen_marks_are_no_tissue(section: NDArray[np.bool_], ink: tuple[int, int, int]) -> None:
    pixels = _stained(section, HAEMATOXYLIN, 0.5)
    stroke = np.zeros(section.shape, bool)
    stroke[30:370, 450:500] = True  # 0.4 mm wide, with bristle marks
    streaks = 1 + 0.04 * np.sin(np.arange(WIDTH) / 2)[:, None]
    soft = ndimage.gaussian_filter(stroke.astype(float), 1.5)[..., None]
    pixels = pixels * (1 - soft) + soft * np.array(ink) * streaks
    found = _found(pixels)
    assert found[:, 430:520].mean() < 0.01
    assert _iou(found, section) > 0.92


def test_edges_of_glass_and_shadows_are_no_tissue(section: NDArray[np.bool_]) -> None:
    pixels = _stained(section, EOSIN, 0.4)
    pixels[:, 520:535] *= 0.5  # a cover slip's edge, 120 µm
    pixels[380:, :] *= np.linspace(1, 0.4, 20)[:, None, None]  # a shadow
    pixels[:25] = 3  # beyond the slide
    found = _found(pixels)
    truth = section & (np.arange(HEIGHT) >= 25)[:, None]
    assert not found[:, 500:].any()
    assert _iou(found, truth) > 0.92


def test_tinted_glass_beside_what_was_not_scanned(section: NDArray[np.bool_]) -> None:
    pixels = _stained(section, EOSIN, 0.4, glass=(236, 230, 219))
    pixels[:, 480:] = 255
    noise = np.random.default_rng(1).normal(0, 2, (HEIGHT, 480, 3))
    pixels[:, :480] += noise
    mask = find_tissue(ArraySlide(pixels.clip(0, 255).astype(np.uint8), MPP), TissueOptions()).mask
    assert not mask[:, 480:].any()
    assert _iou(mask, section) > 0.92


def test_tissue_on_overexposed_glass(section: NDArray[np.bool_]) -> None:
    pixels = _stained(section, EOSIN, 0.2, glass=(262, 262, 262))
    assert _iou(_found(pixels), section) > 0.9


def test_a_section_in_grey(section: NDArray[np.bool_]) -> None:
    grey = _stained(section, (1, 1, 1), 0.4, glass=(240, 240, 240)).astype(np.uint8)
    mask = find_tissue(ArraySlide(grey, MPP), TissueOptions()).mask
    assert _iou(mask, section) > 0.9


@pytest.mark.parametrize("background", [GLASS, (255, 255, 255), (4, 4, 6)])
def test_an_empty_slide_has_none(background: tuple[int, int, int]) -> None:
    empty = np.zeros((HEIGHT, WIDTH), bool)
    assert not _found(_stained(empty, EOSIN, 0, background)).any()


@pytest.mark.parametrize("amount", [0.25, 0.6])
@pytest.mark.parametrize("mpp", [0.25, 0.5, 8.0])
def test_an_image_wholly_of_tissue_is_tissue(amount: float, mpp: float) -> None:
    full = np.ones((512, 512), bool)
    assert _found(_stained(full, EOSIN, amount), mpp).mean() > 0.95


def test_a_threshold_overrules(section: NDArray[np.bool_]) -> None:
    slide = ArraySlide(_stained(section, EOSIN, 0.12).astype(np.uint8), MPP)
    assert find_tissue(slide, TissueOptions(threshold=0.03)).mask.any()
    assert not find_tissue(slide, TissueOptions(threshold=0.5)).mask.any()


def test_all_is_all() -> None:
    slide = ArraySlide(np.full((30, 40, 3), 255, np.uint8), 10.0)
    tissue = find_tissue(slide, TissueOptions(method="all"))
    assert tissue.share(Box(35, 0, 50, 10), Frame.at(slide.size, slide.mpp, 10.0)) == 1
    assert tissue.area_mm2 == pytest.approx(0.3 * 0.4)


def test_the_unread_counts_as_tissue(section: NDArray[np.bool_]) -> None:
    pixels = _stained(section, EOSIN, 0.5).astype(np.uint8)
    slide = ArraySlide(pixels, MPP, broken=Box(590, 10, 1, 1))
    mask = find_tissue(slide, TissueOptions()).mask
    assert mask[10, 590], "it may be tissue, so it is tried and reported"
    assert not mask[395, 590]


@pytest.mark.parametrize("wrong", [{"method": "magic"}, {"threshold": -1}, {"threshold": math.nan}])
def test_options_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(PathosegError, match=next(iter(wrong))):
        TissueOptions(**wrong)


@given(
    mask=arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))),
    scale=st.integers(1, 6),
    box=st.tuples(*[st.integers(-20, 60)] * 2, *[st.integers(1, 50)] * 2),
)
def test_share_counts_pixels(
    mask: NDArray[np.bool_], scale: int, box: tuple[int, int, int, int]
) -> None:
    """Against the mask blown up to level 0, where a box covers whole pixels."""
    rows, columns = mask.shape
    tissue = Tissue(mask, Size(columns * scale, rows * scale), Mpp(1, 1))
    full = np.kron(mask, np.ones((scale, scale), bool))
    x, y, width, height = box
    inside = full[max(0, y) : max(0, y + height), max(0, x) : max(0, x + width)]
    frame = Frame.at(tissue.slide_size, tissue.mpp, 1.0)
    share = tissue.share(Box(*box), frame)
    assert share == pytest.approx(inside.mean() if inside.size else 0.0)
    assert (share > 0) == inside.any()
    assert tissue.area_mm2 == pytest.approx(full.sum() * 1e-6)


@given(
    mask=arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))),
    scale=st.integers(1, 6),
    mpp=st.floats(0.4, 7),
    data=st.data(),
)
def test_pixels_of_tissue_are_those_whose_centre_is(
    mask: NDArray[np.bool_], scale: int, mpp: float, data: st.DataObject
) -> None:
    rows, columns = mask.shape
    tissue = Tissue(mask, Size(columns * scale, rows * scale), Mpp(1, 1))
    frame = Frame.at(tissue.slide_size, tissue.mpp, mpp)
    x = data.draw(st.integers(0, frame.size.width - 1))
    y = data.draw(st.integers(0, frame.size.height - 1))
    box = Box(x, y, frame.size.width - x, frame.size.height - y)
    found = tissue.pixels(box, frame)
    assert found.shape == (box.height, box.width)
    for (down, across), value in np.ndenumerate(found):
        row = min(int((y + down + 0.5) * mpp / scale), rows - 1)
        column = min(int((x + across + 0.5) * mpp / scale), columns - 1)
        assert value == mask[row, column]


def test_glass_has_no_share_whatever_the_rounding() -> None:
    mask = np.random.default_rng(0).random((1054, 825)) < 0.5
    mask[500:540, 300:360] = False
    tissue = Tissue(mask, Size(13196, 16866), Mpp(0.5, 0.5))
    frame = Frame.at(tissue.slide_size, tissue.mpp, 0.7)
    across, down = 13196 / 825 * 0.5 / 0.7, 16866 / 1054 * 0.5 / 0.7
    for x in range(round(301 * across), round(350 * across), 7):
        for y in range(round(501 * down), round(530 * down), 7):
            assert tissue.share(Box(x, y, 60, 70), frame) == 0


REAL = {
    "aperio_CMU-1-Small-Region.svs": (0.35, 0.48),
    "monusac_A9K0_1.svs": (0.95, 1.0),
    "hamamatsu_test3-TRITC.ndpi": (0.80, 0.92),
    "dicom_camelyon_1152x700.dcm": (0.20, 0.35),
    "ometiff_HE_example_1380x1484.ome.tif": (0.70, 0.80),
    "wsi_gastric-erosion_13196x16866.tif": (0.38, 0.46),
}


@pytest.mark.parametrize("name", REAL)
def test_real_slides(shared_data: Path, name: str) -> None:
    """Shares between bounds set by eye on overlays."""
    assume = 0.5 if name.startswith("wsi") else None
    with open_slide(shared_data / "slides" / name, assume) as slide:
        share = find_tissue(slide, TissueOptions()).mask.mean()
    low, high = REAL[name]
    assert low <= share <= high


@pytest.mark.parametrize(
    "folder", ["monuseg-train/images", "tnbc/images", "dsb2018-stained/images"]
)
def test_real_fields_of_view_are_wholly_tissue(shared_data: Path, folder: str) -> None:
    paths = sorted((shared_data / folder).iterdir())
    assert paths
    for path in paths:
        with open_slide(path, 0.25) as slide:
            assert find_tissue(slide, TissueOptions()).mask.mean() > 0.95, path
