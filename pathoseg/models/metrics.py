"""How good predictions are: Dice and IoU from one confusion matrix, accuracy, AUC."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pathoseg.models.losses import IGNORE

Indices = NDArray[np.integer]


class Confusion:
    """Counts of pixels by true and predicted class; everything else follows from them.

    Attributes:
        matrix: (classes, classes) int64, `matrix[truth, prediction]`.
    """

    def __init__(self, classes: int) -> None:
        self.matrix: NDArray[np.int64] = np.zeros((classes, classes), dtype=np.int64)

    def update(self, prediction: Indices, target: Indices) -> None:
        """Adds pixels, leaving out those whose target is 255.

        Args:
            prediction: Class indices of any shape.
            target: Of the same shape.

        Raises:
            ValueError: The shapes differ or an index is no class.
        """
        if prediction.shape != target.shape:
            raise ValueError(f"prediction {prediction.shape} and target {target.shape} differ")
        classes = len(self.matrix)
        valid = target != IGNORE
        truth, guess = target[valid].astype(np.int64), prediction[valid].astype(np.int64)
        for indices in (truth, guess):
            if indices.size and not 0 <= indices.min() <= indices.max() < classes:
                raise ValueError(f"class indices outside 0…{classes - 1}")
        counts = np.bincount(truth * classes + guess, minlength=classes**2)
        self.matrix += counts.reshape(classes, classes)

    def merge(self, other: Confusion) -> None:
        """Adds the counts of `other`, as if its pixels had been seen here."""
        self.matrix += other.matrix

    @property
    def dice(self) -> NDArray[np.float64]:
        """Dice of each foreground class; nan where neither truth nor prediction holds it."""
        hits, either = self._foreground()
        return _ratio(2 * hits, either)

    @property
    def iou(self) -> NDArray[np.float64]:
        """Intersection over union of each foreground class; nan as in `dice`."""
        hits, either = self._foreground()
        return _ratio(hits, either - hits)

    @property
    def mean_dice(self) -> float:
        """Mean over the foreground classes that truth or prediction holds; nan without any."""
        return _mean(self.dice)

    @property
    def mean_iou(self) -> float:
        """As `mean_dice`."""
        return _mean(self.iou)

    def _foreground(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        either = self.matrix.sum(axis=0) + self.matrix.sum(axis=1)
        return np.diagonal(self.matrix)[1:], either[1:]


class TileScores(NamedTuple):
    """How well tiles are classified; `auc` holds one number a class, background first."""

    accuracy: float
    auc: NDArray[np.float64]


def accuracy_and_auc(target: Indices, probability: NDArray[np.floating]) -> TileScores:
    """Accuracy of the likeliest class, and each class's area under the ROC curve against the rest.

    Args:
        target: True classes (n,); 255 is left out.
        probability: (n, classes), or any scores that order the tiles.

    Returns:
        Both; accuracy is nan without tiles, a class's AUC where all or none are of that class.
    """
    from sklearn.metrics import roc_auc_score  # a second to import, and only tiles ask for it

    valid = target != IGNORE
    truth, scores = target[valid], probability[valid]
    auc = np.full(probability.shape[1], math.nan)
    for index in range(len(auc)):
        positive = truth == index
        if positive.any() and not positive.all():
            auc[index] = roc_auc_score(positive, scores[:, index])
    accuracy = float((scores.argmax(axis=1) == truth).mean()) if truth.size else math.nan
    return TileScores(accuracy, auc)


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    ratio = np.full(len(whole), math.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _mean(values: NDArray[np.float64]) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else math.nan
