"""One rank of a world of processes: its transport conforms, and its part of each case is judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.parallel.comm import transport_conformance
from tests.parallel.comm.joined import join
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime.cases import (
    BRANCHED,
    HYBRIDS,
    JUDGE,
    PLANS,
    Case,
    compare,
    load_verdicts,
    run_case,
)
from tests.parallel.runtime.judge import Verdict
from tests.parallel.runtime.judged_worlds import fork_judged, judge_all

CROSSING = ("gpipe-folded", "gems-master", "bidirectional", "synthesised-mirrored", "hybrid-gpipe")


def cases_of_processes(ranks: int, library: str) -> list[Case]:
    """Every order on one model, and every model on the orders with most messages and copies.

    Without tags only those orders whose messages cross: all else is the same code as with them. Of
    encoders those that are trained in part: messages are those of the others, as those of a network
    of two inputs are. A library of two worlds trains each model in one of them. Each rank of MPI
    plans by itself, so of plans of branches it has two: gloo has all.
    """
    plans = [*PLANS, *HYBRIDS] if ranks == 4 else [*PLANS]
    if library in ("ordered", "imitated"):
        return [Case("branches", plan, ranks) for plan in plans if plan in CROSSING]
    found = [Case("branches", plan, ranks) for plan in plans]
    if ranks < 4:
        few = ("branched-1f1b", "branched-gems-mast")
        branched = few if library == "mpi" else BRANCHED.keys() - {"branched-hybrid"}
        found += [Case("two-heads", plan, ranks) for plan in BRANCHED if plan in branched]
    else:
        found.append(Case("two-heads", "branched-hybrid", ranks))
    models = [model for model in MODELS if model not in ("unet-resnet", "vit", "hooknet")]
    if library in ("gloo", "mpi"):
        models = models[ranks // 4 :: 2]
    for model in models:
        found += [Case(model, plan, ranks) for plan in ("1f1b-recomputed", "gems-master")]
    return list(dict.fromkeys(found))


def fork(library: str, ranks: int) -> int:
    """Judge ranks of gloo that are forked from this process."""
    cases = cases_of_processes(ranks, library)
    return fork_judged(ranks, cases, lambda expected: judge_rank(library, expected))


def judge_rank(library: str, expected: Mapping[str, Verdict]) -> None:
    """Do one rank's part of all cases."""
    transport = join(library)
    conform = transport_conformance.run_all(transport, library)

    def judge(case: Case) -> None:
        # The judge's model is free in this process, and traced for the schedule already.
        verdict = run_case(case, transport, whose=JUDGE)
        compare(case, transport.rank, verdict, expected[str(case)])

    judge_all(transport, cases_of_processes(transport.ranks, library), judge, conform)


if __name__ == "__main__":
    torch.set_num_threads(1)
    judge_rank(sys.argv[1], load_verdicts(Path(sys.argv[2])))
