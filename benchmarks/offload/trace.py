"""A Chrome trace of one step whose copies run under its kernels."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.offload.caps import recomputed_and_rest
from benchmarks.offload.ours import graph_of, ours
from benchmarks.offload.subject import DEVICE, Subject, settle
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.activation_policy import ActivationPolicy

_WARM_UP = 2  # steps


def write_trace(path: Path, quick: bool) -> None:
    """Norms recomputed, the rest offloaded, two microbatches in flight: kernels and copies."""
    subject = Subject(lambda: UNet(2, width=8 if quick else 64), 64 if quick else 1024, 2, 2)
    cheap, rest = recomputed_and_rest(graph_of(subject))
    step = ours(subject, ActivationPolicy(rest, cheap)).step
    for number in range(_WARM_UP):
        step(number)
    settle()
    activities = [ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as told:
        step(_WARM_UP)
        settle()
    told.export_chrome_trace(str(path))
    print(f"\nOne step, kernels and copies: {path} (open it at ui.perfetto.dev).")
