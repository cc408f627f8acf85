"""The device that computes: picked by name, dealt out to ranks, and asked what it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from pathoseg import device as devices
from pathoseg.device import (
    CPU,
    Arrival,
    amp_dtype,
    autocast_types,
    memory_of,
    peak_memory,
    pick_device,
    random_states,
    seed_random,
    set_random_states,
    share_devices,
    tuned_kernels,
    widest,
)
from pathoseg.errors import PathosegError

Here = Callable[..., SimpleNamespace]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Stands in for a machine with so many accelerators of one kind, and for torch's module."""

    def put(kind: str | None, count: int = 1, **module: Any) -> SimpleNamespace:
        used = SimpleNamespace(current=0, **module)
        found = None if kind is None else torch.device(kind)
        for name, stand_in in {
            "current_accelerator": lambda check_available=False: found,
            "device_count": lambda: count if kind else 0,
            "set_device_index": lambda device: setattr(used, "current", device.index),
        }.items():
            monkeypatch.setattr(torch.accelerator, name, stand_in)
        monkeypatch.setattr(torch, "get_device_module", lambda device: used)
        return used

    return put


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_the_accelerator_is_picked_or_what_is_named(kind: str, here: Here) -> None:
    here(kind, 2)
    assert pick_device() == pick_device(kind) == torch.device(kind)
    assert pick_device(f"{kind}:1") == torch.device(kind, 1)
    assert pick_device("cpu") == CPU
    for other in (f"{kind}:2", "npu", "cpu:0", *({"cuda", "xpu", "mps"} - {kind})):
        with pytest.raises(PathosegError, match=f"no device {other} here") as refusal:
            pick_device(other)
        named = f"one of cpu, {kind}:0, {kind}:1, or none to take {kind}."
        assert refusal.value.hint.endswith(named)


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 0)])
def test_without_an_accelerator_the_cpu_computes(kind: str | None, count: int, here: Here) -> None:
    here(kind, count)
    assert pick_device() == CPU
    assert share_devices(CPU, 3) == CPU
    with pytest.raises(PathosegError, match="no device cuda here") as refusal:
        pick_device("cuda")
    assert "cpu, or none to take cpu" in refusal.value.hint


def test_ranks_take_the_devices_of_their_host_in_turn(here: Here) -> None:
    used = here("xpu", 2)
    for rank in range(5):
        assert share_devices(pick_device("xpu"), rank) == torch.device("xpu", rank % 2)
        assert used.current == rank % 2
        assert share_devices(pick_device("xpu:1"), rank) == torch.device("xpu", 1)
        assert used.current == 1


def test_the_precision_is_one_that_the_device_has(here: Here) -> None:
    bfloat16, float16 = torch.bfloat16, torch.float16
    assert amp_dtype(CPU, "bf16") is None
    for kind in ("cuda", "xpu"):
        for native, auto in ((True, bfloat16), (False, float16)):
            here(kind, is_bf16_supported=lambda including_emulation, it=native: it)
            device = pick_device()
            assert amp_dtype(device, "auto") is auto
            assert amp_dtype(device, "none") is None
            assert (amp_dtype(device, "bf16"), amp_dtype(device, "fp16")) == (bfloat16, float16)
    here("mps")
    assert amp_dtype(pick_device(), "auto") is None
    assert amp_dtype(pick_device(), "fp16") is float16
    for module, auto in (
        ({}, None),
        ({"get_amp_supported_dtype": lambda: [float16]}, float16),
        ({"get_amp_supported_dtype": lambda: [float16, bfloat16]}, bfloat16),
        ({"get_amp_supported_dtype": list}, None),
    ):
        here("privateuseone", **module)
        assert amp_dtype(pick_device(), "auto") is auto


def test_what_a_device_does_not_tell_is_none(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here("mps", recommended_max_memory=lambda: 100, driver_allocated_memory=lambda: 30)
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    monkeypatch.delattr(torch.accelerator, "max_memory_allocated", raising=False)
    assert memory_of(pick_device()) == (70, 100)
    assert peak_memory(pick_device()) is None
    here("cuda", mem_get_info=lambda device: (1, 2), max_memory_allocated=lambda device: 3)
    assert memory_of(pick_device()) == (1, 2)
    assert peak_memory(pick_device()) == 3
    here("privateuseone")
    assert memory_of(pick_device()) is None


def test_a_device_that_fails_is_not_one_that_does_not_tell(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> NoReturn:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    here("cuda", mem_get_info=fails, max_memory_allocated=fails)
    monkeypatch.delattr(torch.accelerator, "get_memory_info", raising=False)
    for figure in (memory_of, peak_memory):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            figure(pick_device())


def test_random_numbers_are_drawn_again(here: Here) -> None:
    seeds = list[int]()
    kept = [torch.tensor([7])]
    here(
        "mps",
        get_rng_state=lambda device: kept[0],
        set_rng_state=lambda state, device: kept.__setitem__(0, state + 1),
        manual_seed=seeds.append,
    )
    for device in (CPU, pick_device()):
        before = random_states(device)
        first = torch.rand(3)
        set_random_states(device, before)
        assert torch.equal(torch.rand(3), first)
    assert kept == [torch.tensor([8])]
    seed_random(CPU, 5)
    first = torch.rand(3)
    seed_random(pick_device(), 5)
    assert torch.equal(torch.rand(3), first)
    assert seeds == [5]


def test_the_host_is_a_device_like_others() -> None:
    assert widest(CPU) is torch.float64
    assert widest(torch.device("mps")) is torch.float32
    assert {"cpu", "cuda"} <= autocast_types()
    arrival = Arrival(torch.arange(3))
    assert arrival.is_here
    np.testing.assert_array_equal(arrival.array(), [0, 1, 2])
    assert not devices.is_pinned_for(CPU)
    assert not devices.has_streams(CPU)


@pytest.mark.parametrize("before", [False, True])
def test_kernels_are_tuned_on_cuda_where_memory_is_not_limited(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    for name, is_limited in product(("cpu", "cuda"), (False, True)):
        with suppress(ZeroDivisionError), tuned_kernels(torch.device(name), is_limited):
            assert torch.backends.cudnn.benchmark == (before or (name == "cuda" and not is_limited))
            raise ZeroDivisionError
        assert torch.backends.cudnn.benchmark == before
