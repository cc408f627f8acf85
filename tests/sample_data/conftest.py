"""The generator's own folder on the import path, as for `python sample_data/make_samples.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "sample_data"


@pytest.fixture
def sample_data() -> Path:
    """The folder with the generator and the slides it wrote."""
    return FOLDER


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import `make_samples` and its neighbours."""
    monkeypatch.syspath_prepend(str(FOLDER))
