"""The tasks of a model, segment or classify: targets, and the judge of predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.annotations.annotation import ClassTable
from pathoseg.models.metrics import Confusion, TileScores, accuracy_and_auc
from pathoseg.tiles.class_pixels import class_counts
from pathoseg.tiles.tiles import tile_labels

# Plain numbers in lists, by name.
Seen = Mapping[str, list[Any]]


class Judge(Protocol):
    """Accumulates predictions of a validation, and computes figures of them."""

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None: ...
    def seen(self) -> Seen:
        """The counts so far, as plain lists for JSON."""
        ...

    def merge(self, seen: Seen) -> None:
        """Add the counts that another judge has `seen`."""
        ...

    def figures(self) -> dict[str, float]: ...
    def score(self) -> float:
        """The score by which epochs are compared; higher is better."""
        ...


class Task(Protocol):
    """The kind of answer that a model gives: a class for each pixel, or one for each tile."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of the judge's figures beyond the fixed columns of metrics.csv."""
        ...

    def targets(self, masks: NDArray[np.uint8]) -> NDArray[np.integer]:
        """Return the targets of the loss, from masks (n, h, w) of class indices, 255 ignored."""
        ...

    def judge(self) -> Judge: ...


def make_task(kind: Literal["segment", "classify"], classes: ClassTable, min_cover: float) -> Task:
    return _Segment(classes) if kind == "segment" else _Classify(classes, min_cover)


class _Segment:
    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes
        self.columns = [f"val_{what}_{name}" for what in ("dice", "iou") for name in classes.names]

    def targets(self, masks: NDArray[np.uint8]) -> NDArray[np.integer]:
        return masks

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
        seen = self._confusion
        figures = {"val_dice_mean": seen.mean_dice, "val_iou_mean": seen.mean_iou}
        for name, dice, iou in zip(self._classes.names, seen.dice, seen.iou, strict=True):
            figures[f"val_dice_{name}"] = float(dice)
            figures[f"val_iou_{name}"] = float(iou)
        return figures

    def score(self) -> float:
        mean = self._confusion.mean_dice
        return -math.inf if math.isnan(mean) else mean


class _Classify:
    def __init__(self, classes: ClassTable, min_cover: float) -> None:
        self._classes, self._min_cover = classes, min_cover
        self.columns = ["val_accuracy", *(f"val_auc_{name}" for name in classes.names)]

    def targets(self, masks: NDArray[np.uint8]) -> NDArray[np.integer]:
        return tile_labels(class_counts(masks, len(self._classes)), self._min_cover)

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

    def score(self) -> float:
        accuracy = self._scores().accuracy
        return -math.inf if math.isnan(accuracy) else accuracy

    def _scores(self) -> TileScores:
        return accuracy_and_auc(np.concatenate(self._labels), np.concatenate(self._chances))
