"""Models in training with their tiles in strips, against one process that sees whole tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.giving_up import GivenUpError
from pathoseg.parallel.activations import saved_tensor_hooks
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.runtime.memory_check import Memory
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.stage import Pass, Stage
from tests.parallel.activations.test_saved_tensor_hooks import mixtures
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks
from tests.parallel.computing_device import DEVICE
from tests.parallel.networks.runtime_models import SIDE, samples
from tests.parallel.runtime.cases import (
    Case,
    judged_case,
    reset,
    traced,
    training_of,
)
from tests.parallel.runtime.judge import Verdict
from tests.parallel.runtime.judged_worlds import run_world
from tests.parallel.shards import sharded_ranks
from tests.parallel.shards.sharded_cases import (
    Sharded,
    compare,
    microbatches,
    prepare,
    run_strips,
    start_strips,
)
from tests.parallel.shards.sharded_ranks import cases_of_processes

DOUBLE = torch.float64
CASES = [
    *(Sharded(Case("unet", "data-parallel", 1, DOUBLE), shards) for shards in (2, 3)),
    Sharded(Case("unet", "1f1b", 2, DOUBLE), 2),
    Sharded(Case("unet", "gems-mast", 2, DOUBLE), 4),
    Sharded(Case("unet-group-norm", "1f1b", 2, DOUBLE), 4),
    Sharded(Case("resnet110-v2", "gems-mast", 2, DOUBLE), 3),
    Sharded(Case("branches", "gems-master-recomputed", 2, DOUBLE), 2),
    Sharded(Case("dropout", "1f1b-recomputed", 2, DOUBLE), 2),
    Sharded(Case("unet", "hybrid-gpipe", 4, DOUBLE), 2),
    Sharded(Case("objects", "gpipe-folded", 2, DOUBLE), 2),
    Sharded(Case("low-rank", "gpipe", 2, DOUBLE), 2),
    # A context whose middle quarter of rows lies beside the strips of the tile.
    *(Sharded(Case("hooknet", "data-parallel", 1, DOUBLE), shards) for shards in (2, 4)),
    Sharded(Case("hooknet", "1f1b", 2, DOUBLE), 3),
    Sharded(Case("two-heads", "branched-1f1b", 2, DOUBLE), 2),
    Sharded(Case("unet", "data-parallel", 2, DOUBLE, last=0), 2),
    Sharded(Case("unet", "1f1b", 2, DOUBLE, clip=0.05), 2),
    # In single precision. Samples on which rounding turns over a ReLU or pooling are left out.
    Sharded(Case("unet", "data-parallel", 1), 3),
    Sharded(Case("unet-group-norm", "gems-mast", 2), 2),
    Sharded(Case("resnet-v2", "gems-mast", 2), 2),
    Sharded(Case("hooknet", "gems-mast", 2), 2),
    Sharded(Case("objects", "gpipe-folded", 2), 2),
    Sharded(Case("dropout", "data-parallel", 1), 3),
]
WORLDS = [("gloo", 3), ("gloo", 4), ("mpi", 3), ("mpi", 4)]


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's models are tiny; all that is offloaded is to leave."""
    monkeypatch.setattr(saved_tensor_hooks, "SMALL", 1)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", CASES, ids=str)
def test_strips_train_as_whole_tiles(sharded: Sharded) -> None:
    prepare(sharded)
    case = sharded.case
    expected = judged_case(case)
    exact = None
    if case.dtype is not DOUBLE:
        exact = judged_case(replace(case, dtype=DOUBLE))
    verdicts = run_ranks(sharded.ranks, lambda transport: run_strips(sharded, transport))
    for rank, verdict in enumerate(verdicts):
        compare(sharded, rank, verdict, expected, exact)


