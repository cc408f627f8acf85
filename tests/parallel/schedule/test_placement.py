"""Tests where the placements put the stages."""

from __future__ import annotations

import pytest

from pathoseg.parallel.schedule.schedule import folded, linear, mirrored


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_holds_as_many_stages_as_any_other(ranks: int) -> None:
    for placement, each in ((linear(ranks), 1), (folded(ranks), 2), (mirrored(ranks), 2)):
        held = [rank for home in placement.homes for rank in home]
        assert sorted(held) == sorted([*range(ranks)] * each)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_both_ends_of_a_folded_skip_are_on_one_rank(ranks: int) -> None:
    [home] = folded(ranks).homes
    assert all(home[stage] == home[-1 - stage] for stage in range(ranks))


def test_a_stage_of_a_mirrored_pair_is_held_by_two_ranks_but_the_middle_one() -> None:
    placement = mirrored(5)
    assert [placement.holders(stage) for stage in range(5)] == [[0, 4], [1, 3], [2], [1, 3], [0, 4]]
    assert (placement.stages, placement.replicas) == (5, 2)


def test_groups_have_ranks_and_replicas_of_their_own() -> None:
    assert mirrored(2).repeated(2).homes == ((0, 1), (1, 0), (2, 3), (3, 2))
