"""What every test may use: the real data, where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Examples are not timed: this suite runs on machines with two busy cores. They are the same in
# every run, so that a change is judged and not the luck of the draw.
settings.register_profile("pathoseg", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("pathoseg")

_HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real slides and annotations; skips where it is not at hand."""
    folder = Path(os.environ.get("PATHOSEG_DATA", _HERE.parents[1] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not at hand: neither $PATHOSEG_DATA nor {folder}")
    return folder