def test_cases_are_a_pairwise_cover() -> None:
    """Each network is judged in each number of strips, order and wire, and so on for any two."""
    networks = "unet", "unet-group-norm", "resnet110-v2", "hooknet"
    factors: list[tuple[str | int, ...]] = [networks, (2, 3, 4)]
    factors += [("data-parallel", "1f1b", "gems-mast"), ("threads", "gloo", "mpi")]
    judged_on = [("threads", each) for each in CASES]
    for library, ranks in WORLDS:
        judged_on += [(library, each) for each in cases_of_processes(library, ranks)]
    judged_pairs = {
        pair
        for wire, each in judged_on
        for pair in combinations((each.case.model, each.shards, each.case.plan, wire), 2)
    }
    wanted = {pair for one, other in combinations(factors, 2) for pair in product(one, other)}
    assert wanted <= judged_pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan", "shards"),
    [
        ("unet", "data-parallel", 3),
        ("unet-group-norm", "gpipe", 2),
        ("resnet-v2", "gems-master", 2),
        ("dropout", "data-parallel", 2),
        ("branches", "gpipe-folded", 2),
        ("hooknet", "data-parallel", 2),
        ("vit", "data-parallel", 2),  # gathers
    ],
)
@settings(max_examples=2, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_strips_of_which_layers_are_offloaded_and_recomputed_train_as_whole_tiles(
    model: str, plan: str, shards: int, data: st.DataObject
) -> None:
    """Any mixture of layers; halos and sums are kept, so what runs again sends nothing."""
    case, memory = data.draw(mixtures(model, plan))
    sharded = Sharded(replace(case, dtype=DOUBLE), shards)
    prepare(sharded)
    expected = judged_case(sharded.case)
    found = run_ranks(sharded.ranks, lambda transport: _counted(sharded, transport, memory))
    for rank, (verdict, sent) in enumerate(found):
        compare(sharded, rank, verdict, expected)
        assert sent == _sent_where_all_is_kept(model, plan, case.ranks, shards)[rank]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet", "dropout"])
def test_a_stage_that_is_recomputed_sends_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears what was kept of its forward."""
    recompute, recomputed = Stage.recompute, []

    def counted(stage: Stage, microbatch: int, this: Pass) -> None:
        assert stage._sharding is not None
        whole: Any = stage._sharding.team._transport
        before = whole._whole.sent
        recompute(stage, microbatch, this)
        recomputed.append(whole._whole.sent - before)

    monkeypatch.setattr(Stage, "recompute", counted)
    sharded = Sharded(Case(model, "1f1b-recomputed", 2, DOUBLE), 2)
    prepare(sharded)
    run_ranks(sharded.ranks, lambda transport: _counted(sharded, transport))
    assert recomputed
    assert not any(recomputed)


class Counting(ThreadTransport):
    """Counts messages and sums."""

    sent = 0

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        self.sent += 1
        return super().send(tensor, to, tag)

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        self.sent += 1
        return super().sum(tensor, ranks)


def _counted(
    sharded: Sharded, transport: ThreadTransport, memory: Memory | None = None
) -> tuple[Verdict, int]:
    counting = Counting(transport._hub, transport.rank)
    return run_strips(sharded, counting, memory=memory), counting.sent


@cache
def _sent_where_all_is_kept(model: str, plan: str, ranks: int, shards: int) -> list[int]:
    sharded = Sharded(Case(model, plan, ranks, DOUBLE), shards)
    return [sent for _, sent in run_ranks(sharded.ranks, lambda each: _counted(sharded, each))]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("library", "ranks"), WORLDS)
def test_processes_train_strips_as_one(
    library: str, ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = cases_of_processes(library, ranks)
    judged = [each.case for each in cases]
    out = run_world(sharded_ranks, library, ranks, judged, tmp_path, capfd)
    assert out.split() == ["passed:", *map(str, cases)]


@pytest.mark.slow
def test_predictions_are_those_of_whole_tiles() -> None:
    sharded = Sharded(Case("vit", "gpipe", 2, DOUBLE), 2)
    prepare(sharded)

    def body(transport: ThreadTransport) -> Any:
        runner = start_strips(sharded, transport)
        return runner.predict(microbatches(sharded.case, 0, runner))

    found = run_ranks(sharded.ranks, body)
    assert [len(each) for each in found] == [0, 0, 4, 0], "the first strip's last stage"
    model = reset(traced("vit", DOUBLE, "judge")).model.eval()
    for microbatch, logits in found[2].items():
        size = sharded.case.sizes()[microbatch]
        with torch.no_grad():
            expected = model(samples(0, microbatch, size, DOUBLE)[0])
        assert logits.shape == (size, 3, SIDE, SIDE)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_strips_give_up_together() -> None:
    """One rank is asked to stop: the others of its tile, who wait for its rows, stop with it."""
    sharded = Sharded(Case("unet", "data-parallel", 1), 2)
    prepare(sharded)

    def body(transport: ThreadTransport) -> bool:
        runner = start_strips(sharded, transport)
        try:
            runner.step(
                0,
                microbatches(sharded.case, 0, runner),
                is_given_up=lambda: transport.rank == 1,
            )
        except GivenUpError:
            return True
        return False

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize(
    ("shards", "memory", "said"),
    [
        (2, Memory(), "take 2 ranks, not 3"),
        (3, Memory(parked=frozenset({Park.OPTIMIZER})), "Nothing is parked"),
    ],
)
def test_what_cannot_be_cut_is_refused(shards: int, memory: Memory, said: str) -> None:
    case = Case("unet", "data-parallel", 1)
    schedule, partition = case.schedule()
    for rank in range(3):
        traced("unet", torch.float32, rank)

    def body(transport: ThreadTransport) -> None:
        model = reset(traced("unet", torch.float32, transport.rank))
        Runner(model, partition, schedule, transport, DEVICE, training_of(case), memory, shards)

    with pytest.raises(PathosegError, match=said):
        run_ranks(3, body)
