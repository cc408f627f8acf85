"""Measures of predictions: overlap from a confusion matrix, calibration, accuracy and AUC."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathoseg.models.losses import IGNORE

Indices = NDArray[np.integer]
Counts = NDArray[Any]  # whole numbers, of an integer type or float64
Figures = NDArray[np.float64]


_CHUNK = 2**20  # pixels counted at a time: what that takes does not grow with the image


class Confusion:
    """Counts of pixels by true and predicted class.

    Attributes:
        matrix: (classes, classes) int64, `matrix[truth, prediction]`.
    """

    def __init__(self, classes: int) -> None:
        self.matrix: NDArray[np.int64] = np.zeros((classes, classes), dtype=np.int64)

    def update(self, prediction: Indices, target: Indices) -> None:
        """Add pixels, leaving out those whose target is 255.

        Args:
            prediction: Class indices of any shape; of no meaning where the target is 255.
            target: Of the same shape.

        Raises:
            ValueError: The shapes differ or an index is no class.
        """
        if prediction.shape != target.shape:
            raise ValueError(f"prediction {prediction.shape} and target {target.shape} differ")
        flat = prediction.reshape(-1), target.reshape(-1)
        for start in range(0, target.size, _CHUNK):
            self._count(*(each[start : start + _CHUNK] for each in flat))

    def _count(self, prediction: Indices, target: Indices) -> None:
        classes = len(self.matrix)
        valid = target != IGNORE
        truth, guess = target[valid].astype(np.int64), prediction[valid].astype(np.int64)
        for indices in (truth, guess):
            if indices.size and not 0 <= indices.min() <= indices.max() < classes:
                raise ValueError(f"class indices outside 0…{classes - 1}")
        counts = np.bincount(truth * classes + guess, minlength=classes**2)
        self.matrix += counts.reshape(classes, classes)

    def merge(self, other: Confusion) -> None:
        """Add the counts of `other`, as if its pixels had been seen here."""
        self.matrix += other.matrix


# The following take matrices (..., classes, classes) of any number of leading axes, [truth,
# prediction], and return a figure for each foreground class, (..., classes - 1).


def dice(matrix: Counts) -> Figures:
    """Dice 2TP / (2TP + FP + FN); nan where neither truth nor prediction holds the class."""
    hits, predicted, true = _margins(matrix)
    return ratio(2 * hits, predicted + true)


def iou(matrix: Counts) -> Figures:
    """Intersection over union TP / (TP + FP + FN); nan as in `dice`."""
    hits, predicted, true = _margins(matrix)
    return ratio(hits, predicted + true - hits)


def precision(matrix: Counts) -> Figures:
    """Share TP / (TP + FP) of what is predicted as the class; nan where nothing is."""
    hits, predicted, _ = _margins(matrix)
    return ratio(hits, predicted)


def recall(matrix: Counts) -> Figures:
    """Share TP / (TP + FN) of what is truly of the class; nan where nothing is."""
    hits, _, true = _margins(matrix)
    return ratio(hits, true)


def _margins(matrix: Counts) -> tuple[Counts, Counts, Counts]:
    """Hits, predicted and true pixels of each foreground class."""
    hits = np.diagonal(matrix, axis1=-2, axis2=-1)
    return hits[..., 1:], matrix.sum(axis=-2)[..., 1:], matrix.sum(axis=-1)[..., 1:]


def mean_of_present(figures: Figures) -> Figures:
    """Mean over the last axis without nan, shape (...); nan where nothing else is there."""
    present = ~np.isnan(figures)
    return ratio(np.where(present, figures, 0).sum(axis=-1), present.sum(axis=-1))


CONFIDENCE_BINS = 15


class Calibration:
    """Calibration of a model: accuracy against confidence, over pixels.

    Confidence is the probability of the predicted class, in bins of equal width that hold their
    upper edge (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017).

    Attributes:
        bins: (15, 3) float64: pixels, the sum of their confidence, and how many are right.
    """

    def __init__(self) -> None:
        self.bins: Figures = np.zeros((CONFIDENCE_BINS, 3))

    def update(self, confidence: NDArray[np.floating], right: NDArray[np.bool_]) -> None:
        """Add pixels.

        Args:
            confidence: Shape (n,), in 0…1.
            right: Shape (n,), whether the predicted class is the true one.
        """
        edges = np.linspace(0, 1, CONFIDENCE_BINS + 1)[1:-1]
        for start in range(0, confidence.size, _CHUNK):
            sure, hit = confidence[start : start + _CHUNK], right[start : start + _CHUNK]
            at = np.searchsorted(edges, sure)
            for column, weights in enumerate((None, sure, hit)):
                self.bins[:, column] += np.bincount(at, weights, CONFIDENCE_BINS)


def expected_calibration_error(bins: Figures) -> Figures:
    """Mean |accuracy − confidence| over bins, weighted by their pixels; nan without pixels.

    Args:
        bins: (..., bins, 3), as in `Calibration`.

    Returns:
        Shape (...).
    """
    pixels, confidence, right = np.moveaxis(bins, -1, 0)
    return ratio(np.abs(right - confidence).sum(axis=-1), pixels.sum(axis=-1))


class TileScores(NamedTuple):
    """Scores of tile classification; `auc` holds one number a class, background first."""

    accuracy: float
    auc: NDArray[np.float64]


def accuracy_and_auc(target: Indices, probability: NDArray[np.floating]) -> TileScores:
    """Accuracy of the likeliest class, and each class's area under the ROC curve against the rest.

    Args:
        target: True classes (n,); 255 is left out.
        probability: (n, classes), or any scores that order the tiles.

    Returns:
        Both; accuracy is nan without tiles, a class's AUC where all or none are of that class; both
        where a score is no number, as of a model that has diverged.
    """
    from sklearn.metrics import roc_auc_score  # a second to import, and only tiles ask for it

    valid = target != IGNORE
    truth, scores = target[valid], probability[valid]
    auc = np.full(probability.shape[1], math.nan)
    if not np.isfinite(scores).all():
        return TileScores(math.nan, auc)
    for index in range(len(auc)):
        positive = truth == index
        if positive.any() and not positive.all():
            auc[index] = roc_auc_score(positive, scores[:, index])
    accuracy = float((scores.argmax(axis=1) == truth).mean()) if truth.size else math.nan
    return TileScores(accuracy, auc)


def ratio(part: NDArray[Any], whole: NDArray[Any]) -> Figures:
    """`part` over `whole`, of one shape; nan where `whole` is 0."""
    share = np.full(np.shape(whole), math.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share
