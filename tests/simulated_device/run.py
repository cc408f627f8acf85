"""Runs tests of `inside/` in a process with the simulated device.

python -m tests.simulated_device.run [files of inside/] [options of pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forked_starts.sitecustomize import SERVER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
AUTOLOAD = HERE / "autoload"
_FORKED_STARTS = ROOT / "tests" / "forked_starts"


def environment(overlay: Path | None = None) -> dict[str, str]:
    """Return the environment in which `import torch` loads the device.

    Args:
        overlay: A folder that is searched ahead of the repository, for another `pathoseg`. The
            fork server has this one: with an overlay it is asked for nothing.
    """
    folders = [overlay or _FORKED_STARTS, ROOT, AUTOLOAD]
    server = {SERVER: ""} if overlay else {}
    return {**os.environ, **server, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs pytest on files, or on all of `inside/`.

    Args:
        arguments: Files of `inside/`, other test files from the repository's root on, and options.
    """
    files = [str(HERE / "inside" / each) for each in arguments if each.startswith("test_")]
    files += [str(ROOT / each) for each in arguments if each.startswith("tests/")]
    options = [each for each in arguments if not each.startswith(("test_", "tests/"))]
    plugins = ["-p", "no:cacheprovider", "-p", "tests.simulated_device.clean_device", "-n0"]
    pytest = [sys.executable, "-m", "pytest", *plugins]
    return [*pytest, *(files or [str(HERE / "inside")]), *options]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(sys.argv[1:]), cwd=ROOT, env=environment()).returncode)
