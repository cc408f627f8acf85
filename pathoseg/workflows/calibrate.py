"""Measurement of what layers take here: the hardware file that plans are made by."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pathoseg.device import (
    device_count,
    device_name,
    memory_of,
    memory_told,
    pick_device,
)
from pathoseg.errors import PathosegError
from pathoseg.host_memory import keep_freed_memory
from pathoseg.interruption import Interruption
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.comm.link_benchmark import measure_links
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.cost.calibration_layers import draw_cases
from pathoseg.parallel.cost.device_hardware import roofline_of, shipped_name
from pathoseg.parallel.cost.features import family
from pathoseg.parallel.cost.hardware import Hardware, load_hardware, save_hardware
from pathoseg.parallel.cost.regression import TimedCase, calibrated, time_cases
from pathoseg.parallel.cost.timing import time_copies
from pathoseg.parallel.visit_time import measure_visit
from pathoseg.platform_support import physical_memory, processor_name, usable_cores
from pathoseg.progress import progress_bar, say
from pathoseg.training.distributed import Ranks, own_device

_ROUNDS, _QUICK_ROUNDS = 3, 2
_QUICK_SCALE = 0.15
_UNKNOWN_GPU = "a100"


def calibrate(out: Path, quick: bool = False, device: str | None = None) -> Path:
    """Time layers of many kinds and sizes, fit them, and write what was learnt.

    Under mpirun, srun or torchrun it times the links between ranks and the visits of stages, too;
    rank 0 times the layers.

    Args:
        out: The hardware file; the timings go beside it, as `.csv`.
        quick: Fewer layers and rounds, for a rougher fit.
        device: As for `pick_device`.

    Returns:
        The hardware file.

    Raises:
        PathosegError: The file cannot be written, or there is no such device, or it has too little
            memory.
        OSError: The disk is full.
        StoppedError: A signal came; nothing was written.
    """
    _check(out)
    with Ranks() as ranks, ranks.joined("auto", device=device) as transport:
        shared = {} if transport is None else _measure_together(transport, device)
        if transport is not None and transport.rank:
            transport.barrier()  # until rank 0 is done
            return out
        _calibrate(out, quick, pick_device(device), shared)
        if transport is not None:
            transport.barrier()
    return out


def _measure_together(transport: Transport, name: str | None) -> dict[str, Any]:
    """Time what takes several ranks; all of them call it.

    Returns:
        Fields of `Hardware`: the link of two ranks of one host (`inside`) and of two hosts
        (`between`), where there are such ranks, and the visit of a stage (`visit`).
    """
    device = own_device(transport, name)
    hosts = transport.gather(socket.gethostname())
    pairs = {
        "inside": next((at for at in range(1, len(hosts)) if hosts[at] in hosts[:at]), None),
        "between": next((at for at in range(1, len(hosts)) if hosts[at] != hosts[0]), None),
    }
    found: dict[str, Any] = {}
    for name, second in pairs.items():
        if second is not None:
            first = hosts.index(hosts[second]) if name == "inside" else 0
            link = found[name] = measure_links(transport, first, second, device)
            each = f"{link.alpha * 1e6:.3g} µs a message, {1e-9 / link.beta:.3g} GB/s"
            say(f"The link {name} {'a host' if name == 'inside' else 'hosts'}: {each}.")
    visit = found["visit"] = measure_visit(transport, device)
    say(f"A visit of a stage takes {visit * 1e3:.2g} ms beside its layers.")
    return found


def _calibrate(out: Path, quick: bool, device: torch.device, shared: Mapping[str, Any]) -> None:
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    keep_freed_memory()  # as ranks do, whose steps are planned
    torch.manual_seed(0)
    cases = draw_cases(_QUICK_SCALE if quick else 1.0)
    hint = "Free its memory (`nvidia-smi` shows who holds it), or take a larger device."
    with (
        Interruption("Nothing was written; run the same command again.") as interruption,
        progress_bar(f"timing on {device}", len(cases) * (rounds + 1), "layers") as bar,
        memory_told("A layer of the calibration", hint, device),
    ):

        def advance() -> None:
            bar.advance()
            interruption.raise_if_asked()

        timed = time_cases(cases, device, rounds, advance)
        bar.note("networks")
        asked = interruption.raise_if_asked
        known = _known(device, out.stem, shared)
        hardware = calibrated(known, timed, device, rounds, asked)
    timings = out.with_suffix(".csv")
    instead = ", in place of an earlier one" if out.exists() else ""
    save_hardware(hardware, out)
    write_text(timings, _table(timed))
    say(f"{len(timed)} layers were timed: {_rates(hardware)} ({hardware.measured}).")
    say(f"The fit is in {out}{instead}; the timings are in {timings}.")
    say(f"Plan by it with `pathoseg plan --hardware {out}`.")


def _check(out: Path) -> None:
    """Refuse a file that could not be written in the end, minutes later."""
    if out.suffix != ".json" or out.is_dir():
        raise PathosegError(f"{out} is no name of a hardware file.", "End it in .json.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise PathosegError(f"{out.parent} cannot be written.", "Choose another folder.")


def _known(device: torch.device, name: str, shared: Mapping[str, Any]) -> Hardware:
    """Describe the device before its layers are timed: its memory, links and visits."""
    if device.type != "cpu":
        title = device_name(device)
        like = shipped_name(title) or _UNKNOWN_GPU
        count, threads = device_count(), None
        told = memory_of(device)
        memory = physical_memory() // count if told is None else told[1]
    else:
        like, threads = "cpu", torch.get_num_threads()
        cores = len(usable_cores())
        count = max(1, cores // threads)
        memory = physical_memory() // count
        title = f"{processor_name()}, {threads} of {cores} cores"
    base = load_hardware(like)
    if device.type != "cpu" and shipped_name(title) is None:
        base = roofline_of(device) or base
    for link, takes in (("inside", "two ranks on a host"), ("between", "ranks on two hosts")):
        if link not in shared:
            say(f"The link {link} is not measured (it takes {takes}): it is that of `{base.name}`.")
    return replace(
        base,
        name=name,
        device=device.type,
        memory=memory,
        per_node=count,
        host=time_copies(device),
        threads=threads,
        measured=f"{date.today().isoformat()}, {title}, torch {torch.__version__}",
        fit=None,
        **shared,
    )


def _rates(hardware: Hardware) -> str:
    tera, giga = hardware.flops["float32"] / 1e12, hardware.bandwidth / 1e9
    return f"{tera:.3g} TFLOP/s in float32 and {giga:.3g} GB/s at best"


def _table(timed: Sequence[TimedCase]) -> str:
    """The timings as CSV, in seconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spread = ("minimum", "quartile", "median", "maximum")
    columns = [f"{name}_{figure}" for name in ("forward", "backward") for figure in spread]
    writer.writerow(["family", "outputs", "attributes", *columns])
    for item in timed:
        layer, timing = item.layer, item.timing
        shapes = json.dumps([value.shape for value in layer.outputs])
        seconds = (*astuple(timing.forward), *astuple(timing.backward))
        writer.writerow(
            [
                family(layer),
                shapes,
                json.dumps(dict(layer.attributes)),
                *(f"{s:.3g}" for s in seconds),
            ]
        )
    return text.getvalue()
