"""The hardware and the memory of a plan, where none is named: those of the devices at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pathoseg.config import Config, ParallelConfig
from pathoseg.device import Precision
from pathoseg.errors import PathosegError
from pathoseg.models.unet import UNet
from pathoseg.parallel.cost.cost_model import Roofline
from pathoseg.parallel.cost.hardware import Hardware, known_hardware, load_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.partition import cut
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.schedule.costs import Link
from pathoseg.training import read_network, step_plan
from pathoseg.training.distributed import least_memory
from pathoseg.training.read_network import ReadNetwork
from pathoseg.training.step_plan import (
    Prices,
    agreed_plan,
    dtype_on,
    find,
    find_hardware,
    memory_to_plan,
    with_dtype,
    with_wire,
)
from tests.parallel.comm.thread_ranks import ThreadTransport, run_ranks

_GIB = 2**30


@pytest.mark.parametrize(
    ("title", "roofline", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "t4", "h100"),
        ("NVIDIA A100-SXM4-40GB", "t4", "a100"),
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
    monkeypatch.setattr(step_plan, "memory_of", lambda device: (30 * _GIB, 40 * _GIB))
    assert find_hardware(ParallelConfig(hardware="v100")).name == "v100"
    assert find_hardware(ParallelConfig(device="cpu")).name == "cpu"
    capsys.readouterr()
    if found is None:
        with pytest.raises(PathosegError, match=f"Nothing is known of this machine's {title}"):
            find_hardware(ParallelConfig())
        return
    hardware = find_hardware(ParallelConfig())
    assert hardware.name == found
    if found != "roofline":
        assert hardware.memory == 40 * _GIB  # the card's, not the 80 of its kind
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
        Prices(ReadNetwork(UNet(2, width=8, depth=2), config, dtype, "cuda"), hardware).one(2, 1024)
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


def _config(tile: int = 1024, batch: int = 1, **parallel: Any) -> Config:
    return replace(
        Config(),
        tiles=replace(Config().tiles, tile=tile),
        train=replace(Config().train, batch=batch),
        parallel=ParallelConfig(**{"hardware": "v100", "ranks": 2, **parallel}),
    )


def _prices(config: Config, model: nn.Module | None = None) -> Prices:
    assert config.parallel.hardware is not None
    hardware = load_hardware(config.parallel.hardware)
    network = ReadNetwork(model or UNet(2, width=16, depth=1), config, None, "cuda")
    return Prices(network, hardware)


def test_the_planner_cuts_tiles_where_that_is_faster() -> None:
    prices = _prices(_config())
    found = find(prices, _GIB)
    whole = find(_prices(_config(shards=1)), _GIB)
    assert (found.shards, whole.shards) == (2, 1)
    assert found.plans[0].seconds < 0.9 * whole.plans[0].seconds
    assert f"whole tiles take {whole.plans[0].seconds:.4g} s a step" in found.reason
    assert (whole.reason, found.whole[0].shards, found.whole[0].ranks) == ("", 2, 2)
    assert found.whole[0].input == (1, 3, 1024, 1024)
    assert find(_prices(_config(shards=2)), _GIB).reason == "", "it was asked for"


@pytest.mark.parametrize(
    ("parallel", "batch"),
    [
        ({}, 2),  # data parallelism shares the same work, and sends no halos
        ({"order": "1f1b"}, 1),
        ({"stages": 2}, 1),
        ({"parked": ("optimizer",)}, 1),
    ],
    ids=str,
)
def test_tiles_stay_whole(parallel: Mapping[str, Any], batch: int) -> None:
    prices = _prices(_config(batch=batch, **parallel))
    assert find(prices, _GIB).shards == 1
    assert not prices.gathered, "no strip was priced, which takes a while"


def test_an_order_that_is_named_is_kept_in_strips_where_it_fits_in_no_other_way() -> None:
    prices = _prices(_config(order="sequential", recompute=False, offload="none"))
    need = find(prices, 2**40).plans[0].memory[0]
    found = find(prices, int(0.7 * need))
    assert (found.shards, found.plans[0].order) == (2, "sequential")
    assert found.reason == "whole tiles do not fit"
    assert find(prices, need).shards == 1


def test_networks_that_need_whole_tiles_are_not_cut_unasked() -> None:
    class Whole(UNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.cumsum(2))

    assert find(_prices(_config(), Whole(2, width=16, depth=1)), _GIB).shards == 1
    asked = _prices(_config(shards=2), Whole(2, width=16, depth=1))
    assert find(asked, _GIB).shards == 2
    assert asked.gathered == {2: {"cumsum": "cumsum"}}


def test_ranks_agree_on_strips_and_a_run_goes_on_with_those_that_it_began_with() -> None:
    config = _config(memory="1GiB")
    model = UNet(2, width=16, depth=1)

    def planned(before: Plan | None = None) -> list[Plan]:
        return run_ranks(2, lambda transport: agreed_plan(model, config, transport, before).plan)

    first, second = planned()
    assert first == second
    assert (first.shards, first.ranks) == (2, 2)
    by_ranks = {each.ranks: each for each in find(_prices(_config(shards=1)), _GIB).plans}
    assert planned(by_ranks[2])[1].shards == 1
    alone = by_ranks[1]
    assert planned(alone)[0].shards == 2, "on other ranks it is chosen anew"


def test_each_rank_reads_the_network_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []

    class _Counted(Traced):
        def __init__(self, model: nn.Module, example: torch.Tensor, autocast: Any) -> None:
            read.append(tuple(example.shape))
            super().__init__(model, example, autocast)

    monkeypatch.setattr(read_network, "Traced", _Counted)
    config = _config(tile=32, batch=2, memory="1GiB", shards=1)
    models = [UNet(2, width=4, depth=1) for _ in range(2)]
    agreed = run_ranks(2, lambda transport: agreed_plan(models[transport.rank], config, transport))
    assert read == [(1, 3, 32, 32)] * 2
    assert [each.traced.model for each in agreed] == models
    assert [bool(each.expected) for each in agreed] == [True, False]


def test_a_profile_times_layers_as_they_lie_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Traced] = []

    class _Timed(Roofline):
        def __init__(self, traced: Traced, otherwise: Roofline, **_: Any) -> None:
            super().__init__(load_hardware("v100"))
            seen.append(traced)

    monkeypatch.setattr(step_plan, "Profiled", _Timed)
    _prices(_config(tile=32)).one(1, 32, profile=True)
    [traced] = seen
    assert traced.strides["images"] == ((3 * 32 * 32, 1, 3 * 32, 3),)
    convolutions = [each for each in traced.graph.layers if each.kind == "convolution"]
    assert {traced.strides[each.name][0][1] for each in convolutions} == {1}
