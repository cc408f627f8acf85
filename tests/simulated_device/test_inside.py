"""Runs the tests of `inside/` in processes of their own, which have the simulated device.

A process has one accelerator for good, and autograd's threads are those of the devices that it had
at its first backward: so the other tests must not see this one.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.simulated_device.build import built_library, compiler
from tests.simulated_device.run import HERE, ROOT, command, environment

PARTS = sorted(path.name for path in (HERE / "inside").glob("test_*.py"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the device: install g++")
@pytest.mark.parametrize("part", PARTS)
def test_on_the_simulated_device(part: str) -> None:
    built_library()
    run = [*command([part]), "--durations=5"]
    done = subprocess.run(run, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
