"""The order in which equal blocks have their patterns, and the retention that comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pathoseg.parallel.graph.activation_policy import Retention
from pathoseg.parallel.retention.blocks import Run
from pathoseg.parallel.retention.policy_options import Pattern
from pathoseg.parallel.retention.stage_liveness import StageFacts


def earliest_first(patterns: Sequence[Pattern]) -> list[Pattern]:
    """The order in which patterns of equal blocks need least memory (Liu, "An application of
    generalized tree pebbling to sparse matrix factorization", 1987)."""
    return sorted(patterns, key=lambda each: each.kept - each.peak)


def arrangements(
    facts: StageFacts,
    runs: Sequence[Run],
    patterns: Sequence[Sequence[Pattern]],
    counts: Sequence[Sequence[int]],
) -> Iterator[Retention]:
    """Retentions in which each pattern is taken so often.

    First the one in which those of a run take turns, as copies hide best; then the one that needs
    least memory.

    Args:
        facts: The stage.
        runs: Its equal blocks.
        patterns: Of each run, as `earliest_first` has them.
        counts: How often each pattern is taken.
    """
    for smooth in (True, False):
        offloaded: list[int] = []
        recomputed: list[int] = []
        twice: list[int] = []
        for run, some, numbers in zip(runs, patterns, counts, strict=True):
            blocks = iter(run.blocks)
            for pattern in _in_turn(some, numbers) if smooth else _in_order(some, numbers):
                first = next(blocks).layers.start
                for _ in range(1, pattern.blocks):
                    next(blocks)
                offloaded += [first + at for at in pattern.offloaded]
                recomputed += [first + at for at in pattern.recomputed]
                twice += [first + at for at in pattern.twice]
        names = [
            tuple(facts.graph.layers[at].name for at in sorted(some))
            for some in (offloaded, recomputed, twice)
        ]
        yield Retention(*names)


def _in_order(patterns: Sequence[Pattern], numbers: Sequence[int]) -> list[Pattern]:
    return [each for each, number in zip(patterns, numbers, strict=True) for _ in range(number)]


def _in_turn(patterns: Sequence[Pattern], numbers: Sequence[int]) -> list[Pattern]:
    """Each spread evenly over the run."""
    places = [
        ((place + 0.5) / number, at) for at, number in enumerate(numbers) for place in range(number)
    ]
    return [patterns[at] for _, at in sorted(places)]
