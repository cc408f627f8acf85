"""Tests what is read of a host's memory, on hosts made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.parallel.runtime.memory_check import available_memory, too_small

GIB = 2**30


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"}


def test_a_host_has_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory(_write(tmp_path, MEMINFO)) == 8 * GIB


def test_a_job_has_what_its_groups_leave_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job\n",
        "sys/fs/cgroup/slurm/job/memory.max": "max\n",
        "sys/fs/cgroup/slurm/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/slurm/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/slurm/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert available_memory(_write(tmp_path, MEMINFO | files)) == 2 * GIB


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    assert available_memory(_write(tmp_path, MEMINFO | files)) == 3 * GIB // 2


def test_a_system_that_does_not_tell_is_not_refused(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    assert too_small([("a", 10**15, None)]) is None


def test_a_small_host_is_refused_with_both_figures() -> None:
    ranks = [("a", 4 * GIB, 8 * GIB), ("b", 7 * GIB, 8 * GIB), ("a", 4 * GIB, 9 * GIB)]
    assert too_small(ranks) is None
    refused = too_small([*ranks, ("a", GIB, 8 * GIB)])
    assert refused is not None
    assert "9 GiB of tensors in the memory of host a, which has 8 GiB left" in str(refused)


def test_where_the_host_computes_the_refusal_says_how_to_take_less() -> None:
    refused = too_small([("a", 3 * GIB, 2 * GIB)], computes=True)
    assert refused is not None
    assert "Training takes about 3 GiB of the memory of host a, which has 2 GiB" in str(refused)
    assert '[parallel] memory = "1.8 GiB"' in refused.hint


def test_this_host_tells() -> None:
    found = available_memory()
    if found is None:
        pytest.skip("no /proc/meminfo here")
    assert found > 0
