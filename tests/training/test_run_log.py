"""The log of a run is written whatever its classes are called and whatever the locale is."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pathoseg.training import run_log


def test_metrics_are_utf_8_whatever_the_locale_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "SummaryWriter", Mock())
    opened = Path.open

    def in_ascii(path: Path, mode: str = "r", *how: Any, **more: Any) -> Any:
        return opened(path, mode, *how, **({} if "b" in mode else {"encoding": "ascii"}) | more)

    monkeypatch.setattr(Path, "open", in_ascii)
    log = run_log.RunLog(tmp_path, ["val_dice_Drüse"], 0)
    decomposed = "val_dice_Dru\u0308se"
    log.epoch([{"epoch": 1, "step": 2, decomposed: 0.5}])
    head, row = (tmp_path / "metrics.csv").read_bytes().decode().splitlines()
    assert head.endswith(",val_dice_Drüse")
    assert row.startswith("1,2,")
    assert row.endswith(",0.5")
