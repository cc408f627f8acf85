"""One system in its own process segments a slide with given weights, and prints what it took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Segments the slide into a folder; what is imported and loaded before is not timed.
Segment = Callable[[], None]

NOT_INSTALLED = 3  # the exit code


def pathoseg(job: dict[str, Any], out: Path) -> Segment:
    """`pathoseg infer`, which also writes outlines, an overlay and areas."""
    import os

    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as its command line sets it

    from pathoseg.workflows.infer import InferArguments, infer

    sys.path.insert(0, str(Path(__file__).parent))  # for the factory
    config = out.parent / "pathoseg.toml"
    config.write_text('[tissue]\nmethod = "all"\n')

    def segment() -> None:
        slide, bundle, factory = Path(job["slide"]), Path(job["bundle"]), job["factory"]
        infer(InferArguments([slide], bundle, out, config, factory=factory, command_line=[]))

    return segment


def tiatoolbox(job: dict[str, Any], out: Path) -> Segment:
    """TIAToolbox's SemanticSegmentor, which writes class indices to a zarr group."""
    import torch

    # torchvision's wheel is built for CUDA and finds none of its operators beside a CPU torch.
    operators: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # untyped in torch
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from tiatoolbox.models.engine.io_config import IOSegmentorConfig
    from tiatoolbox.models.engine.semantic_segmentor import SemanticSegmentor
    from tiatoolbox.models.models_abc import ModelABC

    class Model(ModelABC):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.jit.load(job["script"])  # type: ignore[no-untyped-call]  # untyped in torch

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.net(images)
            return answer

        @staticmethod
        def infer_batch(model: Any, batch: torch.Tensor, *, device: str) -> Any:
            with torch.inference_mode():
                images = batch.to(device).permute(0, 3, 1, 2).float()
                return model(images).permute(0, 2, 3, 1).numpy()

        @staticmethod
        def postproc(image: Any) -> Any:
            return image.argmax(-1)  # as its own networks do

    resolution = [{"units": "mpp", "resolution": job["mpp"]}]
    config = IOSegmentorConfig(
        input_resolutions=resolution,
        output_resolutions=resolution,
        patch_input_shape=(job["tile"], job["tile"]),
        patch_output_shape=(job["tile"], job["tile"]),
        stride_shape=(job["stride"], job["stride"]),
        save_resolution=resolution[0],
    )
    segmentor = SemanticSegmentor(model=Model(), batch_size=1, verbose=False)

    def segment() -> None:
        segmentor.run(
            images=[Path(job["slide"])],
            patch_mode=False,
            auto_get_mask=False,
            ioconfig=config,
            output_type="zarr",
            save_dir=out,
            device="cpu",
        )

    return segment


def monai(job: dict[str, Any], out: Path) -> Segment:
    """MONAI's PatchInferer with ZarrAvgMerger, which writes probabilities to a zarr array."""
    import torch
    from monai.inferers import PatchInferer, WSISlidingWindowSplitter, ZarrAvgMerger

    net = torch.jit.load(job["script"])  # type: ignore[no-untyped-call]  # untyped in torch
    splitter = WSISlidingWindowSplitter(
        patch_size=(job["tile"], job["tile"]),
        overlap=job["tile"] - job["stride"],
        reader="OpenSlide",
        level=job["level"],
    )
    inferer = PatchInferer(
        splitter=splitter,
        merger_cls=ZarrAvgMerger,
        batch_size=1,
        store=str(out / "merged.zarr"),
    )

    def segment() -> None:
        out.mkdir()
        with torch.inference_mode():
            inferer(job["slide"], net)

    return segment


SYSTEMS = {"pathoseg": pathoseg, "tiatoolbox": tiatoolbox, "monai": monai}


def main() -> None:
    name, job, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    try:
        segment = SYSTEMS[name](job, out)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    wall, cpu = time.perf_counter(), time.process_time()
    segment()
    taken = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    # Not getrusage: what the process that started this one held by then would count, too.
    status = Path("/proc/self/status").read_text()
    taken["peak_gib"] = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    print("\n" + json.dumps(taken))


if __name__ == "__main__":
    main()
