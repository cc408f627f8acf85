"""One rank of a world of processes that share tiles: its part of each case is judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.parallel.comm.joined import join
from tests.parallel.runtime.cases import JUDGE, Case, load_verdicts
from tests.parallel.runtime.judge import Verdict
from tests.parallel.runtime.judged_worlds import fork_judged, judge_all
from tests.parallel.shards.sharded_cases import Sharded, compare, run_strips


def cases_of_processes(library: str, ranks: int) -> list[Sharded]:
    """Two strips on each rank of a pipeline, and all ranks' strips of one model."""
    cases = {
        ("gloo", 4): [
            ("resnet110-v2", "1f1b", 2),
            ("hooknet", "gems-mast", 2),
            ("unet", "data-parallel", 4),
            ("branches", "1f1b-recomputed", 2),
            ("dropout", "gems-mast", 2),
        ],
        ("gloo", 3): [("unet-group-norm", "data-parallel", 3)],
        ("mpi", 4): [
            ("hooknet", "1f1b", 2),
            ("unet-group-norm", "gems-mast", 2),
            ("resnet110-v2", "data-parallel", 4),
        ],
        ("mpi", 3): [("unet", "data-parallel", 3)],
    }
    return [
        Sharded(Case(model, plan, ranks // shards, torch.float64), shards)
        for model, plan, shards in cases[library, ranks]
    ]


def fork(library: str, ranks: int) -> int:
    """Judge ranks of gloo that are forked from this process."""
    cases = [each.case for each in cases_of_processes(library, ranks)]
    return fork_judged(ranks, cases, lambda expected: judge_rank(library, expected))


def judge_rank(library: str, expected: Mapping[str, Verdict]) -> None:
    """Do one rank's part of all cases."""
    transport = join(library)

    def judge(sharded: Sharded) -> None:
        verdict = run_strips(sharded, transport, whose=JUDGE)
        compare(sharded, transport.rank, verdict, expected[str(sharded.case)])

    judge_all(transport, cases_of_processes(library, transport.ranks), judge)


if __name__ == "__main__":
    torch.set_num_threads(1)
    judge_rank(sys.argv[1], load_verdicts(Path(sys.argv[2])))
