"""Batches follow from seed and epoch alone, on any number of ranks, from any step."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pathoseg.errors import PathosegError, UnreadableError
from pathoseg.geometry import ModelInput
from pathoseg.tiles.class_pixels import class_counts
from pathoseg.tiles.dataset import Batch, TrainingSet
from pathoseg.tiles.tile_options import AugmentOptions
from pathoseg.tiles.tiles import SlideTiles, Tile, tile_labels
from pathoseg.tiles.transform import Augmentation

MakeBench = Callable[..., Any]


class CountedTiles:
    """As many tiles as given counts, with images that name their tile; of SlideTiles, what a
    training set uses."""

    has_objects = False

    def __init__(self, counts: Any, number: int = 0) -> None:
        self.class_pixels = np.array(counts, dtype=np.int64)
        self.grid = type("Grid", (), {"tile": type("Size", (), {"width": 2, "height": 2})})
        self._number = number

    def __len__(self) -> int:
        return len(self.class_pixels)

    def read(self, position: int) -> Tile:
        pixels = np.full((2, 2, 3), 100 * self._number + position, np.uint8)
        return Tile(pixels, pixels[..., 0], 0)


def counted(*slides: Any) -> list[SlideTiles]:
    return [CountedTiles(counts, n) for n, counts in enumerate(slides)]  # type: ignore[misc]


def real(make_bench: MakeBench, **options: Any) -> TrainingSet:
    slides = [
        make_bench(f"{name}.svs", seed).cut(offsets="random") for seed, name in enumerate("abc")
    ]
    usual = {"batch": 6, "seed": 7, "offsets": "random", "balance": "class", "balance_limit": 4.0}
    return TrainingSet(
        slides, **{**usual, "augmentation": Augmentation(AugmentOptions()), **options}
    )


def equal(first: Batch, second: Batch) -> bool:
    return (
        bool((first.images == second.images).all())
        and bool((first.masks == second.masks).all())
        and first.samples == second.samples
    )


def alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tiles")]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
)
def test_an_epoch_draws_every_tile_in_full_batches(
    sizes: list[int], batch: int, seed: int, epoch: int
) -> None:
    slides = counted(*(np.ones((size, 3)) for size in sizes))
    training = TrainingSet(slides, batch, seed)
    drawn = [(sample.slide, sample.tile) for sample in training.order(epoch)]
    tiles = [(s, t) for s, size in enumerate(sizes) for t in range(size)]
    assert len(drawn) == training.steps_per_epoch * batch
    assert len(tiles) <= len(drawn) < len(tiles) + batch
    assert sorted(drawn[: len(tiles)]) == tiles, "none again before all have come"
    times = Counter(drawn).values()
    assert max(times) - min(times) <= 1
    assert [sample.position for sample in training.order(epoch)] == list(range(len(drawn)))


def test_order_depends_on_seed_and_epoch() -> None:
    slides = counted(np.ones((40, 2)))
    orders = {
        tuple(sample.tile for sample in TrainingSet(slides, 4, seed).order(epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@given(
    tumor=st.integers(1, 8), stroma=st.integers(1, 30), bare=st.integers(0, 50),
    samples=st.integers(30, 200), epoch=st.integers(0, 100),
)  # fmt: skip
def test_balance_draws_every_class_equally_often(
    tumor: int, stroma: int, bare: int, samples: int, epoch: int
) -> None:
    counts = [[90, 10, 0]] * tumor + [[10, 0, 90]] * stroma + [[100, 0, 0]] * bare
    training = TrainingSet(counted(counts), 5, 1, samples, balance="class")
    drawn = Counter(sample.tile for sample in training.order(epoch))
    ends = np.cumsum([0, tumor, stroma, bare])
    groups = [sum(drawn[t] for t in range(a, b)) for a, b in pairwise(ends)]
    present = [group for group in groups if group]
    assert len(present) == (3 if bare else 2)
    assert max(present) - min(present) <= 1
    within = [drawn[tile] for tile in range(tumor)]
    assert max(within) - min(within) <= 1, "the tiles of a class, too"


@given(
    holds=arrays.arrays(np.bool_, st.tuples(st.integers(1, 60), st.integers(2, 4))),
    limit=st.floats(1, 6),
    samples=st.integers(1, 300),
    epoch=st.integers(0, 100),
)
def test_no_tile_is_drawn_more_often_than_the_limit(
    holds: np.ndarray, limit: float, samples: int, epoch: int
) -> None:
    holds[0, 0] = True
    training = TrainingSet(counted(holds * 10), 3, 2, samples, balance="class", balance_limit=limit)
    order = training.order(epoch)
    usable = int(holds.any(axis=1).sum())
    drawn = np.bincount([sample.tile for sample in order], minlength=len(holds))
    assert len(order) == training.steps_per_epoch * 3
    assert drawn[~holds.any(axis=1)].sum() == 0
    assert drawn.max() <= np.ceil(limit * len(order) / usable + 1e-9)
    alone = holds.copy()
    alone[:, 0] &= ~holds[:, 1:].any(axis=1)
    groups = [column for column in alone.T if column.any()]
    even = sum(column / column.sum() for column in groups) / len(groups)
    if even.max() <= limit / usable:  # then every class has its even share
        # Among tiles of the same classes draws are off by one at most.
        kinds = len(np.unique(alone, axis=0))
        for column in groups:
            assert abs(drawn[column].sum() - even[column].sum() * len(order)) <= kinds
    else:
        assert (drawn >= np.floor(even.clip(max=limit / usable) * len(order) - 1e-9)).all()


def test_the_limit_holds_back_what_is_rare_and_says_so() -> None:
    """As 2 tiles of background alone, and 3 of a class, among 130."""
    counts = [[90, 10, 0]] * 125 + [[90, 5, 5]] * 3 + [[100, 0, 0]] * 2
    unlimited, limited = (
        TrainingSet(counted(counts), 5, 1, 1300, balance="class", balance_limit=limit)
        for limit in (np.inf, 4.0)
    )
    often, seldom = (
        Counter(sample.tile for sample in training.order(0)) for training in (unlimited, limited)
    )
    assert min(often[128], often[129]) > 200
    assert {seldom[tile] for tile in range(125, 130)} == {40}
    assert not unlimited.held_back
    held = limited.held_back[2]
    assert (list(limited.held_back), held.tiles, held.of) == ([2], 3, 130)
    assert held.even == pytest.approx(1 / 3 + 1 / 128, abs=1e-2)
    assert held.share == pytest.approx(12 / 130)


def test_tiles_that_teach_nothing_are_left_out() -> None:
    counts = [[4, 0, 0], [0, 0, 0], [2, 2, 0], [1, 2, 1], [0, 0, 0]]
    for balance in ("none", "class"):
        training = TrainingSet(counted(counts), 2, 0, 50, balance=balance)
        assert {sample.tile for sample in training.order(0)} == {0, 2, 3}
    classify = TrainingSet(counted(counts), 2, 0, 50, min_cover=0.6)
    assert {sample.tile for sample in classify.order(0)} == {2, 3}
    strict = TrainingSet(counted(counts), 2, 0, 50, balance="class", min_cover=0.9)
    assert {sample.tile for sample in strict.order(0)} == {2}


def test_without_tiles_there_is_no_set() -> None:
    for slides in ([], counted(np.zeros((0, 3))), counted(np.zeros((5, 3)))):
        with pytest.raises(PathosegError, match=f"tiles of {len(slides)} slides"):
            TrainingSet(slides, 2, 0)


@pytest.mark.parametrize("threads", [1, 4])
def test_batches_hold_the_samples_of_the_order(make_bench: MakeBench, threads: int) -> None:
    training = real(make_bench, threads=threads)
    batches = list(training.batches(3))
    assert len(batches) == training.steps_per_epoch == 10
    assert tuple(sample for batch in batches for sample in batch.samples) == training.order(3)
    for batch in batches[::4]:
        for image, mask, sample in zip(batch.images, batch.masks, batch.samples, strict=True):
            expected = training.sample(3, sample)
            assert (image == expected[0]).all()
            assert (mask == expected[1]).all()
    assert not alive()


def test_an_epoch_goes_on_where_it_stopped(make_bench: MakeBench) -> None:
    whole = list(real(make_bench, threads=3).batches(1))
    for first in (0, 4, 9, 10):
        rest = list(real(make_bench, threads=1).batches(1, first))
        assert len(rest) == 10 - first
        assert all(map(equal, rest, whole[first:]))


def test_objects_come_with_the_same_images_and_masks(make_bench: MakeBench) -> None:
    """Two boxes a slide, of one object each, in batches and in some rows of them."""
    training = real(make_bench)
    cut = [
        make_bench(f"{name}.svs", s).cut(offsets="random", apart=5.4)
        for s, name in enumerate("abc")
    ]
    usual = {"offsets": "random", "balance": "class", "balance_limit": 4.0}
    objects = TrainingSet(cut, 6, 7, augmentation=Augmentation(AugmentOptions()), **usual)
    some = objects.batches(2, 6, [1, 4])
    for batch, own, part in zip(training.batches(2, 6), objects.batches(2, 6), some, strict=True):
        assert batch.objects is None
        assert equal(batch, own)
        assert own.objects is not None
        assert part.objects is not None
        unknown = own.masks == 255
        assert ((own.objects == 255) == unknown).all()
        assert (((own.objects == 1) | unknown) == (own.masks > 0)).all(), "they are far apart"
        assert (part.objects == own.objects[[1, 4]]).all()


def test_labels_of_a_context_come_with_it(make_bench: MakeBench) -> None:
    wide = {"context": (ModelInput("wide", 2.0, 64),), "labelled": "wide"}
    cut = [
        make_bench(f"{name}.svs", s).cut(offsets="random", **wide) for s, name in enumerate("ab")
    ]
    usual = {"offsets": "random", "balance": "class", "balance_limit": 4.0}
    for changes in (None, Augmentation(AugmentOptions())):
        training = TrainingSet(cut, 6, 7, augmentation=changes, threads=2, **usual)
        for batch, part in zip(training.batches(2, 6), training.batches(2, 6, [1, 4]), strict=True):
            assert batch.around is not None
            assert part.around is not None
            assert (part.around == batch.around[[1, 4]]).all()
            middle = batch.around[:, 24:40, 24:40]
            fine = (
                batch.masks.reshape(6, 16, 4, 16, 4).transpose(0, 1, 3, 2, 4).reshape(6, 16, 16, 16)
            )
            even = (fine == fine[..., :1]).all(axis=-1)
            assert (middle == fine[..., 0])[even].mean() > 0.9


@pytest.mark.parametrize("rows", [[], [2], [0, 3], [0, 1, 2, 3]])
def test_some_rows_are_those_of_the_whole_batch(make_bench: MakeBench, rows: list[int]) -> None:
    training = real(make_bench)
    for batch, part in zip(training.batches(2, 7), training.batches(2, 7, rows), strict=True):
        samples = tuple(batch.samples[row] for row in rows)
        assert equal(part, Batch(batch.images[rows], batch.masks[rows], samples))


@pytest.mark.parametrize(
    ("offsets", "balance", "method"),
    [("random", "class", "read_near"), ("grid", "none", "read")],
)
def test_an_unreadable_tile_stops_the_consumer_at_its_batch(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, offsets: str, balance: str, method: str
) -> None:
    training = real(make_bench, threads=3, offsets=offsets, balance=balance)
    order = [(sample.slide, sample.tile) for sample in training.order(0)]
    # One that no earlier sample shows: with balance, tiles come again.
    first = next(at for at in range(6 * 4, len(order)) if order[at] not in order[:at])
    slide, tile = order[first]
    read = getattr(SlideTiles, method)

    def failing(tiles: SlideTiles, position: int, *more: Any) -> Tile:
        if tiles is training.slides[slide] and position == tile:
            raise UnreadableError(f"{tiles.slide} is gone.", "Bring it back.")
        found: Tile = read(tiles, position, *more)
        return found

    monkeypatch.setattr(SlideTiles, method, failing)
    batches = training.batches(0)
    assert [len(next(batches).samples) for _ in range(first // 6)] == [6] * (first // 6)
    with pytest.raises(UnreadableError, match="is gone"):
        next(batches)
    assert not alive()


@pytest.mark.parametrize("min_cover", [None, 0.6])
def test_tiles_near_the_grid_hold_what_they_are_drawn_for(
    make_bench: MakeBench, min_cover: float | None
) -> None:
    """The rarest class of the grid's tile, or its label; and they differ from epoch to epoch."""
    training = real(make_bench, augmentation=None, min_cover=min_cover)
    moved = set[bool]()
    for epoch in range(4):
        for sample in training.order(epoch):
            slide = training.slides[sample.slide]
            mask = training.sample(epoch, sample)[1]
            counts = class_counts(mask[None], 3)
            grid = slide.class_pixels[sample.tile][None]
            if min_cover is None:
                # Tumour is in fewer tiles than stroma, and that in fewer than background.
                wanted = max((grid > 0).nonzero()[1], key=(0, 2, 1).index)
                assert counts[0, wanted] > 0
            else:
                assert tile_labels(counts, min_cover) == tile_labels(grid, min_cover)
            again = training.sample(epoch, sample)[0]
            assert (again == training.sample(epoch, sample)[0]).all()
            moved.add(bool((training.sample(epoch + 1, sample)[0] != again).any()))
    assert True in moved


