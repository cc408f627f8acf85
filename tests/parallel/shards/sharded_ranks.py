"""One rank of a world of processes that share tiles: its part of each case is judged."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.parallel.comm.joined import join
from tests.parallel.runtime.cases import JUDGE, Case, load_verdicts
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


def main(library: str, verdicts: Path) -> None:
    torch.set_num_threads(1)
    transport = join(library)
    cases, expected = cases_of_processes(library, transport.ranks), load_verdicts(verdicts)
    for case in cases:
        try:
            verdict = run_strips(case, transport, whose=JUDGE)
            compare(case, transport.rank, verdict, expected[str(case.case)])
        except BaseException as error:
            transport.abort(f"Rank {transport.rank}: {case}: {error!r}")
            raise
        transport.barrier()
    transport.close()
    if transport.rank == 0:
        print("passed:", *cases, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
