"""Every order on every model, against one process that runs the same microbatches."""

from __future__ import annotations

import pytest
import torch

from pathoseg.parallel.runtime.threads import run_ranks
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime.cases import HYBRIDS, PLANS, Case, compare, prepare, run_case

CASES = [
    *(Case(model, plan, ranks) for model in MODELS for plan in PLANS for ranks in (2, 3, 4)),
    *(Case(model, plan, ranks) for model in MODELS for plan in HYBRIDS for ranks in (4, 8)),
]
# In double precision a reordered sum shows nothing but rounding.
DOUBLE = [
    Case(model, plan, 3, torch.float64)
    for model in MODELS
    for plan in ("data-parallel", "gems-master", "bidirectional", "synthesised-mirrored")
]
CLIPPED = [Case("unet", plan, 3, clip=0.05) for plan in ("1f1b", "gems-master", "data-parallel")]
LAST = [
    Case("unet", plan, 2, last=last)
    for plan in ("gpipe", "gems-master", "1f1b-recomputed", "data-parallel", "gpipe-folded")
    for last in (0, 2)
]


@pytest.mark.parametrize("case", [*CASES, *DOUBLE, *CLIPPED, *LAST], ids=str)
def test_ranks_train_as_one_process(case: Case) -> None:
    prepare(case)
    compare(case, run_ranks(case.ranks, lambda transport: run_case(case, transport)))
