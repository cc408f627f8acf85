"""Figures of several slides and their intervals, against single slides and SciPy's bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import bootstrap

from pathoseg.models.metrics import Calibration, Confusion, dice
from pathoseg.models.tally import Tally, pooled_figures

NAMES = ("gland", "stroma")


def _slide(rng: np.random.Generator, boundary: bool = True) -> Tally:
    confusion, calibration = Confusion(3), Calibration()
    truth = rng.integers(0, 3, 400)
    guess = np.where(rng.random(400) < rng.uniform(0.4, 0.9), truth, rng.integers(0, 3, 400))
    confusion.update(guess, truth)
    calibration.update(rng.random(400), guess == truth)
    counts = rng.integers(0, 50, (2, 4))
    counts[:, 1::2] %= counts[:, ::2] + 1
    objects = np.array([3, 4, 1, 0.75, 2, 2, 1, 2]) * rng.integers(1, 9, (3, 1))
    return Tally(confusion.matrix, calibration.bins, counts if boundary else None, objects)


def test_figures_of_slides_together_are_those_of_their_sums() -> None:
    rng = np.random.default_rng(0)
    slides = [_slide(rng) for _ in range(4)]
    together = pooled_figures(slides, ["a", "b", "c", "c"], NAMES, seed=0)
    total = Tally(
        sum(slide.confusion for slide in slides),
        np.sum([slide.calibration for slide in slides], axis=0),
        np.sum([slide.boundary for slide in slides], axis=0),
        np.sum([slide.objects for slide in slides], axis=0),
    )
    alone = {name: float(figure) for name, figure in total.figures(NAMES).items()}
    assert {name: figure.value for name, figure in together.items()} == pytest.approx(alone)
    assert alone["dice_stroma"] == dice(total.confusion)[1]
    assert (alone["aji_all"], alone["pq_stroma"]) == (0.75, 0.375)
    assert list(alone)[:6] == [
        "dice_mean", "iou_mean", "dice_gland", "dice_stroma", "iou_gland", "iou_stroma",
    ]  # fmt: skip
    for figure in together.values():
        assert figure.low <= figure.high
        assert figure.low >= 0
        assert figure.high <= 1


def test_intervals_are_those_of_scipys_bootstrap_over_patients() -> None:
    rng = np.random.default_rng(1)
    patients = [str(number % 12) for number in range(30)]
    slides = [_slide(rng) for _ in patients]
    ours = pooled_figures(slides, patients, NAMES, seed=3)
    of_patient = np.array(
        [
            np.sum([s.confusion for s, p in zip(slides, patients, strict=True) if p == own], axis=0)
            for own in sorted(set(patients))
        ]
    )

    def gland(drawn: np.ndarray, axis: int) -> np.ndarray:  # axis -1, before the matrix
        return dice(of_patient[drawn].sum(axis=axis - 2))[..., 0]

    theirs = bootstrap(
        (np.arange(len(of_patient)),), gland, n_resamples=4000, method="percentile", rng=rng
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours["dice_gland"].low == pytest.approx(theirs.low, abs=0.1 * width)
    assert ours["dice_gland"].high == pytest.approx(theirs.high, abs=0.1 * width)
    assert pooled_figures(slides, patients, NAMES, seed=3) == ours
    assert pooled_figures(slides, patients, NAMES, seed=4) != ours


def test_patients_who_are_alike_leave_no_doubt_and_two_give_no_interval() -> None:
    slide = _slide(np.random.default_rng(2), boundary=False)
    alike = pooled_figures([slide] * 5, list("abcde"), NAMES, seed=0)
    for figure in alike.values():
        assert (figure.low, figure.high) == pytest.approx((figure.value, figure.value))
    assert "boundary_f1_mean" not in alike
    for figure in pooled_figures([slide] * 5, list("ababa"), NAMES, seed=0).values():
        assert math.isnan(figure.low)
        assert math.isnan(figure.high)


def test_a_class_that_some_draws_lack_has_an_interval_all_the_same() -> None:
    rng = np.random.default_rng(5)
    slides = [_slide(rng) for _ in range(4)]
    for slide in slides[1:]:
        slide.confusion[2, :] = slide.confusion[:, 2] = 0
    figure = pooled_figures(slides, list("abcd"), NAMES, seed=0)["dice_stroma"]
    assert (figure.low, figure.high) == pytest.approx((figure.value, figure.value))


def test_the_interval_mostly_holds_the_dice_of_all_patients() -> None:
    """Test that 85 to 99 of 100 intervals, of 20 patients each, hold the Dice of all patients.

    All are 20,000 patients who differ. Of only 20, percentile intervals come short of 95 of 100.
    """
    rng = np.random.default_rng(0)

    def patient() -> Tally:
        true, share, excess = rng.integers(500, 3000), rng.beta(8, 3), rng.beta(2, 8)
        hits, wrong = int(true * share), int(true * excess)
        matrix = np.array([[9000 - wrong, wrong], [true - hits, hits]])
        return Tally(matrix, np.zeros((15, 3)), None)

    everyone = dice(np.sum([patient().confusion for _ in range(20_000)], axis=0))[0]
    held, names = 0, [str(number) for number in range(20)]
    for seed in range(100):
        figure = pooled_figures([patient() for _ in names], names, ("gland",), seed)["dice_gland"]
        held += figure.low <= everyone <= figure.high
    assert 85 <= held <= 99
