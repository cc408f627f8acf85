"""The hardware and the memory of a plan, where none is named: those of the devices at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import Config, ParallelConfig
from pathoseg.device import Precision
from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.hardware import Hardware, known_hardware, load_hardware
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.schedule.costs import Link
from pathoseg.training import step_plan
from pathoseg.training.distributed import least_memory
from pathoseg.training.step_plan import (
    dtype_on,
    find_hardware,
    memory_to_plan,
    price_one,
    with_dtype,
    with_wire,
)
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

_GIB = 2**30


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


@pytest.mark.parametrize("name", known_hardware())
def test_messages_are_priced_by_the_wire(name: str) -> None:
    """Test that copies to the host and back count, where the transport does not read the device."""
    hardware = load_hardware(name)
    assert with_wire(hardware, {hardware.device}) == hardware
    wired = with_wire(hardware, set())
    if hardware.device == "cpu":
        assert wired == hardware
        return
    assert replace(wired, inside=hardware.inside, between=hardware.between) == hardware

    def seconds(link: Link) -> float:
        return link.latency(0, 1) + link.transfer(0, 1, 2**26)

    copies = 2 * seconds(hardware.host)
    assert seconds(wired.between) == pytest.approx(seconds(hardware.between) + copies)
    assert seconds(wired.inside) >= copies + seconds(load_hardware("cpu").inside)
    assert seconds(wired.inside) >= copies + seconds(hardware.inside)


@given(st.integers(1, 2**40))
def test_a_plan_leaves_a_tenth_and_a_gibibyte_of_an_accelerator(free: int) -> None:
    assert memory_to_plan(ParallelConfig(), free, "cpu") == free
    assert memory_to_plan(ParallelConfig(memory="3GiB"), free, "cuda") == 3 * _GIB
    if free * 0.9 <= _GIB:
        with pytest.raises(PathosegError, match="are free on a device, and a plan leaves"):
            memory_to_plan(ParallelConfig(), free, "cuda")
    else:
        planned = memory_to_plan(ParallelConfig(), free, "cuda")
        assert free - planned == pytest.approx(0.1 * free + _GIB, abs=2)


# By rank: which device it has, and what that device has free. A device without a figure tells none.
@pytest.mark.parametrize(
    ("devices", "free", "least"),
    [
        (["cuda:0", "cuda:1", "cuda:2"], {"cuda:0": 60, "cuda:1": 20, "cuda:2": 80}, 20),
        (["cuda:0", "cuda:1", "cuda:0"], {"cuda:0": 60, "cuda:1": 50}, 30),
        (["cuda:0", "cuda:0", "cuda:0"], {"cuda:0": 60}, 20),
        (["cpu", "cpu"], {}, 32),
        (["mps:0"], {}, 64),
    ],
)
def test_the_fullest_device_bounds_the_plan(
    devices: list[str],
    free: Mapping[str, int],
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory(device: torch.device) -> tuple[int, int] | None:
        return (free[str(device)], 100) if str(device) in free else None

    monkeypatch.setattr("pathoseg.device.device_identity", str)
    monkeypatch.setattr("pathoseg.device.memory_of", memory)
    monkeypatch.setattr("pathoseg.training.distributed.physical_memory", lambda: 64)

    def ask(transport: ThreadTransport) -> int:
        return least_memory(transport, torch.device(devices[transport.rank]))

    assert run_ranks(len(devices), ask) == [least] * len(devices)


@pytest.mark.parametrize(
    ("device", "flops", "wanted", "found"),
    [
        ("cpu", ["float32", "bfloat16"], "bf16", None),
        ("cuda", ["float32", "float16", "bfloat16"], "auto", torch.bfloat16),
        ("cuda", ["float32", "float16"], "auto", torch.float16),
        ("cuda", ["float32", "float16"], "none", None),
        ("mps", ["float32", "float16"], "auto", None),
        ("xpu", ["float32"], "fp16", torch.float16),
        ("sim", ["float32"], "auto", None),
    ],
)
def test_a_plan_is_of_the_precision_in_which_the_run_computes(
    device: str,
    flops: list[str],
    wanted: Precision,
    found: torch.dtype | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = {name: float(place) for place, name in enumerate(flops, 1)}
    hardware = replace(load_hardware("v100"), device=device, flops=rates)
    assert dtype_on(hardware, wanted) == found
    name = str(found).removeprefix("torch.")
    assert with_dtype(hardware, found).flops == ({} if found is None else {name: 1.0}) | rates
    is_told = found is not None and name not in flops
    assert ("priced at the rate of float32" in capsys.readouterr().err) == is_told


def test_less_than_float32_takes_less_memory_messages_and_time() -> None:
    hardware, config = load_hardware("h100"), Config()
    whole, half = (
        price_one(UNet(2, width=8, depth=2), 2, 1024, config, hardware, dtype)
        for dtype in (None, torch.bfloat16)
    )
    bounds = whole.cutter.balance(2, whole.weights()).bounds
    costs = [each.costs(cut(each.graph, bounds), 2) for each in (half, whole)]
    for one, other in zip(*(each.stages for each in costs), strict=True):
        assert one.weights == other.weights
        assert one.activations < 0.75 * other.activations
        assert one.forward < 0.75 * other.forward
    sent = [sum(each.sizes.values()) for each in costs]
    assert sent[1] == 2 * sent[0]
