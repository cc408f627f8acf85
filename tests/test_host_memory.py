"""Freed memory stays with a process that asks for it, and goes back otherwise."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import psutil, torch
from pathoseg.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
before = psutil.Process().memory_info().rss
tensors = [torch.ones(2**18) for _ in range(256)]
del tensors
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("word", "environment", "kept"),
    [
        ("keep", {}, True),
        ("leave", {}, False),
        ("keep", {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
    ],
)
def test_256_mib_are_kept_if_asked_for(word: str, environment: dict[str, str], kept: bool) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, word]
    answer = subprocess.run(command, env=own | environment, capture_output=True, check=True)
    assert (int(answer.stdout) > 2**27) == kept
