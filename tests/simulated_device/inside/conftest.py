"""Only a process with the simulated device runs these tests: see test_inside.py."""

from __future__ import annotations

from tests.simulated_device import device

collect_ignore_glob = [] if device.is_loaded() else ["test_*.py"]
