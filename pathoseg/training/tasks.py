"""The tasks of a model, segment, classify or objects: targets, and the judge of predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import IGNORE, ClassTable
from pathoseg.device import widest
from pathoseg.models.metrics import (
    Confusion,
    Counts,
    Figures,
    TileScores,
    accuracy_and_auc,
    dice,
    iou,
    mean_of_present,
)
from pathoseg.tiles.class_pixels import class_counts
from pathoseg.tiles.dataset import LabelPlanes
from pathoseg.tiles.tiles import tile_labels

# Plain numbers in lists, by name.
Seen = Mapping[str, list[Any]]


class Judge(Protocol):
    """Accumulator of the predictions of a validation, which computes figures of them."""

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Count the predictions of a batch.

        Args:
            logits: As the network returns them, floating point: (n, classes, h, w); with objects
                (n, classes + 1, h, w), the last channel being the height; of tiles (n, classes).
            targets: As `Task.targets` returns them without a context; 255 is not counted.
        """
        ...

    def seen(self) -> Seen:
        """The counts so far, as plain lists for JSON."""
        ...

    def merge(self, seen: Seen) -> None:
        """Add the counts that another judge has `seen`."""
        ...

    def figures(self) -> dict[str, float]: ...
    def confusion(self) -> NDArray[np.int64]:
        """Numbers of pixels, or tiles, by truth and prediction, shape (classes, classes)."""
        ...

    def score(self) -> float:
        """The score by which epochs are compared: higher is better, -inf where none was judged."""
        ...


class Task(Protocol):
    """The kind of answer that a model gives: a class for each pixel or tile, or objects."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of the judge's figures beyond the fixed columns of metrics.csv."""
        ...

    def targets(self, labels: LabelPlanes) -> NDArray[Any]:
        """Return the targets of the loss for a batch.

        Args:
            labels: Of n tiles of h × w pixels.

        Returns:
            Classes of pixels: (n, h, w), uint8. With objects (n, 2, h, w), float32: class, and
            height in pixels (-1 where it is not known). Of tiles (n,), int64. Where labels of a
            context are known its classes are one more plane of pixels, the last. A class of 255 is
            not known.
        """
        ...

    def judge(self) -> Judge: ...


_MEAN_DICE = (
    "the mean Dice of the classes that validation tiles show (val_dice_mean in metrics.csv), each "
    "counted over the pixels of all these tiles together"
)
# `Judge.score` in words, by the kind of task.
SCORES: Mapping[str, str] = {
    "segment": _MEAN_DICE,
    "objects": f"{_MEAN_DICE}, less a tenth of the mean error of heights in pixels "
    "(val_height_error)",
    "classify": "the accuracy (val_accuracy in metrics.csv), the share of the validation tiles "
    "whose most probable class is theirs",
}


def make_task(
    kind: Literal["segment", "classify", "objects"], classes: ClassTable, min_cover: float
) -> Task:
    if kind == "classify":
        return _Classify(classes, min_cover)
    return _Segment(classes) if kind == "segment" else _ObjectTask(classes)


class _Segment:
    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes
        self.columns = [f"val_{what}_{name}" for what in ("dice", "iou") for name in classes.names]

    def targets(self, labels: LabelPlanes) -> NDArray[Any]:
        if labels.around is None:
            return labels.masks
        return np.stack([labels.masks, labels.around], axis=1)

    def judge(self) -> Judge:
        return _SegmentJudge(self._classes)


class _SegmentJudge:
    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes
        self._confusion = Confusion(len(classes))

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self._confusion.update(logits.argmax(1).cpu().numpy(), targets.cpu().numpy())

    def seen(self) -> Seen:
        return {"confusion": self._confusion.matrix.tolist()}

    def merge(self, seen: Seen) -> None:
        self._confusion.matrix += np.array(seen["confusion"], np.int64)

    def figures(self) -> dict[str, float]:
        dices, ious = self._measured(dice), self._measured(iou)
        figures = {
            "val_dice_mean": float(mean_of_present(dices)),
            "val_iou_mean": float(mean_of_present(ious)),
        }
        for name, of_dice, of_iou in zip(self._classes.names, dices, ious, strict=True):
            figures[f"val_dice_{name}"] = float(of_dice)
            figures[f"val_iou_{name}"] = float(of_iou)
        return figures

    def confusion(self) -> NDArray[np.int64]:
        return self._confusion.matrix

    def score(self) -> float:
        score = float(mean_of_present(self._measured(dice)))
        return -math.inf if math.isnan(score) else score

    def _measured(self, figure: Callable[[Counts], Figures]) -> Figures:
        """Return a figure of each class; nan where no validation tile shows the class.

        Of such a class there are false positives alone: its Dice would be 0 from the first one on,
        and the best epoch one that never predicts it.
        """
        matrix = self._confusion.matrix
        return np.where(matrix[1:].any(axis=1), figure(matrix), math.nan)


