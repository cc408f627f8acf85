"""One rank of a world of processes, which runs a list of cases and judges its part of each."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pathoseg.parallel.runtime.world import connect
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime.cases import HYBRIDS, PLANS, Case, compare, run_case


def cases_of_processes(ranks: int) -> list[Case]:
    """Every order on one model, and every model on the orders with most messages and copies."""
    plans = [*PLANS, *HYBRIDS] if ranks == 4 else [*PLANS]
    found = [Case("branches", plan, ranks) for plan in plans]
    for model in MODELS:
        found += [Case(model, plan, ranks) for plan in ("1f1b-recomputed", "gems-master")]
    return list(dict.fromkeys(found))


def main() -> None:
    torch.set_num_threads(1)
    transport = connect()
    for case in cases_of_processes(transport.ranks):
        try:
            compare(case, transport.rank, run_case(case, transport))
        except BaseException as error:
            transport.abort(f"Rank {transport.rank}: {case}: {error!r}")
            raise
        transport.barrier()
    transport.close()
    if transport.rank == 0:
        print("passed:", *cases_of_processes(transport.ranks), flush=True)


if __name__ == "__main__":
    main()
