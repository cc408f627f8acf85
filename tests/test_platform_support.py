"""Tests what takes the place of calls that only Linux or POSIX has, with those taken away."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st

from pathoseg import host_memory, platform_support
from pathoseg.errors import PathosegError
from pathoseg.parallel.comm import local_ranks
from pathoseg.platform_support import (
    available_memory,
    c_function,
    cores_to_use,
    follow_pointer,
    make_pointer,
    open_for_reading,
    parent_lives,
    physical_memory,
    process_space,
    processor_name,
    read_at,
    relative_path,
    sync_folder,
    touched_now,
    usable_cores,
)
from pathoseg.training.run_folder import bundle_of, make_run, run_to_resume
from tests.conftest import TINY, draw_disc

GIB = 2**30
Command = Callable[..., tuple[int, str]]


def refuses(error: Exception) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise error

    return call


@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400))))
def test_bytes_are_those_at_the_offset_with_pread_and_without(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, spans: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("read") / "file"
    path.write_bytes(data)
    descriptor = open_for_reading(path)
    try:
        for count, offset in spans:
            expected = data[offset : offset + count]
            assert read_at(descriptor, count, offset) == expected
            with pytest.MonkeyPatch.context() as patch:
                patch.delattr(os, "pread")
                assert read_at(descriptor, count, offset) == expected
    finally:
        os.close(descriptor)


def test_a_system_that_opens_no_folder_syncs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refuses(PermissionError()))
    with pytest.raises(PermissionError):
        sync_folder(tmp_path)
    monkeypatch.delattr(os, "O_DIRECTORY")
    sync_folder(tmp_path)


def test_the_file_systems_time_is_had_by_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    monkeypatch.setattr(os, "supports_fd", set[object]())
    first = touched_now(clock)
    os.utime(clock, (1, 1))
    assert first <= touched_now(clock) == clock.stat().st_mtime


@pytest.mark.parametrize("number", [None, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_pointer_leads_to_its_folder_where_there_are_links_and_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    runs, run = tmp_path / "runs", tmp_path / "elsewhere" / "Präparat 1"
    runs.mkdir()
    run.mkdir(parents=True)
    if number is not None:
        monkeypatch.setattr(os, "symlink", refuses(OSError(number, "no links here")))
    pointer = runs / "latest"
    make_pointer(pointer, relative_path(run, runs))
    assert pointer.is_symlink() == (number is None)
    assert follow_pointer(pointer).resolve() == run
    with pytest.raises(FileExistsError):
        make_pointer(pointer, run)


def test_a_full_disk_is_no_lack_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "symlink", refuses(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        make_pointer(tmp_path / "latest", Path("run"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\0", b"nowhere\n", b"x" * 5000, bytes(range(256)), b"a/b\nc"]
)
def test_a_file_that_names_no_folder_is_no_pointer(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes"
    file.write_bytes(content)
    for path in (file, tmp_path, tmp_path / "missing"):
        assert follow_pointer(path) == path


def test_a_folder_on_another_drive_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "relpath", refuses(ValueError("path is on mount 'D:'")))
    assert relative_path(tmp_path, Path("C:")) == tmp_path


def test_cores_and_memory_are_counted_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel = physical_memory()
    monkeypatch.delattr(os, "sysconf")
    assert physical_memory() == pytest.approx(by_kernel, rel=0.01)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == set(range(os.cpu_count() or 1))


def test_without_glibc_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert c_function("fflush") is not None
    assert c_function("no_such_function") is None
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", refuses(TypeError()))
    assert c_function("fflush") is None
    host_memory.keep_freed_memory()
    host_memory.share_one_heap()
    host_memory.give_back_freed_memory()


def test_a_system_without_proc_has_a_processor_and_one_process_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")  # it asks a program
    assert processor_name(tmp_path) == platform.machine()
    assert process_space(tmp_path) == {"boot": "", "pids": ""}
    assert parent_lives(os.getppid())
    assert not parent_lives(-1)


def _host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"}


def test_a_host_has_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_memory(_host(tmp_path, MEMINFO)) == 8 * GIB


def test_a_job_has_what_its_groups_leave_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job\n",
        "sys/fs/cgroup/slurm/job/memory.max": "max\n",
        "sys/fs/cgroup/slurm/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/slurm/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/slurm/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert available_memory(_host(tmp_path, MEMINFO | files)) == 2 * GIB


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB // 2}\n",
    }
    assert available_memory(_host(tmp_path, MEMINFO | files)) == 3 * GIB // 2


def test_without_proc_a_host_has_what_its_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = available_memory(tmp_path)
    assert found is not None
    assert 0 < found <= physical_memory()
    monkeypatch.setattr(psutil, "virtual_memory", refuses(OSError()))
    assert available_memory(tmp_path) is None


def test_runs_are_found_by_either_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform_support, "_HAS_LINKS", False)
    run = tmp_path / "elsewhere" / "run"
    make_run(run)
    (run / "config.toml").touch()
    assert run_to_resume(longer=False) == run
    (run / "model").mkdir()
    (run / "model" / "model.json").touch()
    (entry,) = Path("runs").iterdir()
    assert entry.is_file()
    assert bundle_of(entry).resolve() == run / "model"


@pytest.mark.parametrize("pointer", ["none", "dangling"])
def test_without_a_pointer_the_run_that_ended_last_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pointer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("b", "a", "going")):
        run = Path("runs", name)
        (run / "model").mkdir(parents=True)
        for file in ("config.toml", "model/model.json", *(["summary.json"] if age < 2 else [])):
            (run / file).touch()
            os.utime(run / file, (age, age))
    if pointer == "dangling":
        Path("runs/latest").symlink_to("gone")
    assert bundle_of(None) == Path("runs/a/model")


def test_ranks_that_a_system_cannot_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_SHELL", Path("no/shell"))
    with pytest.raises(PathosegError, match="Leave out --ranks"):
        local_ranks.start_local(2, ["true"])


@pytest.mark.process
@pytest.mark.slow
def test_training_and_inference_need_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """One process that has lost all of it gives the files of one that has not."""
    config = TINY.replace('"disc"', '"Drüse"').replace("epochs = 4", "epochs = 1")
    rng = np.random.default_rng(0)
    coarse = rng.integers(90, 230, (30, 34, 3), np.uint8).repeat(9, 0).repeat(9, 1)
    for folder in ("with", "without"):
        (tmp_path / folder / "slides").mkdir(parents=True)
        (tmp_path / folder / "tiny.toml").write_text(config, encoding="utf-8")
        for seed in range(4):
            draw_disc(tmp_path / folder / "slides" / f"Präparat{seed}.png", seed)
        tifffile.imwrite(
            tmp_path / folder / "slide.tif",
            coarse,
            tile=(64, 64),
            compression="jpeg",
            resolution=(20000, 20000),
            resolutionunit="CENTIMETER",
        )
    commands = [
        ["train", "--slides", "slides", "--config", "tiny.toml", "--out", "elsewhere/run"],
        ["infer", "slide.tif", "slides/Präparat1.png", "--assume-mpp", "0.5"],
    ]
    lost = Path(__file__).with_name("without_posix.py")
    subprocess.run(
        [sys.executable, str(lost), json.dumps(commands)], cwd=tmp_path / "without", check=True
    )
    monkeypatch.chdir(tmp_path / "with")
    for each in commands:
        code, said = command(*each)
        assert code == 0, said
    assert not (tmp_path / "without/runs/latest").is_symlink()
    assert (tmp_path / "with/runs/latest").is_symlink()
    compared = []
    for path in sorted((tmp_path / "with").rglob("*")):
        name = path.relative_to(tmp_path / "with")
        if path.suffix in {".safetensors", ".tiff", ".geojson", ".png"}:
            assert (tmp_path / "without" / name).read_bytes() == path.read_bytes(), name
            compared.append(path.suffix)
    assert {".safetensors", ".tiff", ".geojson", ".png"} == set(compared)
    monkeypatch.chdir(tmp_path / "without")  # what it left is read here, too
    code, said = command("infer", "slide.tif", "--model", "runs/latest", "--out", "again")
    assert code == 0, said
    mask = "slide/mask.ome.tiff"
    assert Path("again", mask).read_bytes() == Path("results", mask).read_bytes()


def _groups(root: Path, line: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"12:pids:/\n{line}\n")
    for name, content in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/", {}, 48),
        ("0::/", {"cpu.max": "max 100000"}, 48),
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "600000 100000"}, 6),
        ("0::/job", {"job/cpu.max": "250000 100000", "cpu.max": "900000 100000"}, 3),
        ("0::/job", {"job/cpu.max": "10000 100000"}, 1),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "-1"}, 48),
        (
            "4:cpuacct,cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "800000", "cpu/job/cpu.cfs_period_us": "100000"},
            8,
        ),
        ("0::/job", {"job/cpu.max": "much"}, 48),
    ],
)
def test_cores_are_those_of_the_tightest_control_group(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    root = _groups(tmp_path, line, files)
    assert cores_to_use(48, root=root) == cores
    assert cores_to_use(48, processes=3, root=root) == max(1, cores // 3)


def test_cores_are_no_more_than_affinity_or_slurm_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(platform_support, "usable_cores", lambda: set(range(10)))
    assert cores_to_use(root=tmp_path) == 10
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert cores_to_use(root=tmp_path) == 8
    assert cores_to_use(64, processes=4, root=tmp_path) == 8, "each rank is a task"
    assert cores_to_use(64, processes=4, in_task=4, root=tmp_path) == 2, "one task has four ranks"
    assert cores_to_use(4, processes=4, root=tmp_path) == 1
