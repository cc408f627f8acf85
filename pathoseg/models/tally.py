"""Counts of evaluated slides, the figures that follow from them, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pathoseg.models.boundary_f1 import boundary_f1
from pathoseg.models.metrics import (
    Counts,
    Figures,
    dice,
    expected_calibration_error,
    iou,
    mean_of_present,
    precision,
    recall,
)
from pathoseg.models.object_metrics import OBJECT_NUMBERS, object_figures

FEWEST_PATIENTS = 3
RESAMPLES = 2000
_TAILS = 0.025, 0.975


@dataclass(frozen=True)
class Tally:
    """Counts over the pixels of a slide, or of several along leading axes.

    Attributes:
        confusion: (..., classes, classes), see `Confusion`.
        calibration: (..., bins, 3), see `Calibration`.
        boundary: (..., classes - 1, 4), see `BoundaryCounts`; None where tiles are classified.
        objects: (..., classes, 8), see `ObjectCounts.counters`; None unless objects are separated.
    """

    confusion: Counts
    calibration: Figures
    boundary: Counts | None
    objects: Figures | None = None

    @classmethod
    def stacked(cls, tallies: Sequence[Self]) -> Self:
        """All of them along a new first axis."""
        return cls(
            np.stack([each.confusion for each in tallies]),
            np.stack([each.calibration for each in tallies]),
            _stacked([each.boundary for each in tallies]),
            _stacked([each.objects for each in tallies]),
        )

    def weighted(self, weights: NDArray[np.integer]) -> Tally:
        """Sums over the first axis (n): (sums, n) weights give counts of shape (sums, …)."""

        def summed(counts: Counts) -> Counts:
            return np.tensordot(weights, counts, axes=1)

        objects = None if self.objects is None else summed(self.objects)
        boundary = None if self.boundary is None else summed(self.boundary)
        return Tally(summed(self.confusion), summed(self.calibration), boundary, objects)

    @property
    def pixels(self) -> int:
        """Pixels, or tiles, that were compared."""
        return int(self.confusion.sum())

    @property
    def object_numbers(self) -> NDArray[np.int64] | None:
        """Numbers of true and of predicted objects, (classes, 2), first of all; or None."""
        if self.objects is None:
            return None
        return self.objects[:, OBJECT_NUMBERS].astype(np.int64)

    def figures(self, names: Sequence[str]) -> dict[str, Figures]:
        """Every figure by name, of the shape of the leading axes.

        Args:
            names: The foreground classes.
        """

        def by_class(measure: str, values: Figures) -> dict[str, Figures]:
            return {f"{measure}_{name}": values[..., at] for at, name in enumerate(names)}

        overlap, union = dice(self.confusion), iou(self.confusion)
        figures = {"dice_mean": mean_of_present(overlap), "iou_mean": mean_of_present(union)}
        figures |= by_class("dice", overlap) | by_class("iou", union)
        figures |= by_class("precision", precision(self.confusion))
        figures |= by_class("recall", recall(self.confusion))
        if self.boundary is not None:
            score = boundary_f1(self.boundary)
            figures["boundary_f1_mean"] = mean_of_present(score)
            figures |= by_class("boundary_f1", score)
        if self.objects is not None:
            for measure, values in object_figures(self.objects).items():
                figures[f"{measure}_all"] = values[..., 0]
                figures |= by_class(measure, values[..., 1:])
        return {**figures, "ece": expected_calibration_error(self.calibration)}


def _stacked(parts: Sequence[Counts | None]) -> Counts | None:
    present = [part for part in parts if part is not None]
    return np.stack(present) if len(present) == len(parts) else None


class Figure(NamedTuple):
    """A figure and the interval that holds it with 95 %; nan where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def pooled_figures(
    tallies: Sequence[Tally], patients: Sequence[str], names: Sequence[str], seed: int
) -> dict[str, Figure]:
    """Figures over the pixels of all slides, with intervals by a bootstrap over patients.

    Patients are drawn with replacement, each with all of their slides (the cluster bootstrap;
    Field & Welsh, "Bootstrapping clustered data", J. R. Stat. Soc. B 69, 2007), and the interval
    reaches from the 2.5th to the 97.5th percentile of the figures of 2,000 such draws. Draws in
    which a figure does not exist (no pixel of the class) are left out of its interval.

    Args:
        tallies: One a slide.
        patients: Whose each slide is; with fewer than three there are no intervals.
        names: The foreground classes.
        seed: Of the draws.
    """
    stacked, owners = Tally.stacked(tallies), sorted(set(patients))
    value = {
        name: float(figure[0])
        for name, figure in stacked.weighted(np.ones((1, len(tallies)), np.int64))
        .figures(names)
        .items()
    }
    if len(owners) < FEWEST_PATIENTS:
        return {name: Figure(figure) for name, figure in value.items()}
    belongs = np.array([[owner == patient for patient in patients] for owner in owners], np.int64)
    shares = np.full(len(owners), 1 / len(owners))
    draws = np.random.default_rng(seed).multinomial(len(owners), shares, RESAMPLES)
    drawn = stacked.weighted(belongs).weighted(draws).figures(names)
    return {name: Figure(value[name], *_interval(drawn[name])) for name in value}


def _interval(draws: Figures) -> tuple[float, float]:
    present = draws[~np.isnan(draws)]
    if not present.size:
        return math.nan, math.nan
    low, high = np.quantile(present, _TAILS)
    return float(low), float(high)
