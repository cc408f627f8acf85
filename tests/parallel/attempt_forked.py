"""Runs `benchmarks/memory-wall/attempt.py` forked: what a benchmark starts itself is not."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_ATTEMPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory-wall" / "attempt.py"

if __name__ == "__main__":
    sys.path.insert(0, str(_ATTEMPT.parent))  # as for a program
    # As a module: a program would start its ranks by its own path.
    runpy.run_path(str(_ATTEMPT))["main"]()
