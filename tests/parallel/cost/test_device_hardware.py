"""The figures of a device at hand: its shipped file by name, or a roofline of its properties."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pathoseg.parallel.cost import device_hardware
from pathoseg.parallel.cost.device_hardware import roofline_of, shipped_name
from pathoseg.parallel.cost.hardware import Hardware, load_hardware

# File: title, capability, multiprocessors, boost clock and memory clock in MHz, bus in bits.
CARDS = {
    "v100": ("Tesla V100-SXM2-16GB", (7, 0), 80, 1530, 877, 4096),
    "t4": ("Tesla T4", (7, 5), 40, 1590, 5001, 256),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, 1593, 5120),
    "a10": ("NVIDIA A10", (8, 6), 72, 1695, 6251, 384),
    "a40": ("NVIDIA A40", (8, 6), 84, 1740, 7251, 384),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, 10501, 384),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2505, 10001, 384),
    "l40s": ("NVIDIA L40S", (8, 9), 142, 2520, 9001, 384),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1830, 2619, 5120),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_roofline_of_a_shipped_device_is_that_of_its_datasheet(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet, found = load_hardware(name), _roofline(name, monkeypatch)
    assert found is not None
    assert shipped_name(CARDS[name][0]) == name
    assert found.bandwidth == pytest.approx(sheet.bandwidth, rel=0.02)
    for dtype, flops in found.flops.items():
        assert flops == pytest.approx(sheet.flops[dtype], rel=0.02), dtype
    assert set(sheet.flops) - set(found.flops) <= {"float64"}


def _roofline(name: str, monkeypatch: pytest.MonkeyPatch, **other: object) -> Hardware | None:
    title, (major, minor), processors, clock, memory_clock, bus = CARDS[name]
    told = {
        "name": title, "major": major, "minor": minor, "multi_processor_count": processors,
        "clock_rate": 1000 * clock, "memory_clock_rate": 1000 * memory_clock,
        "memory_bus_width": bus, "total_memory": 10**9, **other,
    }  # fmt: skip
    properties = SimpleNamespace(**{key: value for key, value in told.items() if value is not None})
    monkeypatch.setattr(device_hardware, "cuda_properties", lambda device: properties)
    monkeypatch.setattr(device_hardware, "device_count", lambda: 2)
    return roofline_of(torch.device("cuda"))


def test_a_device_that_tells_too_little_has_no_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _roofline("a40", monkeypatch, clock_rate=None) is None
    assert _roofline("a40", monkeypatch, memory_bus_width=None) is None
    assert _roofline("a40", monkeypatch, major=99) is None
    assert roofline_of(torch.device("cuda")) is None
    monkeypatch.undo()
    assert roofline_of(torch.device("mps")) is None


@pytest.mark.parametrize(
    "title",
    [
        "NVIDIA A10G",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 NVL",
        "Quadro RTX 6000",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A40-8Q",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    ],
)
def test_another_product_is_not_taken_for_a_shipped_one(title: str) -> None:
    assert shipped_name(title) is None
