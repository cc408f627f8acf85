"""One rank of a world of processes: its transport conforms, and its part of each case is judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.parallel.comm import transport_conformance
from tests.parallel.comm.forked_ranks import fork_ranks
from tests.parallel.comm.joined import join
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime.cases import (
    BRANCHED,
    HYBRIDS,
    JUDGE,
    PLANS,
    Case,
    compare,
    judged_case,
    load_verdicts,
    run_case,
)
from tests.parallel.runtime.judge import Verdict

CROSSING = ("gpipe-folded", "gems-master", "bidirectional", "synthesised-mirrored", "hybrid-gpipe")


def cases_of_processes(ranks: int, library: str) -> list[Case]:
    """Every order on one model, and every model on the orders with most messages and copies.

    Without tags only those orders whose messages cross: all else is the same code as with them. Of
    encoders those that are trained in part: messages are those of the others, as those of a network
    of two inputs are. A library of two worlds trains each model in one of them.
    """
    plans = [*PLANS, *HYBRIDS] if ranks == 4 else [*PLANS]
    if library in ("ordered", "imitated"):
        return [Case("branches", plan, ranks) for plan in plans if plan in CROSSING]
    found = [Case("branches", plan, ranks) for plan in plans]
    if ranks < 4:
        found += [Case("two-heads", plan, ranks) for plan in BRANCHED if plan != "branched-hybrid"]
    else:
        found.append(Case("two-heads", "branched-hybrid", ranks))
    models = [model for model in MODELS if model not in ("unet-resnet", "vit", "hooknet")]
    if library in ("gloo", "mpi"):
        models = models[ranks // 4 :: 2]
    for model in models:
        found += [Case(model, plan, ranks) for plan in ("1f1b-recomputed", "gems-master")]
    return list(dict.fromkeys(found))


def fork(library: str, ranks: int) -> int:
    """Judge ranks of gloo by what this process, from which they are forked, has found ahead."""
    torch.set_num_threads(1)  # as the ranks: more would add in another order
    cases = cases_of_processes(ranks, library)
    expected = {str(case): judged_case(case) for case in cases}
    return fork_ranks(ranks, lambda: judge_rank(library, expected))


def judge_rank(library: str, expected: Mapping[str, Verdict]) -> None:
    """Do one rank's part of all cases."""
    transport = join(library)
    conform = transport_conformance.run_all(transport, library)
    cases = cases_of_processes(transport.ranks, library)
    for case in cases:
        try:
            # The judge's model is free in this process, and traced for the schedule already.
            verdict = run_case(case, transport, whose=JUDGE)
            compare(case, transport.rank, verdict, expected[str(case)])
        except BaseException as error:
            transport.abort(f"Rank {transport.rank}: {case}: {error!r}")
            raise
        transport.barrier()
    transport.close()
    if transport.rank == 0:
        print("passed:", *conform, *cases, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    judge_rank(sys.argv[1], load_verdicts(Path(sys.argv[2])))
