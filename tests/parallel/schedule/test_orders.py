"""Tests that the named orders are whole, and cost what their papers' closed forms say."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from pathoseg.parallel.schedule.action import Edge, chain
from pathoseg.parallel.schedule.bidirectional import bidirectional
from pathoseg.parallel.schedule.costs import Costs, StageCost
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.gpipe import gpipe, mp_basic, sequential
from pathoseg.parallel.schedule.lowering import lower
from pathoseg.parallel.schedule.one_f_one_b import one_f_one_b
from pathoseg.parallel.schedule.schedule import Schedule, folded, linear
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.validate import validate

TIMES = [(1, 1), (1, 2), (3, 4), (Fraction(1, 3), Fraction(6, 7)), (0.1, 0.25)]
RANKS = range(2, 10)


def _every_order(ranks: int) -> Iterator[Schedule]:
    yield sequential(ranks)
    for microbatches in (1, ranks, 2 * ranks + 1):
        for placement in (linear(ranks), folded(ranks)):
            yield mp_basic(placement, microbatches)
            yield gpipe(placement, microbatches)
            yield gpipe(placement, microbatches, flush=2)
        yield one_f_one_b(ranks, microbatches)
        yield bidirectional(ranks, microbatches)
    yield gems(ranks)
    yield gems(ranks, pairs=3)
    yield gems(ranks, pairs=2, per_visit=3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_order_passes_the_validator_before_and_after_lowering(ranks: int) -> None:
    for order in _every_order(ranks):
        validate(order)
        skips = (*chain(order.stages), *(Edge(0, far) for far in range(2, order.stages)))
        for lowered in (lower(order), lower(order, skips), lower(order, recompute=range(ranks))):
            validate(lowered)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_without_costs_of_links_lowering_changes_no_time(ranks: int) -> None:
    for order in _every_order(ranks):
        costs = Costs.equal(order.stages, 2, 3)
        bare, lowered = simulate(order, costs), simulate(lower(order), costs)
        assert lowered.time == bare.time
        assert lowered.busy == bare.busy
        assert lowered.peak_activations == bare.peak_activations


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("forward", "backward"), TIMES[:-1])
def test_gems_takes_its_closed_form_to_the_tick(ranks: int, forward: int, backward: int) -> None:
    costs = Costs.equal(ranks, forward, backward)
    for pairs in range(1, 4):
        for per_visit in range(1, 5):
            run = simulate(lower(gems(ranks, pairs, per_visit)), costs)
            visit = (ranks - 1) * backward + per_visit * (forward + backward)
            assert run.time == (ranks - 1) * forward + 2 * pairs * visit


@pytest.mark.parametrize("ranks", RANKS)
def test_gems_holds_the_larger_of_its_two_stages_never_both(ranks: int) -> None:
    sizes = [7 * (stage + 1) ** 2 % 31 + 1 for stage in range(ranks)]
    costs = Costs(tuple(StageCost(1, 2, size, weights=1000 * size) for size in sizes))
    for per_visit in (1, 3):
        run = simulate(gems(ranks, 2, per_visit), costs)
        larger = [max(own, other) for own, other in zip(sizes, reversed(sizes), strict=True)]
        assert run.peak_activations == tuple(per_visit * size for size in larger)
        weights = [1000 * (own + other) for own, other in zip(sizes, reversed(sizes), strict=True)]
        if ranks % 2:  # the rank in the middle has one stage of both replicas, and one copy of it
            weights[ranks // 2] //= 2
        held = zip(weights, run.peak_activations, strict=True)
        assert run.peak_memory == tuple(weight + peak for weight, peak in held)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("forward", "backward"), TIMES)
def test_mp_basic_takes_every_stage_of_every_microbatch_in_turn(
    ranks: int, forward: float, backward: float
) -> None:
    for placement in (linear(ranks), folded(ranks)):
        stages = placement.stages
        for microbatches in (1, 4):
            run = simulate(
                mp_basic(placement, microbatches), Costs.equal(stages, forward, backward)
            )
            assert run.time == pytest.approx(microbatches * stages * (forward + backward))
            assert run.bubble == pytest.approx(1 - 1 / ranks)
            assert set(run.peak_activations) == {stages // ranks}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("forward", "backward"), TIMES[:-1])
def test_gpipe_and_1f1b_have_the_same_bubble_and_their_own_peaks(
    ranks: int, forward: int, backward: int
) -> None:
    costs = Costs.equal(ranks, forward, backward)
    for microbatches in (1, 2, ranks, 3 * ranks):
        fill = simulate(gpipe(linear(ranks), microbatches), costs)
        one = simulate(one_f_one_b(ranks, microbatches), costs)
        total = microbatches + ranks - 1
        assert fill.time == one.time == total * (forward + backward)
        assert fill.bubble == one.bubble == pytest.approx((ranks - 1) / total, abs=1e-15)
        assert fill.peak_activations == (microbatches,) * ranks
        assert one.peak_activations == tuple(
            min(microbatches, ranks - rank) for rank in range(ranks)
        )


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe_in_flushes_holds_one_flush(ranks: int) -> None:
    run = simulate(gpipe(linear(ranks), 12, flush=3), Costs.equal(ranks, 2, 3))
    assert run.peak_activations == (3,) * ranks
    # A flush fills while the one before it drains.
    assert run.time <= 4 * (3 + ranks - 1) * (2 + 3)


@pytest.mark.parametrize("ranks", RANKS)
def test_1f1b_with_recomputation_holds_one_stage_and_what_it_received(ranks: int) -> None:
    microbatches = 2 * ranks
    costs = Costs((StageCost(1, 2, activations=1000),) * ranks, dict.fromkeys(chain(ranks), 1))
    run = simulate(lower(one_f_one_b(ranks, microbatches), recompute=range(ranks)), costs)
    assert run.peak_activations == (1000,) * ranks
    # At most D - r received, a gradient and a message to each side on top.
    assert all(peak <= 1000 + ranks - rank + 4 for rank, peak in enumerate(run.peak_memory))
    assert run.time <= (microbatches + ranks - 1) * (1 + 1 + 2)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_bidirectional_on_even_ranks_takes_its_closed_form_and_holds_d(ranks: int) -> None:
    costs = Costs.equal(ranks, 1, 2)
    for microbatches in (ranks, ranks + 2, 2 * ranks, 4 * ranks):
        run = simulate(bidirectional(ranks, microbatches), costs)
        assert run.time == 3 * microbatches + 2 * ranks - 4
        assert max(run.peak_activations) <= ranks


@pytest.mark.parametrize("ranks", [3, 5, 7, 9])
def test_bidirectional_on_odd_ranks_is_faster_than_1f1b_and_holds_d_plus_1(ranks: int) -> None:
    costs = Costs.equal(ranks, 1, 2)
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        run = simulate(bidirectional(ranks, microbatches), costs)
        assert run.time < simulate(one_f_one_b(ranks, microbatches), costs).time
        assert max(run.peak_activations) <= ranks + 1
