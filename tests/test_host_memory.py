"""Freed memory stays with a process that asks for it, and goes back otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

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

HEAPS = """
import ctypes, sys, threading
from pathoseg.host_memory import share_one_heap
if sys.argv[1] == "share":
    share_one_heap()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
def work():
    # More than a thread keeps for itself; while all hold it, none is given another's heap.
    blocks = [bytearray(4000) for _ in range(100)]
    meeting.wait()
meeting = threading.Barrier(3)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
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
    # An interpreter of its own: glibc reads the variable at its start alone, and the heap of a
    # forked process keeps what lies under blocks of the one that it was forked from.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, word]
    answer = subprocess.run(command, env=own | environment, capture_output=True, check=True)
    assert (int(answer.stdout) > 2**27) == kept


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
@pytest.mark.parametrize(("word", "one"), [("share", True), ("leave", False)])
def test_threads_share_one_heap_if_asked_to(word: str, one: bool, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    report = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", HEAPS, word, str(report)], env=own, check=True)
    assert (report.read_text().count("<heap nr=") == 1) == one
