"""The figures of the device at hand: those that are shipped, or a roofline of its properties.

A CUDA device tells its multiprocessors, clock and memory bus; what a multiprocessor does in a clock
follows from its compute capability (NVIDIA's architecture white papers). T4 for example: 40 × 512
fused multiply-adds × 1.59 GHz are 65 TFLOP/s, and 256 bits × 2 × 5 GHz are 320 GB/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from pathoseg.device import cuda_properties, device_count
from pathoseg.parallel.cost.hardware import VISIT, Hardware, known_hardware
from pathoseg.parallel.schedule.costs import Link

# By compute capability: multiply-adds that a multiprocessor does in a clock, in float32 by its
# cores and in float16 by its tensor cores, dense and summed in float32.
_IN_A_CLOCK = {
    (7, 0): (64, 512),
    (7, 5): (64, 512),
    (8, 0): (64, 1024),
    (8, 6): (128, 512),
    (8, 9): (128, 512),
    (9, 0): (128, 2048),
    (10, 0): (128, 4096),
    (12, 0): (128, 512),
}
_AMPERE = 8  # from this major capability on, tensor cores have bfloat16, and TF32 at half its rate
# Bytes a second to the host, each way, by the PCI Express of the generation: 3, 4 and 5.
_PCIE = {7: 15.75e9, 8: 31.5e9, 9: 63e9, 10: 63e9, 12: 63e9}
_TO_HOST, _TO_NODE, _NETWORK = 1e-5, 1.5e-6, 12.5e9  # assumed, as in the files that are shipped
# Cards of a name with other clocks, memory or links than the module that is shipped.
_OTHER_FORM = {"pcie", "nvl", "laptop", "mobile", "max", "d", "mig"}


def shipped_name(title: str) -> str | None:
    """Return the name of the shipped figures of a product, such as `NVIDIA A100-SXM4-80GB`.

    Args:
        title: As the device tells it.
    """
    words = set(re.findall(r"[a-z0-9]+", title.lower()))
    for name in known_hardware():
        is_part = any(re.fullmatch(r"\d+[abcq]", word) for word in words)  # a vGPU, such as A40-8Q
        if set(name.split("-")) <= words and not words & _OTHER_FORM and not is_part:
            return name
    return None


def roofline_of(device: torch.device) -> Hardware | None:
    """Derive a device's figures from its properties; None where it tells too little.

    Links are assumed: a node's devices reach each other through the host by PCI Express.
    """
    told = cuda_properties(device)
    return None if told is None else _roofline(_Told.of(told), device_count())


@dataclass(frozen=True)
class _Told:
    """The properties of a CUDA device.

    Attributes:
        name: The product.
        capability: Compute capability.
        processors: Number of its multiprocessors.
        clock: Of these, in Hz.
        memory: Its bytes.
        bandwidth: Of its memory, in bytes a second.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    clock: float
    memory: int
    bandwidth: float

    @classmethod
    def of(cls, told: Any) -> _Told:
        return cls(
            told.name,
            (told.major, told.minor),
            told.multi_processor_count,
            1e3 * getattr(told, "clock_rate", 0),  # kHz; a torch without it tells none
            told.total_memory,
            # Two transfers a clock.
            2e3 * getattr(told, "memory_clock_rate", 0) * getattr(told, "memory_bus_width", 0) / 8,
        )


def _roofline(told: _Told, devices: int) -> Hardware | None:
    major = told.capability[0]
    if told.capability not in _IN_A_CLOCK or not (told.clock and told.bandwidth):
        return None
    cores, tensor = (
        2 * told.processors * told.clock * each for each in _IN_A_CLOCK[told.capability]
    )
    if "geforce" in told.name.lower():  # these sum in float32 at half the rate
        tensor /= 2
    flops = {"float32": cores, "float16": tensor}
    if major >= _AMPERE:
        flops |= {"float32": max(cores, tensor / 2), "bfloat16": tensor}
    host = Link(_TO_HOST, 1 / _PCIE[major])
    return Hardware(
        name=told.name,
        device="cuda",
        memory=told.memory,
        flops=flops,
        bandwidth=told.bandwidth,
        per_node=devices,
        inside=host,
        between=Link(_TO_NODE, 1 / _NETWORK),
        host=host,
        visit=VISIT,
    )
