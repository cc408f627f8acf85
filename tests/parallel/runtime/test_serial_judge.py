"""Every order on every model, against one process that runs the same microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel.comm import transport_conformance
from tests.parallel.comm.joined import Library
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime import judged_ranks
from tests.parallel.runtime.cases import (
    BRANCHED,
    HYBRIDS,
    PLANS,
    Case,
    compare,
    prepare,
    run_case,
)
from tests.parallel.runtime.judged_worlds import run_world

pytestmark = pytest.mark.slow  # many seconds in all

# Objects are a U-Net with another loss, which every plan computes on its last stage alike.
# Of two inputs, what no other network shows is where each is read: a few plans do.
NETWORKS = [model for model in MODELS if model not in ("objects", "hooknet")]
ENCODERS = ("unet-resnet", "vit", "frozen", "low-rank")
# What groups and double precision change is no matter of these, which have many layers.
PLAIN = [model for model in NETWORKS if model not in ENCODERS]
# Branches, and a network of one, are cut into every number of stages. Of the others each plan has
# one number, in turn: every network and every plan meets all three.
CUT_IN_ALL = ("unet", "branches")
# In double precision a reordered sum shows nothing but rounding.
DOUBLE = [
    Case(model, plan, 3, torch.float64)
    for model in PLAIN
    for plan in ("data-parallel", "gems-master", "bidirectional", "synthesised-mirrored")
]
CASES = [
    *(Case(model, plan, ranks) for model in CUT_IN_ALL for plan in PLANS for ranks in (2, 3, 4)),
    *(
        Case(model, plan, 2 + (at + shift) % 3)
        for at, model in enumerate(model for model in NETWORKS if model not in CUT_IN_ALL)
        for shift, plan in enumerate(PLANS)
    ),
    *(
        Case(model, plan, ranks)
        for at, model in enumerate(PLAIN)
        for shift, plan in enumerate(HYBRIDS)
        for ranks in ((4, 8) if model in CUT_IN_ALL else (4 + 4 * ((at + shift) % 2),))
    ),
    *(Case("objects", plan, 3) for plan in PLANS),
    *(Case("hooknet", plan, 2) for plan in ("gpipe", "1f1b-recomputed", "data-parallel")),
    *(Case("hooknet", plan, 3) for plan in ("mp-basic-naive", "gems-master")),
]
# Branches side by side. To the bit where no value has more than two readers; where more add up,
# rounding shows in the gradients of biases ahead of norms, which are near zero: double precision,
# and each plan has one number of ranks, in turn.
BRANCHES = [
    *(
        Case(model, plan, ranks)
        for model in ("two-heads", "branches")
        for plan in BRANCHED
        for ranks in ((4,) if plan == "branched-hybrid" else (2, 3))
    ),
    *(
        Case(model, plan, 2 + (at + shift) % 2, torch.float64)
        for at, model in enumerate(("three-decoders", "resolutions", "split-transformer"))
        for shift, plan in enumerate(("branched-gpipe", "branched-1f1b", "branched-gems-mast"))
    ),
]
CLIPPED = [Case("unet", plan, 3, clip=0.05) for plan in ("1f1b", "gems-master", "data-parallel")]
LAST = [
    Case("unet", plan, 2, last=last)
    for plan in ("gpipe", "gems-master", "1f1b-recomputed", "data-parallel", "gpipe-folded")
    for last in (0, 2)
]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    """Each takes less than a second, but together they take minutes: some of them stay quick."""
    quick = case.ranks == 2 and case.model in ("unet", "dropout") and case.last == 1
    return [] if quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=_marks(case))
        for case in (*CASES, *BRANCHES, *DOUBLE, *CLIPPED, *LAST)
        # Double precision finds what single precision would, and less.
        if replace(case, dtype=torch.float64) not in DOUBLE or case in DOUBLE
    ],
)
def test_ranks_train_as_one_process(case: Case) -> None:
    prepare(case)
    verdicts = run_ranks(case.ranks, lambda transport: run_case(case, transport))
    for rank, verdict in enumerate(verdicts):
        compare(case, rank, verdict)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "ranks"),
    # Hybrids take four ranks; messages that cross between the same two take two; three are odd.
    [("gloo", 3), ("gloo", 4), ("mpi", 2), ("mpi", 4), ("ordered", 2), ("imitated", 4)],
)
def test_processes_conform_and_train_as_one(
    library: Library, ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Transports are tested here, too: a world of processes starts in seconds, and does both."""
    cases = judged_ranks.cases_of_processes(ranks, library)
    out = run_world(judged_ranks, library, ranks, cases, tmp_path, capfd)
    conform = [case.__name__ for case in transport_conformance.cases_of(library)]
    assert out.split() == ["passed:", *conform, *map(str, cases)]
