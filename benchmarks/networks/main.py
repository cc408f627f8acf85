"""Asks whether networks are read whole, in seconds and without memory, at tiles of 2,048 px."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.networks.alexnet import alexnet
from benchmarks.networks.amoebanet import AmoebaNetD
from benchmarks.networks.inception import InceptionV3
from benchmarks.networks.resnet import resnet50
from benchmarks.networks.transformer import transformer
from benchmarks.networks.vgg import vgg19
from pathoseg.models.resnet_v2 import ResNetV2
from pathoseg.models.unet import UNet
from pathoseg.parallel.graph.traced import Traced

_IMAGE = (1, 3, 2048, 2048)

# By name: how to make it, what it reads, and its published parameters (None where none are).
_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float | None]] = {
    "unet": (lambda: UNet(2, width=32), _IMAGE, None),
    "unet64": (lambda: UNet(2, width=64), _IMAGE, None),
    "resnet110_v2": (lambda: ResNetV2(2, depth=110), _IMAGE, None),
    "resnet1001_v2": (lambda: ResNetV2(2, depth=1001), _IMAGE, None),
    "vgg19": (vgg19, _IMAGE, 139_578_434),
    "alexnet": (alexnet, _IMAGE, 57_012_034),
    "resnet50": (resnet50, _IMAGE, 23_512_130),
    "inception_v3": (InceptionV3, _IMAGE, 24_348_900),
    "amoebanet_d_6_208": (lambda: AmoebaNetD(1000, 6, 208), _IMAGE, None),
    "amoebanet_d_18_208": (lambda: AmoebaNetD(1000, 18, 208), _IMAGE, 81.5e6),
    "amoebanet_d_18_416": (lambda: AmoebaNetD(1000, 18, 416), _IMAGE, 319.0e6),
    "transformer_12": (lambda: transformer(768, 12, 12), (1, 4096, 768), None),
}
_QUICK = ("unet", "resnet110_v2", "resnet50", "inception_v3", "amoebanet_d_6_208")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer networks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    Traced(nn.Linear(1, 1), torch.empty(1, 1))  # what torch loads with the first trace
    print(
        "| network | layers | seconds | CPU seconds | parameters | published | TFLOP | saved GiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in _QUICK if options.quick else _NETWORKS:
        make, shape, published = _NETWORKS[name]
        with torch.device("meta"):
            model = make()
        start, start_cpu = time.perf_counter(), time.process_time()
        graph = Traced(model, torch.empty(shape, device="meta")).graph
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        assert not graph.notes
        parameters = graph.parameter_bytes() // 4
        flops = sum(layer.forward.flops + layer.backward.flops for layer in graph.layers)
        print(
            f"| {name} | {len(graph.layers)} | {seconds:.1f} | {cpu:.1f} | {parameters:,} "
            f"| {f'{published:,.0f}' if published else '–'} | {flops / 1e12:.2f} "
            f"| {graph.saved_bytes() / 2**30:.1f} |"
        )
        figures[f"{name}_seconds"] = seconds
        figures[f"{name}_parameters"] = parameters
        if published:
            figures[f"{name}_parameters_to_published"] = parameters / published
    figures["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nMost memory of the process: {figures['peak_rss_gib']:.2f} GiB.")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