def test_closing_early_ends_the_threads(make_bench: MakeBench) -> None:
    batches = real(make_bench, threads=4).batches(0)
    next(batches)
    assert alive()
    batches.close()
    assert not alive()


def test_an_interrupt_ends_the_threads(make_bench: MakeBench) -> None:
    batches = real(make_bench, threads=4).batches(0)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt())
    assert not alive()


def test_reading_ahead_is_bounded() -> None:
    slides = counted(np.ones((100, 2)))
    reads: list[int] = []
    tiles: Any = slides[0]
    read = tiles.read
    tiles.read = lambda position: reads.append(position) or read(position)
    batches = TrainingSet(slides, 4, 0, threads=2).batches(0)
    next(batches)
    time.sleep(0.2)  # long enough for all that the threads are allowed
    assert 4 <= len(reads) <= 4 * 4
    batches.close()


@pytest.mark.parametrize("offsets", ["grid", "random"])
def test_the_cache_changes_no_batch(
    make_bench: MakeBench, tmp_path: Path, offsets: Literal["grid", "random"]
) -> None:
    def batches(cache: Path | None) -> list[Batch]:
        slides = [
            make_bench(f"{n}.svs", seed).cut(cache=cache, offsets=offsets)
            for seed, n in enumerate("ab")
        ]
        return list(TrainingSet(slides, 4, 3, offsets=offsets, threads=3).batches(0))

    expected = batches(None)
    for _ in range(2):
        assert all(map(equal, batches(tmp_path / "cache"), expected))
