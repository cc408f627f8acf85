"""The hardware that a plan is priced by, where none is named: that of the device at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pathoseg.config import ParallelConfig
from pathoseg.errors import PathosegError
from pathoseg.parallel.cost.hardware import Hardware, load_hardware
from pathoseg.training import step_plan
from pathoseg.training.step_plan import find_hardware


@pytest.mark.parametrize(
    ("title", "roofline", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "t4", "h100"),
        ("NVIDIA H100 PCIe", "t4", "roofline"),
        ("NVIDIA Something", "t4", "roofline"),
        ("Something else", None, None),
    ],
)
def test_an_accelerator_has_shipped_figures_or_its_roofline_or_is_refused(
    title: str,
    roofline: str | None,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def derived(device: torch.device) -> Hardware | None:
        return None if roofline is None else replace(load_hardware(roofline), name="roofline")

    monkeypatch.setattr(step_plan, "pick_device", lambda name: torch.device(name or "cuda"))
    monkeypatch.setattr(step_plan, "device_name", lambda device: title)
    monkeypatch.setattr(step_plan, "roofline_of", derived)
    assert find_hardware(ParallelConfig(hardware="v100")).name == "v100"
    assert find_hardware(ParallelConfig(device="cpu")).name == "cpu"
    capsys.readouterr()
    if found is None:
        with pytest.raises(PathosegError, match=f"Nothing is known of this machine's {title}"):
            find_hardware(ParallelConfig())
        return
    assert find_hardware(ParallelConfig()).name == found
    assert ("pathoseg calibrate" in capsys.readouterr().err) == (found == "roofline")
