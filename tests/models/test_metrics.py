"""Metrics against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    jaccard_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from pathoseg.models.losses import IGNORE
from pathoseg.models.metrics import (
    CONFIDENCE_BINS,
    Calibration,
    Confusion,
    accuracy_and_auc,
    dice,
    expected_calibration_error,
    iou,
    mean_of_present,
    precision,
    recall,
)

CLASSES = 4
Masks = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@st.composite
def masks(draw: st.DrawFn) -> Masks:
    """A prediction and a target of few classes, so that some are absent; some pixels ignored."""
    shape = draw(npst.array_shapes(min_dims=1, max_dims=3, max_side=6))
    used = draw(st.integers(1, CLASSES))
    prediction = draw(npst.arrays(np.uint8, shape, elements=st.integers(0, used - 1)))
    labels = st.integers(0, used - 1) | st.just(IGNORE)
    return prediction, draw(npst.arrays(np.uint8, shape, elements=labels))


@given(masks())
def test_confusion_agrees_with_sklearn(pair: Masks) -> None:
    prediction, target = pair
    seen = Confusion(CLASSES)
    seen.update(prediction, target)
    valid = target != IGNORE
    guess, truth = prediction[valid], target[valid]
    every = list(range(CLASSES))
    if truth.size:
        assert np.array_equal(seen.matrix, confusion_matrix(truth, guess, labels=every))
        expected = f1_score(truth, guess, labels=every[1:], average=None, zero_division=math.nan)
        joint = jaccard_score(truth, guess, labels=every[1:], average=None, zero_division=0)
        np.testing.assert_allclose(dice(seen.matrix), expected)
        np.testing.assert_allclose(iou(seen.matrix), np.where(np.isnan(expected), math.nan, joint))
        for ours, theirs in ((precision, precision_score), (recall, recall_score)):
            judged = theirs(truth, guess, labels=every[1:], average=None, zero_division=math.nan)
            np.testing.assert_allclose(ours(seen.matrix), judged)
    for found in (dice(seen.matrix), iou(seen.matrix)):
        if np.isnan(found).all():
            assert math.isnan(mean_of_present(found))
        else:
            assert mean_of_present(found) == pytest.approx(np.nanmean(found))


@given(st.lists(masks(), max_size=4))
def test_merging_is_seeing_all(pairs: list[Masks]) -> None:
    whole, merged = Confusion(CLASSES), Confusion(CLASSES)
    for prediction, target in pairs:
        whole.update(prediction, target)
        part = Confusion(CLASSES)
        part.update(prediction, target)
        merged.merge(part)
    assert np.array_equal(whole.matrix, merged.matrix)
    assert whole.matrix.dtype == np.int64


def test_what_is_no_class_is_an_error() -> None:
    seen = Confusion(2)
    with pytest.raises(ValueError, match=r"0…1"):
        seen.update(np.array([2]), np.array([0]))
    with pytest.raises(ValueError, match=r"0…1"):
        seen.update(np.array([0]), np.array([-1]))
    with pytest.raises(ValueError, match="differ"):
        seen.update(np.array([0, 1]), np.array([0]))
    seen.update(np.array([IGNORE]), np.array([IGNORE]))
    assert not seen.matrix.any()


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(2, 4))
def test_accuracy_and_auc_agree_with_sklearn(seed: int, tiles: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    probability = rng.dirichlet(np.ones(classes), tiles)
    target = rng.integers(0, classes, tiles)
    target[rng.random(tiles) < 0.2] = IGNORE
    scores = accuracy_and_auc(target, probability)
    valid = target != IGNORE
    truth = target[valid]
    if not truth.size:
        assert math.isnan(scores.accuracy)
    else:
        assert scores.accuracy == accuracy_score(truth, probability[valid].argmax(1))
    assert scores.auc.shape == (classes,)
    for index, auc in enumerate(scores.auc):
        if len(set(truth == index)) == 2:
            assert auc == roc_auc_score(truth == index, probability[valid, index])
        else:
            assert math.isnan(auc)


def test_scores_that_are_no_numbers_have_no_accuracy() -> None:
    probability = np.array([[0.2, 0.8], [math.nan, math.nan], [0.9, 0.1]])
    scores = accuracy_and_auc(np.array([1, 0, 0]), probability)
    assert math.isnan(scores.accuracy)
    assert np.isnan(scores.auc).all()
    assert accuracy_and_auc(np.array([1, IGNORE, 0]), probability).accuracy == 1


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 4))
def test_calibration_agrees_with_sklearn(seed: int, pixels: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    # Some lie on the very edges of bins.
    edges = np.linspace(0, 1, CONFIDENCE_BINS + 1)
    confidence = np.where(rng.random(pixels) < 0.3, rng.choice(edges, pixels), rng.random(pixels))
    right = rng.random(pixels) < confidence
    seen = Calibration()
    for part in np.array_split(np.arange(pixels), parts):
        seen.update(confidence[part], right[part])
    held = seen.bins[seen.bins[:, 0] > 0]
    if right.any() and not right.all():  # sklearn asks for both
        accuracy, mean = calibration_curve(right, confidence, n_bins=CONFIDENCE_BINS)
        np.testing.assert_allclose(held[:, 2] / held[:, 0], accuracy)
        np.testing.assert_allclose(held[:, 1] / held[:, 0], mean)
    by_hand = np.abs(held[:, 2] - held[:, 1]).sum() / pixels
    assert expected_calibration_error(seen.bins) == pytest.approx(by_hand)


def test_images_of_many_pixels_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    target, prediction = rng.integers(0, 3, (2, 37, 11))
    whole = Confusion(3)
    whole.update(prediction, target)
    monkeypatch.setattr("pathoseg.models.metrics._CHUNK", 7)
    parts = Confusion(3)
    parts.update(prediction, target)
    assert np.array_equal(parts.matrix, whole.matrix)
    assert parts.matrix.sum() == target.size
