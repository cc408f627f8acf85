"""The page on the configuration says what the source says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_the_one_that_the_source_writes() -> None:
    written = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    assert (DOCS / "configuration.md").read_text() == written, (
        "run python docs/make_configuration.py"
    )
