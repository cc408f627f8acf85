"""Runs the tests of `inside/` in processes of their own, which have the simulated device.

A process has one accelerator for good, and autograd's threads are those of the devices that it had
at its first backward: so the other tests must not see this one.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.simulated_device.build import built_library, compiler
from tests.simulated_device.mutate import SURVIVORS, TABLE, mutants, row_of, try_all
from tests.simulated_device.run import HERE, ROOT, command, environment

PARTS = sorted(path.name for path in (HERE / "inside").glob("test_*.py"))
needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="no C++ compiler to build the device: install g++"
)


@pytest.mark.process
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("part", PARTS)
def test_on_the_simulated_device(part: str) -> None:
    built_library()
    run = [*command([part]), "--durations=5"]
    done = subprocess.run(run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


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
