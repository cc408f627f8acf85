"""Asks how short synthesised orders are, beside every named order and beside the true optimum."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.schedules.cases import SHAPES, Case, grid, small
from pathoseg.parallel.schedule.simulate import simulate
from pathoseg.parallel.schedule.synthesise import synthesise

HERE = Path(__file__).resolve().parent
SOLVER = HERE / ".venv"


class Result(NamedTuple):
    """A case, what synthesis made of it, and the named orders that fit."""

    case: Case
    time: float
    seconds: float
    named: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.time / min(self.named.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        cases = [*grid(SHAPES, (2, 3, 4, 5), (1,)), *grid(("even",), (8,), (2,))]
    else:
        cases = [*grid(SHAPES, range(2, 9), (1, 2)), *grid(SHAPES, (8,), (4,))]
    results = [_run(case) for case in cases]
    ratios = [result.ratio for result in results]
    figures: dict[str, float] = {
        "cases": len(results),
        "median_ratio_to_best_named": statistics.median(ratios),
        "worst_ratio_to_best_named": max(ratios),
        "slower_than_best_named": sum(ratio > 1 for ratio in ratios),
        "slowest_synthesis_s": max(result.seconds for result in results),
    }
    for lines in (_by_size(results), _named_points(results), _losses(results)):
        print("\n".join(lines), end="\n\n")
    figures |= _to_optimum([*small()][:: 2 if options.quick else 1], seconds=10)
    for name, value in figures.items():
        print(f"{name:28} {value:.6g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _run(case: Case) -> Result:
    start = time.process_time()
    order = synthesise(case.placement, case.costs, case.microbatches, case.bytes)
    seconds = time.process_time() - start
    run = simulate(order, case.costs)
    assert max(run.peak_activations) <= case.bytes
    return Result(case, run.time, seconds, case.named())


def _by_size(results: Sequence[Result]) -> Iterator[str]:
    yield "| D | cap | ways | cases | median ratio | worst ratio | best named, how often |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[tuple[int, int, bool], list[Result]] = {}
    for result in results:
        key = result.case.ranks, result.case.cap, result.case.both
        groups.setdefault(key, []).append(result)
    for (ranks, cap, both), group in sorted(groups.items()):
        ratios = [result.ratio for result in group]
        best = [min(each.named, key=each.named.__getitem__) for each in group]
        often = ", ".join(f"{name} {best.count(name)}" for name in sorted(set(best)))
        yield (
            f"| {ranks} | {cap} | {1 + both} | {len(group)} | {statistics.median(ratios):.3f} "
            f"| {max(ratios):.3f} | {often} |"
        )


def _named_points(results: Sequence[Result]) -> Iterator[str]:
    """Compare synthesised orders with GEMS at a cap of 1 and with Chimera at a cap of D.

    Yields:
        The lines of a Markdown table of synthesised times over those of the named order, for cases
        with a mirrored replica, even and uneven stages apart.
    """
    yield "| claim | cases | as long | synthesised shorter | longer | median | shortest |"
    yield "|---|---|---|---|---|---|---|"
    for name, label in (("gems/1", "GEMS at cap 1"), ("chimera", "Chimera at cap D")):
        for shapes in (("even",), SHAPES[1:]):
            ratios = [
                each.time / each.named[name]
                for each in results
                if each.case.both
                and each.case.shape in shapes
                and each.case.cap == (1 if name == "gems/1" else each.case.ranks)
                and name in each.named
            ]
            kind = "even stages" if shapes == ("even",) else "uneven stages"
            yield (
                f"| {label}, {kind} | {len(ratios)} | {sum(r == 1 for r in ratios)} "
                f"| {sum(r < 1 for r in ratios)} | {sum(r > 1 for r in ratios)} "
                f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} |"
            )


def _losses(results: Sequence[Result]) -> Iterator[str]:
    slower = [each for each in results if each.ratio > 1]
    yield f"Slower than a named order: {len(slower)} of {len(results)}"
    for each in slower:
        name = min(each.named, key=each.named.__getitem__)
        yield f"  {each.case}: {each.time} beside {name}'s {each.named[name]}"


def _to_optimum(cases: Sequence[Case], seconds: float) -> dict[str, float]:
    """Ratios to what an exact solver proves, or nothing where it cannot be installed."""
    asked = [
        {
            "homes": case.placement.homes,
            "forward": [stage.forward for stage in case.costs.stages],
            "backward": [stage.backward for stage in case.costs.stages],
            "held": [stage.activations for stage in case.costs.stages],
            "microbatches": case.microbatches,
            "cap": case.bytes,
            "seconds": seconds,
        }
        for case in cases
    ]
    python = SOLVER / "bin" / "python"
    try:
        if not python.exists():
            venv.create(SOLVER, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-qq", "ortools==9.15.6755"]
        subprocess.run(install, check=True)
    except (subprocess.CalledProcessError, OSError) as problem:
        print(f"The optimum is skipped: OR-Tools cannot be installed ({problem}).", file=sys.stderr)
        return {}
    command = [str(python), str(HERE / "optimum.py")]
    answer = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    answer.check_returncode()
    ratios = []
    print("| stages | D | N | cap | ways | synthesised | optimum | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for case, (optimum, proven) in zip(cases, json.loads(answer.stdout), strict=True):
        if proven:
            made = _run(case).time
            ratios.append(made / optimum)
            print(
                f"| {case.shape} | {case.ranks} | {case.microbatches} | {case.cap} "
                f"| {1 + case.both} | {made} | {optimum:.0f} | {ratios[-1]:.3f} |"
            )
    print()
    return {
        "cases_with_optimum": len(ratios),
        "cases_not_proven": len(cases) - len(ratios),
        "median_ratio_to_optimum": statistics.median(ratios),
        "worst_ratio_to_optimum": max(ratios),
        "share_optimal": sum(ratio == 1 for ratio in ratios) / len(ratios),
    }


if __name__ == "__main__":
    main()
