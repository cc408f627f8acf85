"""The device that computes: choosing it, its arithmetic, and bringing uint8 pixels onto it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.errors import PathosegError, is_out_of_memory

# ImageNet's channel statistics: what most published pathology models are scaled by.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def pick_device() -> torch.device:
    """The first CUDA device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def amp_dtype(
    device: torch.device, wanted: Literal["auto", "none", "bf16", "fp16"]
) -> torch.dtype | None:
    """The reduced precision to compute in, or None for float32 (always on CPUs)."""
    if device.type != "cuda" or wanted == "none":
        return None
    if wanted == "fp16":
        return torch.float16
    if wanted == "auto" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


def to_input(
    images: NDArray[np.uint8],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Scales pixels to a network's input, on the device: uint8 travels, a quarter of float32.

    Args:
        images: (n, height, width, 3), RGB.
        mean: Per channel, of pixels in 0…1.
        std: Likewise.
        device: Where the result lies.
        layout: How the result lies in memory.

    Returns:
        (n, 3, height, width), float32.
    """
    count, height, width, _ = images.shape
    # Whole rows: three channels are too few for vector instructions.
    pixels = torch.from_numpy(images).view(count * height, width * 3)
    if device.type == "cuda":
        pixels = pixels.pin_memory()
    pixels = pixels.to(device, non_blocking=True)
    shift, scale = (torch.tensor(each, device=device).repeat(width) * 255 for each in (mean, std))
    scaled = pixels.sub(shift).div_(scale).view(count, height, width, 3)
    return scaled.permute(0, 3, 1, 2).contiguous(memory_format=layout)


Images = NDArray[np.uint8] | Mapping[str, NDArray[np.uint8]]
Inputs = torch.Tensor | dict[str, torch.Tensor]


def to_inputs(
    images: Images,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    layout: torch.memory_format = torch.contiguous_format,
) -> Inputs:
    """Apply `to_input` to the images of a network's only input, or to those of each by name."""
    if isinstance(images, Mapping):
        return {name: to_input(each, mean, std, device, layout) for name, each in images.items()}
    return to_input(images, mean, std, device, layout)


def answer(model: torch.nn.Module, inputs: Inputs) -> Any:
    """Call a network with its only input, or with several by name."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@contextmanager
def memory_told(what: str, hint: str) -> Iterator[None]:
    """Turns running out of memory, the device's or the host's, into an error that says what to
    change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = "into memory"
        if isinstance(error, torch.OutOfMemoryError):
            free, total = torch.cuda.mem_get_info()
            where = f"on the GPU ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free)"
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise PathosegError(f"{what} does not fit {where}: {said}.", hint) from None


class Arrival:
    """A tensor on its way to the host.

    Args:
        tensor: On any device. On the CPU its memory is shared, not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._copied.record()

    @property
    def is_here(self) -> bool:
        """Return True if `array` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def array(self) -> NDArray[Any]:
        """The tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()
