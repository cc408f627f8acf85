"""Solves small steps exactly with OR-Tools CP-SAT; runs in a venv of its own, JSON in and out."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model


def main() -> None:
    """Read a list of cases, write for each its shortest time and whether that is proven."""
    cases = json.load(sys.stdin)
    json.dump([_solve(**case) for case in cases], sys.stdout)


def _solve(
    homes: list[list[int]],
    forward: list[int],
    backward: list[int],
    held: list[int],
    microbatches: int,
    cap: int,
    seconds: float,
) -> tuple[float, bool]:
    """The shortest step over all dealings of microbatches to replicas.

    Every visit is an interval of each replica that could run it, present for one of them; no two
    on a rank overlap, and what is held between forward and backward is a cumulative resource.
    """
    model = cp_model.CpModel()
    stages = len(forward)
    horizon = microbatches * (sum(forward) + sum(backward))
    ranks = max(map(max, homes)) + 1
    work: list[list[Any]] = [[] for _ in range(ranks)]
    holding: list[list[tuple[Any, int]]] = [[] for _ in range(ranks)]
    end = model.new_int_var(0, horizon, "")
    first: list[tuple[Any, Any]] = []
    for _ in range(microbatches):
        chosen = [model.new_bool_var("") for _ in homes]
        model.add_exactly_one(chosen)
        times = [*forward, *reversed(backward)]
        starts = [model.new_int_var(0, horizon, "") for _ in times]
        for visit, time in enumerate(times[:-1]):
            model.add(starts[visit + 1] >= starts[visit] + time)
        model.add(end >= starts[-1] + times[-1])
        for home, present in zip(homes, chosen, strict=True):
            for visit, time in enumerate(times):
                rank = home[min(visit, 2 * stages - 1 - visit)]
                work[rank].append(
                    model.new_optional_fixed_size_interval_var(starts[visit], time, present, "")
                )
            for stage, rank in enumerate(home):
                last = starts[2 * stages - 1 - stage] + backward[stage]
                size = model.new_int_var(0, horizon, "")
                whole = model.new_optional_interval_var(starts[stage], size, last, present, "")
                holding[rank].append((whole, held[stage]))
        first.append((chosen[0], starts[0]))
    for rank in range(ranks):
        model.add_no_overlap(work[rank])
        intervals, sizes = zip(*holding[rank], strict=True)
        model.add_cumulative(intervals, sizes, cap)
    # Microbatches are alike: those that start earlier have lower numbers.
    for (_, earlier), (_, later) in pairwise(first):
        model.add(earlier <= later)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    return solver.objective_value, status == cp_model.OPTIMAL


if __name__ == "__main__":
    main()
