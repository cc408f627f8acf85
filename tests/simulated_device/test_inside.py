"""Runs the tests of `inside/` in processes of their own, which have the simulated device.

A process has one accelerator for good, and autograd's threads are those of the devices that it had
at its first backward: so the other tests must not see this one.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.simulated_device.build import built_library, compiler
from tests.simulated_device.mutate import SURVIVORS, TABLE, mutants, row_of, try_all
from tests.simulated_device.run import ROOT, command, environment

_ACTIVATIONS = "tests/parallel/activations"
_MIXED = "mixture and gems"
_PARKED = "(training_is_the_same and gems and adamw-parked0) or (it_goes_with and overlapped)"
_KEPT = "two_stages or (done_again and views) or trace_has"
_JUDGED = "branches and (recomputed or hybrid-gems or bidirectional)"
_SUMMED = "group-norm and (data-parallel or synthesised-mirrored) and not 8"
# The runtime's own tests compute on the device where it is loaded: some of each, in one process.
RUNTIME = [
    f"{_ACTIVATIONS}/test_saved_tensor_hooks.py",
    f"{_ACTIVATIONS}/test_stage_offload.py",
    f"{_ACTIVATIONS}/test_retention.py",
    "tests/parallel/runtime/test_serial_judge.py",
    "-k",
    f"({_MIXED}) or {_PARKED} or {_KEPT} or (train_as and (({_JUDGED}) or ({_SUMMED})))",
]
PARTS = [
    ["test_commands.py", "-k", "not launcher"],
    ["test_commands.py", "-k", "launcher"],
    ["test_device.py", "test_copies.py", "test_messages.py", "test_plans.py"],
    RUNTIME,
]
needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="the device is built by a C++ compiler, on Linux: install g++"
)


@pytest.mark.process
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("part", PARTS, ids=["commands", "launchers", "device", "runtime"])
def test_on_the_simulated_device(part: list[str]) -> None:
    built_library()
    run = command(part)
    done = subprocess.run(run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_wait_of_the_product_was_taken_out_once() -> None:
    """`make mutate` writes the table anew; here three of them are tried."""
    table = TABLE.read_text().splitlines()
    for mutant in mutants():
        rows = [row for row in table if row.startswith(row_of(mutant))]
        assert rows, f"{mutant} is not in {TABLE}: make mutate"
        assert all("survives: None" not in row for row in rows), rows


@pytest.mark.process
@pytest.mark.slow
@needs_compiler
def test_a_wait_that_is_taken_out_makes_a_test_fail() -> None:
    built_library()
    known = [each for each in mutants() if (each.function, each.code) not in SURVIVORS]
    for mutant, fate in try_all(known[:: len(known) // 3 + 1]):
        assert fate.killed, mutant
