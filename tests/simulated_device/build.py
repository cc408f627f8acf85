"""Builds the simulated device once for each of its sources, compilers and versions of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from filelock import FileLock

SOURCES = Path(__file__).with_name("csrc")


def compiler() -> str | None:
    """Return the C++ compiler of this machine; None without one, or where this is no Linux."""
    return shutil.which(os.environ.get("CXX", "c++")) if sys.platform == "linux" else None


def built_library() -> Path:
    """Return the library, built if it is not there yet: 10 s of one core, once.

    It lies in the user's cache folder, so that test runs, their workers and the processes that
    they start share it; one of them builds it.

    Raises:
        RuntimeError: There is no C++ compiler, or it failed.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler: install g++, or name one in CXX")
    torch_folder = Path(torch.__file__).parent
    # What torch.utils.cpp_extension would give, whose import takes a second.
    command = [
        *(found, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
        *(f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"),
        *(str(SOURCES / "device.cpp"), f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    key = hashlib.sha256(repr((command, torch.__version__, version.stdout)).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "pathoseg-tests" / "simulated-device"
    library = folder / f"{key.hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not library.exists():
            partial = library.with_suffix(".partial")
            made = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(f"{found} cannot build {SOURCES}:\n{made.stderr[-4_000:]}")
            partial.replace(library)
    return library
