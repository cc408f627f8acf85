"""Commands with `--device sim`: what they write is what the CPU writes, to the bit."""

from __future__ import annotations

import csv
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import tifffile
import torch

from pathoseg.config import Config, ParallelConfig, TileConfig, TrainConfig
from pathoseg.device import memory_that_fits
from pathoseg.errors import PathosegError
from pathoseg.models.bundle import load_bundle
from pathoseg.models.unet import UNet
from pathoseg.parallel.comm.launcher import Choice, World
from pathoseg.parallel.comm.local_ranks import start_local
from pathoseg.parallel.cost.hardware import load_hardware, save_hardware
from pathoseg.training import distributed
from pathoseg.training.one_device import OneDevice
from pathoseg.training.step_plan import agreed_plan
from tests.parallel.comm.thread_ranks import run_ranks
from tests.simulated_device import device as sim

Command = Callable[..., tuple[int, str]]
_MIB = 2**20


def _train(command: Command, device: str, out: str, *more: object) -> tuple[int, str]:
    return command(
        *("train", "--slides", "slides", "--config", "exact.toml", "--out", out),
        *("--device", device, *more),
    )


@pytest.fixture
def exact(toy_slides: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`exact.toml`, which trains as `tiny.toml` but in float32, as the CPU does."""
    # The simulated device trains in channels-last; so does a CPU with AVX-512.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    text = Path("tiny.toml").read_text().replace("epochs = 4", 'epochs = 2\namp = "none"')
    Path("exact.toml").write_text(text)
    return toy_slides


def _figures(run: str) -> list[dict[str, str]]:
    """The rows of metrics.csv without what a clock or the device's kind decides."""
    with Path(run, "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    return [{k: v for k, v in row.items() if "loss" in k or "dice" in k} for row in rows]


def _weights(run: str) -> dict[str, torch.Tensor]:
    return load_bundle(Path(run, "model"))[0].state_dict()


def test_training_and_inference_are_those_of_the_cpu(exact: Path, command: Command) -> None:
    for device in ("cpu", "sim"):
        code, output = _train(command, device, device)
        assert code == 0, output
        code, output = command(
            *("infer", "slides/slide3.png", "--config", "exact.toml", "--model", "cpu"),
            *("--out", f"results-{device}", "--device", device),
        )
        assert code == 0, output
    assert _figures("sim") == _figures("cpu") != []
    torch.testing.assert_close(_weights("sim"), _weights("cpu"), rtol=0, atol=0)
    masks = [Path(f"results-{device}", "slide3", "mask.ome.tiff") for device in ("cpu", "sim")]
    assert np.array_equal(*map(tifffile.imread, masks))
    assert sim.counts().kernels > 1_000


def test_a_run_in_mixed_precision_goes_on_as_if_nothing_had_happened(
    exact: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("exact.toml").write_text(Path("exact.toml").read_text().replace("none", "bf16"))
    assert _train(command, "sim", "calm")[0] == 0
    step, steps = OneDevice.step, 0

    def stopped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise KeyboardInterrupt
        return step(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(OneDevice, "step", stopped)
        assert _train(command, "sim", "resumed")[0] == 130
    code, output = _train(command, "sim:1", "resumed", "--resume")
    assert code == 0, output
    assert _figures("resumed") == _figures("calm")
    torch.testing.assert_close(_weights("resumed"), _weights("calm"), rtol=0, atol=0)


def test_a_device_without_memory_is_given_a_plan_with_less(exact: Path, command: Command) -> None:
    """A second attempt keeps less between forward and backward, and learns the same."""
    save_hardware(replace(load_hardware("v100"), device="sim"), Path("sim.json"))
    text = Path("exact.toml").read_text().replace("tile = 32", "tile = 128")
    Path("exact.toml").write_text(text + '\n[parallel]\nhardware = "sim.json"\n')
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert _train(command, "sim", "calm")[0] == 0
    needed = torch.accelerator.max_memory_allocated() - before
    gc.collect()
    sim.set_memory_limit(torch.accelerator.memory_allocated() + needed * 3 // 4)
    code, output = _train(command, "sim", "tight")
    assert code == 0, output
    assert "sim out of memory" in output
    assert output.count("Once more, with a plan of") == 1
    assert _figures("calm")
    for found, expected in zip(_figures("tight"), _figures("calm"), strict=True):
        assert {k: float(v) for k, v in found.items()} == pytest.approx(
            {k: float(v) for k, v in expected.items()}, rel=1e-4
        )


def test_ranks_of_a_launcher_whose_device_has_no_memory_make_a_second_attempt(
    exact: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They join once more, keep less between forward and backward, and learn the same."""
    save_hardware(replace(load_hardware("v100"), device="sim"), Path("sim.json"))
    text = Path("exact.toml").read_text().replace("tile = 32", "tile = 128")
    text = text.replace("width = 4", "width = 16")
    parallel = '[parallel]\nhardware = "sim.json"\norder = "1f1b"\ndevice = "sim"\n'
    Path("exact.toml").write_text(f"{text}\n{parallel}")
    script = str(Path(__file__).with_name("exhausted_rank.py"))
    choices: tuple[Choice, ...] = ("gloo", "mpi")
    for how, choice in (("calm", "gloo"), *(("tight", each) for each in choices)):
        train = ("train", "--slides", "slides", "--config", "exact.toml", "--out", how + choice)
        code = start_local(2, [sys.executable, script, how, *train], choice)
        output = "".join(capfd.readouterr())
        assert code == 0, output
        assert output.count("Once more, with a plan of") == (how == "tight"), output
        assert output.count("sim out of memory") == 0
        assert _figures(how + choice)
        for found, expected in zip(_figures(how + choice), _figures("calmgloo"), strict=True):
            assert {k: float(v) for k, v in found.items()} == pytest.approx(
                {k: float(v) for k, v in expected.items()}, rel=1e-4
            )


def test_what_fits_is_what_was_held_and_free_less_what_was_missing() -> None:
    device = torch.device("sim", 0)
    gc.collect()
    sim.set_memory_limit(torch.accelerator.memory_allocated() + 10 * _MIB)
    own = torch.accelerator.memory_allocated() + 10 * _MIB
    held = torch.empty(7 * _MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        torch.empty(5 * _MIB, dtype=torch.uint8, device=device)
    del held  # as a part of it is, once the error is caught
    for planned, fits in ((None, own), (20 * _MIB, own), (8 * _MIB, 8 * _MIB)):
        assert memory_that_fits(refused.value, device, planned) == int(fits * 0.9)
    held = torch.empty(7 * _MIB, dtype=torch.uint8, device=device)
    assert memory_that_fits(refused.value, device, 8 * _MIB) == int(6 * _MIB * 0.9)
    assert memory_that_fits(refused.value, torch.device("cpu")) is None
    assert memory_that_fits(MemoryError(), device) is None
    del held


@pytest.mark.parametrize("doing", ["train", "infer"])
def test_out_of_memory_is_one_error_with_the_figures(
    doing: str, exact: Path, command: Command, tiny_bundle: Callable[..., Path]
) -> None:
    gc.collect()  # what earlier commands have left would be freed within this one
    sim.set_memory_limit(torch.accelerator.memory_allocated() + _MIB // 4)
    if doing == "train":
        code, output = _train(command, "sim", "never")
    else:
        code, output = command(
            *("infer", "slides/slide0.png", "--assume-mpp", 0.5, "--model", tiny_bundle()),
            *("--device", "sim", "--batch", 16, "--out", "never"),
        )
    assert code == 2, output
    assert "sim out of memory" in output
    assert "are free" in output
    assert "Traceback" not in output


def test_a_plan_is_of_what_the_fullest_device_has_free(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(
        tiles=TileConfig(tile=64),
        train=TrainConfig(batch=2),
        parallel=ParallelConfig(device="sim", hardware="v100", order="data-parallel"),
    )
    gc.collect()
    sim.set_memory_limit(torch.accelerator.memory_allocated() + 8 * 2**30, 0)
    sim.set_memory_limit(3 * 2**30, 1)
    plans = run_ranks(2, lambda transport: agreed_plan(UNet(2, width=4), config, transport).plan)
    assert plans[0] == plans[1]
    told = "3 GiB are free on the fullest device, 1.7 GiB are planned with."
    assert capsys.readouterr().err.count(told) == 1
    sim.set_memory_limit(2**30, 1)
    with pytest.raises(PathosegError, match="1 GiB are free on a device, and a plan leaves"):
        run_ranks(2, lambda transport: agreed_plan(UNet(2, width=4), config, transport))


def test_a_rank_has_its_device_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI that knows accelerators takes the device that is current when it begins."""
    found = []

    def join_wire(choice: Choice, world: World) -> NoReturn:
        found.append((world.rank, torch.accelerator.current_device_index()))
        raise PathosegError("The ranks do not meet.", "This is a test.")

    monkeypatch.setattr(distributed, "join_wire", join_wire)
    for rank, name in [(0, None), (1, None), (3, "sim"), (0, "sim:1"), (1, "sim:0")]:
        host = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
        for key, value in host.items():
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{key}", str(value))
        torch.accelerator.set_device_index(0)
        silent = pytest.raises(SystemExit if rank else PathosegError)
        with silent, distributed.Ranks() as ranks, ranks.joined("mpi", device=name):
            raise AssertionError
    torch.accelerator.set_device_index(0)
    assert found == [(0, 0), (1, 1), (3, 1), (0, 1), (1, 0)]