class _ObjectTask:
    """Targets are the class and the height: the distance to the object's edge."""

    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes
        self.columns = [*_Segment(classes).columns, "val_height_error"]

    def targets(self, labels: LabelPlanes) -> NDArray[Any]:
        assert labels.objects is not None
        heights = np.stack([object_height(each) for each in labels.objects])
        planes: list[NDArray[Any]] = [labels.masks, heights]
        if labels.around is not None:
            planes.append(labels.around)
        return np.stack(planes, axis=1, dtype=np.float32)

    def judge(self) -> Judge:
        return _ObjectJudge(self._classes)


MOST_HEIGHT = 31.0
"""Pixels from an object's edge from which on its height does not rise."""


def object_height(colours: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the distance of each pixel's centre from its object's edge, at most `MOST_HEIGHT`.

    Args:
        colours: Of objects, shape (h, w): 0 is none, 255 unknown, and objects that touch differ.

    Returns:
        Pixels, shape (h, w), 0 outside objects; -1 where an edge may lie nearer in what is unknown
        or beyond the tile.
    """
    height = np.zeros(colours.shape, np.float32)
    for colour in np.unique(colours):
        if 0 < colour < IGNORE:
            own = colours == colour
            inside = (own | (colours == IGNORE)).astype(np.uint8)
            to_edge = cv2.distanceTransform(inside, cv2.DIST_L2, cv2.DIST_MASK_PRECISE) - 0.5
            np.copyto(height, to_edge.clip(max=MOST_HEIGHT), where=own)
    known = np.pad((colours != IGNORE).astype(np.uint8), 1)
    seen = cv2.distanceTransform(known, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1] - 0.5
    height[height > seen] = -1
    height[colours == IGNORE] = -1
    return height


class _ObjectJudge:
    """Judges classes as `_SegmentJudge`, and heights by their error inside objects."""

    def __init__(self, classes: ClassTable) -> None:
        self._segment = _SegmentJudge(classes)
        self._error, self._pixels = 0.0, 0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self._segment.add(logits[:, :-1], targets[:, 0].to(torch.uint8))
        inside = targets[:, 1] > 0
        error = (logits[:, -1].float() - targets[:, 1]).abs()[inside]
        # In 1/65,536 pixel, so that the sum is exact, whoever adds it in whichever order.
        self._error += float((error.to(widest(error.device)) * 2**16).round_().sum()) / 2**16
        self._pixels += error.numel()

    def seen(self) -> Seen:
        return {**self._segment.seen(), "height": [self._error, self._pixels]}

    def merge(self, seen: Seen) -> None:
        self._segment.merge(seen)
        error, pixels = seen["height"]
        self._error, self._pixels = self._error + error, self._pixels + pixels

    def figures(self) -> dict[str, float]:
        return {**self._segment.figures(), "val_height_error": self._mean_error}

    def confusion(self) -> NDArray[np.int64]:
        return self._segment.confusion()

    def score(self) -> float:
        """Mean Dice minus 0.1 times the mean error of the heights in pixels."""
        if not self._pixels:
            return self._segment.score()
        score = self._segment.score() - 0.1 * self._mean_error
        return score if math.isfinite(score) else -math.inf

    @property
    def _mean_error(self) -> float:
        return self._error / self._pixels if self._pixels else math.nan


class _Classify:
    def __init__(self, classes: ClassTable, min_cover: float) -> None:
        self._classes, self._min_cover = classes, min_cover
        self.columns = ["val_accuracy", *(f"val_auc_{name}" for name in classes.names)]

    def targets(self, labels: LabelPlanes) -> NDArray[Any]:
        return tile_labels(class_counts(labels.masks, len(self._classes)), self._min_cover)

    def judge(self) -> Judge:
        return _ClassifyJudge(self._classes)


class _ClassifyJudge:
    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes
        self._chances: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.int64]] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self._chances.append(logits.float().softmax(1).cpu().numpy())
        self._labels.append(targets.cpu().numpy())

    def seen(self) -> Seen:
        return {
            "chances": [row for chances in self._chances for row in chances.tolist()],
            "labels": [label for labels in self._labels for label in labels.tolist()],
        }

    def merge(self, seen: Seen) -> None:
        chances = np.array(seen["chances"], np.float32)
        self._chances.append(chances.reshape(-1, len(self._classes)))
        self._labels.append(np.array(seen["labels"], np.int64))

    def figures(self) -> dict[str, float]:
        scores = self._scores()
        figures = {"val_accuracy": scores.accuracy}
        for name, auc in zip(self._classes.names, scores.auc[1:], strict=True):
            figures[f"val_auc_{name}"] = float(auc)
        return figures

    def confusion(self) -> NDArray[np.int64]:
        matrix = np.zeros((len(self._classes), len(self._classes)), np.int64)
        for labels, chances in zip(self._labels, self._chances, strict=True):
            known = labels != IGNORE
            np.add.at(matrix, (labels[known], chances[known].argmax(axis=1)), 1)
        return matrix

    def score(self) -> float:
        accuracy = self._scores().accuracy
        return -math.inf if math.isnan(accuracy) else accuracy

    def _scores(self) -> TileScores:
        return accuracy_and_auc(np.concatenate(self._labels), np.concatenate(self._chances))
