"""Chooses policies greedily, by seconds saved for a byte: the integer program's rival."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from typing import NamedTuple

from pathoseg.parallel.retention.policy_milp import arrangements, earliest_first, windows
from pathoseg.parallel.retention.policy_options import (
    MOST_UNITS,
    AllowedPolicies,
    PolicyOption,
    options_of,
    retain,
)
from pathoseg.parallel.retention.policy_search import Choice, Chooser
from pathoseg.parallel.retention.stage_liveness import BlockRun, StageFacts, runs_of
from pathoseg.parallel.schedule.costs import Link

# What is tried: seconds that a second of copies counts for (None: no copies), staging buffers in
# sizes of the largest copied layer, and the most that a backward may hold beyond what is kept, as
# shares of the cap.
_PRICES = (None, 0.0, 0.25, 0.5, 0.75, 1.0)
_BUFFERS = (1, 2, 4)
_BEYOND = (1.0, 0.7, 0.5, 0.35, 0.25, 0.17, 0.12, 0.08, 0.05)
_ATTEMPTS = 4

_FILLED = 6  # of the fastest, whose spare room is filled

# Of each run, by option, how often it is taken.
_Counts = list[dict[int, int]]


class _Setting(NamedTuple):
    """The price of a copied second, the staging buffer, and the bytes beyond what is kept."""

    price: float | None
    buffers: int
    beyond: int


class _Step(NamedTuple):
    """One more block of a run goes from one option of its hull to the next."""

    slope: float  # seconds for a byte
    run: int
    at: int  # the option on the hull that is left
    blocks: int  # that have left it


class Greedy:
    """Chooses for one stage: all is kept, then blocks give way in the order of seconds per byte.

    Of each run of equal blocks only the options on the lower convex hull (bytes kept, seconds) are
    used, from everything kept to the least; steps along the hulls of all runs are taken by their
    slope until the stage fits. That is done for several prices of a copied second, sizes of the
    staging buffer and limits of what a backward may hold at once; the fastest in the simulation
    wins. What is left of the cap is used by whole options that fit it and are faster.

    Args:
        facts: The stage.
        host: Time of copies in each direction.
        ways: The policies allowed.
        judge: Simulates a choice.
    """

    def __init__(
        self, facts: StageFacts, host: Link, ways: AllowedPolicies, judge: Chooser
    ) -> None:
        self._facts, self._judge, self._ways = facts, judge, ways
        self._runs: list[BlockRun] = runs_of(facts, MOST_UNITS)
        self._options = [earliest_first(options_of(facts, run, host, ways)) for run in self._runs]
        self._known: dict[Hashable, list[Choice]] = {}
        self._seconds: dict[Hashable, float] = {}

    def choose(self, cap: int, in_flight: int = 1) -> Choice | None:
        """Return the fastest choice that fits into `cap` bytes, or None."""
        found: list[tuple[float, _Setting]] = []
        best, fastest = None, inf
        for price, buffers, beyond in product(_PRICES, _BUFFERS, _BEYOND):
            if buffers > 1 if price is None else not self._ways.offload:
                continue
            setting = _Setting(price, buffers, int(beyond * cap))
            choice, seconds = self._timed(setting, cap, in_flight, fill=False)
            if choice is not None:
                found.append((seconds, setting))
                if seconds < fastest:
                    best, fastest = choice, seconds
        for _, setting in sorted(found, key=lambda each: each[0])[:_FILLED]:
            choice, seconds = self._timed(setting, cap, in_flight, fill=True)
            if seconds < fastest:
                best, fastest = choice, seconds
        return best

    def _timed(
        self, setting: _Setting, cap: int, in_flight: int, fill: bool
    ) -> tuple[Choice | None, float]:
        choice = self._fitting(setting, cap, in_flight, fill)
        if choice is None:
            return None, inf
        key = choice.policy, choice.window, in_flight
        if key not in self._seconds:
            self._seconds[key] = self._judge.seconds(choice, in_flight)
        return choice, self._seconds[key]

    def _fitting(self, setting: _Setting, cap: int, in_flight: int, fill: bool) -> Choice | None:
        room = cap
        for _ in range(_ATTEMPTS):
            counts = self._counts(setting, room, in_flight, fill)
            if counts is None:
                return None
            choices = self._choices(counts, setting.buffers)
            missing = min(choice.need(in_flight) for choice in choices) - cap
            if missing <= 0:
                choice = next(each for each in choices if each.need(in_flight) <= cap)
                spare = cap - choice.need(in_flight)
                wider = min(
                    choice.window + spare // windows(in_flight),
                    choice.retained.offloaded * in_flight,
                )
                return replace(choice, window=max(choice.window, wider))
            room -= missing
        return None

    def _choices(self, counts: _Counts, buffers: int) -> list[Choice]:
        key = tuple(tuple(sorted(own.items())) for own in counts), buffers
        if key not in self._known:
            window = buffers * self._largest(counts)
            numbers = [
                [own.get(at, 0) for at in range(len(options))]
                for own, options in zip(counts, self._options, strict=True)
            ]
            self._known[key] = [
                Choice(policy, window, retain(self._facts, policy))
                for policy in arrangements(self._facts, self._runs, self._options, numbers)
            ]
        return self._known[key]

    def _counts(self, setting: _Setting, room: int, in_flight: int, fill: bool) -> _Counts | None:
        price, buffers, beyond = setting
        allowed = [
            [
                at
                for at, each in enumerate(options)
                if (price is not None or not each.largest) and each.peak - each.kept <= beyond
            ]
            for options in self._options
        ]
        if not all(
            any(options[at].blocks == 1 for at in own)
            for options, own in zip(self._options, allowed, strict=True)
        ):
            return None
        hulls = [
            self._hull(options, own, price or 0.0)
            for options, own in zip(self._options, allowed, strict=True)
        ]
        steps = sorted(
            step for run, hull in enumerate(hulls) for step in self._steps(run, hull, price or 0.0)
        )

        def need(taken: int) -> int:
            return self._need(self._taken(hulls, steps[:taken]), buffers, in_flight)

        fewest = bisect_left(range(len(steps) + 1), True, key=lambda taken: need(taken) <= room)
        if fewest > len(steps):
            return None
        counts = self._taken(hulls, steps[:fewest])
        if fill:
            self._fill(counts, allowed, setting, room, in_flight)
        return counts

    def _hull(self, options: Sequence[PolicyOption], own: Sequence[int], price: float) -> list[int]:
        """Return the options on the lower convex hull of a block, from most bytes to least."""

        def point(at: int) -> tuple[float, float]:
            each = options[at]
            return each.kept / each.blocks, (
                each.recompute_seconds + price * each.copies
            ) / each.blocks

        hull: list[int] = []
        singles = [at for at in own if options[at].blocks == 1] or [*own]
        start = min(singles, key=lambda at: (point(at)[1], point(at)[0]))
        for at in sorted(own, key=lambda at: (-point(at)[0], point(at)[1])):
            kept, seconds = point(at)
            if at != start and (kept >= point(start)[0] or seconds <= point(start)[1]):
                continue
            while len(hull) > 1:
                (k0, s0), (k1, s1) = point(hull[-2]), point(hull[-1])
                if (s1 - s0) * (k0 - kept) < (seconds - s0) * (k0 - k1):
                    break
                hull.pop()
            if hull and kept >= point(hull[-1])[0]:
                continue
            hull.append(at)
        return hull

    def _steps(self, run: int, hull: Sequence[int], price: float) -> Iterator[_Step]:
        options = [self._options[run][at] for at in hull]
        for at, (one, two) in enumerate(pairwise(options)):
            freed = one.kept / one.blocks - two.kept / two.blocks
            added = (two.recompute_seconds + price * two.copies) / two.blocks
            added -= (one.recompute_seconds + price * one.copies) / one.blocks
            for blocks in range(two.blocks, len(self._runs[run].blocks) + 1, two.blocks):
                yield _Step(added / freed, run, at, blocks)

    def _taken(self, hulls: Sequence[Sequence[int]], steps: Sequence[_Step]) -> _Counts:
        last = {step.run: step for step in steps}
        counts: _Counts = []
        for run, hull in enumerate(hulls):
            options = self._options[run]
            own: dict[int, int] = {}
            left = len(self._runs[run].blocks)
            step = last.get(run)
            if step is not None:
                following = hull[step.at + 1]
                own[following] = step.blocks // options[following].blocks
                left -= own[following] * options[following].blocks
            for at in reversed(hull[: step.at + 1 if step else 1]):
                more, left = divmod(left, options[at].blocks)
                if more:
                    own[at] = more
            assert not left
            counts.append(own)
        return counts

    def _need(self, counts: _Counts, buffers: int, in_flight: int) -> int:
        before = most = 0
        for options, own in zip(self._options, counts, strict=True):
            for at in sorted(own):  # as `earliest_first` has them
                option, count = options[at], own[at]
                most = max(most, before + (count - 1) * option.kept + option.peak)
                before += count * option.kept
        held = most + (in_flight - 1) * before
        return held + windows(in_flight) * buffers * self._largest(counts)

    def _largest(self, counts: _Counts) -> int:
        return max(
            options[at].largest
            for options, own in zip(self._options, counts, strict=True)
            for at in own
        )

    def _fill(
        self,
        counts: _Counts,
        allowed: Sequence[Sequence[int]],
        setting: _Setting,
        room: int,
        in_flight: int,
    ) -> None:
        """Exchange options for faster ones while the stage still fits, the largest gain first."""
        price = setting.price or 0.0
        gains = sorted(
            (
                (
                    one.recompute_seconds
                    - two.recompute_seconds
                    + price * (one.copies - two.copies),
                    run,
                    at,
                    other,
                )
                for run, (options, own) in enumerate(zip(self._options, counts, strict=True))
                for at in own
                for other in allowed[run]
                for one, two in [(options[at], options[other])]
                if one.blocks == two.blocks
            ),
            reverse=True,
        )
        for gain, run, at, other in gains:
            own = counts[run]
            while gain > 0 and own.get(at):
                own[at] -= 1
                own[other] = own.get(other, 0) + 1
                kept = {each: count for each, count in own.items() if count}
                tried = [*counts[:run], kept, *counts[run + 1 :]]
                if self._need(tried, setting.buffers, in_flight) <= room:
                    continue
                own[at] += 1
                own[other] -= 1
                break
            counts[run] = {each: count for each, count in own.items() if count}
