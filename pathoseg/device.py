"""The device that computes: which there are, its arithmetic, memory, streams and random numbers.

An accelerator is any device of which torch knows how to have streams, events and memory: CUDA,
ROCm (which torch calls `cuda`), XPU, MPS, or one that registers itself as PrivateUse1. torch has
one kind of accelerator in a process (`torch.accelerator`). What only one kind has stands here, so
that no other file asks which kind it is; NCCL alone (parallel/comm/nccl.py) is of CUDA.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pathoseg.errors import MemoryExhaustedError, PathosegError, is_out_of_memory
from pathoseg.memory_size import memory_text, parse_memory

# ImageNet's channel statistics: what most published pathology models are scaled by.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


CPU = torch.device("cpu")
# One queue of work, in memory that is the host's, too: nothing to copy beside it, nothing to pin.
_UNIFIED = "mps"


def pick_device(name: str | None = None) -> torch.device:
    """Return the device of this name; None is the accelerator where there is one, else the CPU.

    Args:
        name: Such as `cpu`, `cuda`, `cuda:1`, `xpu`, `mps` or that of a registered PrivateUse1
            device; without a number it is the current device of its kind.

    Raises:
        PathosegError: There is none of this name; the hint names those that there are.
    """
    accelerator = _accelerator()
    if name is None:
        return CPU if accelerator is None else torch.device(accelerator)
    kind, _, number = name.partition(":")
    here = _names()
    if name in here or (kind == accelerator and not number):
        return torch.device(name)
    raise PathosegError(
        f"There is no device {name} here.",
        f"Name one of {', '.join(here)}, or none to take {accelerator or 'cpu'}.",
    )


def _accelerator() -> str | None:
    """Return the kind of accelerator of this machine, None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or not torch.accelerator.device_count() else found.type


def _names() -> list[str]:
    """Return the names of all devices here, the CPU first."""
    kind = _accelerator()
    return ["cpu", *(f"{kind}:{at}" for at in range(device_count()) if kind is not None)]


def device_count() -> int:
    """Return the number of accelerators that this process sees; 0 where the CPU computes."""
    return 0 if _accelerator() is None else torch.accelerator.device_count()


def share_devices(device: torch.device, rank: int) -> torch.device:
    """Give one of a host's ranks its device, and make it the current one.

    Args:
        device: As picked: a number says that all ranks take this one.
        rank: Number of this rank among those of its host; devices are dealt out in turn.
    """
    if device.type == "cpu":
        return device
    if str(device) == device.type:
        device = torch.device(device.type, rank % device_count())
    torch.accelerator.set_device_index(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the product's name of an accelerator, or its name in torch where it tells none."""
    with suppress(AttributeError, NotImplementedError):  # MPS and most PrivateUse1 tell none
        return str(_module(device).get_device_name(device))
    return str(device)


def device_identity(device: torch.device) -> str:
    """Return what tells an accelerator from the others of its host, to whatever process sees it.

    Its number in a process does not where each process is shown devices of its own (Slurm's
    `--gpus-per-task`); it is returned where a device has no UUID.
    """
    with suppress(AttributeError, NotImplementedError):  # MPS and most PrivateUse1 have none
        return str(_module(device).get_device_properties(device).uuid)
    return str(device)


def cuda_properties(device: torch.device) -> Any | None:
    """Return what NVIDIA's driver tells of a CUDA device; None for any other, ROCm's too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_properties(device)


def _module(device: torch.device) -> Any:
    """Return the module of torch that has what only this kind of device has."""
    return torch.get_device_module(device)


Precision = Literal["auto", "none", "bf16", "fp16"]


def amp_dtype(device: torch.device, wanted: Precision) -> torch.dtype | None:
    """Return the reduced precision to compute in on a device that is here (`choose_precision`)."""
    return choose_precision(device.type, wanted, lambda: _reduced_dtypes(device))


def choose_precision(
    kind: str, wanted: Precision, has: Callable[[], Iterable[torch.dtype]]
) -> torch.dtype | None:
    """Return the reduced precision to compute in, or None for float32 (always on CPUs).

    By "auto" it is the device's best. On MPS it is float32, as neither what float16 saves there nor
    what it does to a training has been measured.

    Args:
        kind: The device's type.
        wanted: What the user asks for.
        has: Returns the reduced precisions that the device has, the better one first.
    """
    if kind == "cpu" or wanted == "none" or (wanted == "auto" and kind == _UNIFIED):
        return None
    if wanted == "auto":
        return next(iter(has()), None)
    return torch.float16 if wanted == "fp16" else torch.bfloat16


def _reduced_dtypes(device: torch.device) -> Sequence[torch.dtype]:
    """Return the reduced precisions that an accelerator has, the better one first."""
    module = _module(device)
    if hasattr(module, "is_bf16_supported"):
        # What imitates bfloat16 (a V100, a T4) does so several times slower than it has float16.
        has_bfloat16 = module.is_bf16_supported(including_emulation=False)
        return (torch.bfloat16, torch.float16) if has_bfloat16 else (torch.float16,)
    with suppress(AttributeError):  # that of a PrivateUse1 device, where it has autocast
        had = module.get_amp_supported_dtype()
        return [dtype for dtype in (torch.bfloat16, torch.float16) if dtype in had]
    return ()


def autocast_types() -> set[str]:
    """Return the types of devices for which a network may switch autocast on or off."""
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu", "cuda", "xpu", "mps", *([accelerator.type] if accelerator else [])}


# What CUDA's autocast computes in float32, by the names of its functions, and CPUs' does not
# ("CUDA Ops that can autocast to float32" in torch's reference of `torch.amp`), as far as networks
# have it between their layers.
_IN_FLOAT32 = {
    *("group_norm", "layer_norm", "rms_norm", "normalize", "norm", "softmax", "log_softmax"),
    *("softmin", "softplus", "cumsum", "cumprod", "sum", "prod", "exp", "log", "logsumexp", "pow"),
    *("__pow__", "reciprocal", "rsqrt", "cosine_similarity", "cdist", "interpolate", "upsample"),
}


class _AcceleratorLists(TorchFunctionMode):
    """Casts to float32 what an accelerator's autocast does, and that of CPUs leaves as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_wide, (args, kwargs))
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_short else value


@contextmanager
def imitated_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Make a context in which fake tensors are computed in a precision as an accelerator would.

    They are a CPU's, as this torch need not know the accelerator; so a model that switches off an
    accelerator's autocast by its name is traced with it.

    Args:
        dtype: The precision; None leaves all as it is.
    """
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype), _AcceleratorLists():
        yield


def imitated_recomputation(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context for a backward behind `imitated_autocast`.

    What it computes again under autocast, as a checkpoint does, is cast as in the forward.

    Args:
        dtype: As there.
    """
    return nullcontext() if dtype is None else _AcceleratorLists()


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are taken: float64, or float32 on MPS, which has no other."""
    return torch.float32 if device.type == _UNIFIED else torch.float64


def training_layout(kind: str) -> torch.memory_format:
    """Return the layout of images and kernels in which a step takes least on a type of device.

    It is channels-last; on CPUs without AVX-512, whose backward of channels-last convolutions takes
    up to twice as long, torch's usual one (docs/performance.md).
    """
    if kind == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return torch.contiguous_format
    return torch.channels_last


# ---- memory


def updates_at_once(kind: str) -> bool:
    """Return True if torch's optimizers update all parameters on such a device by one call
    (`foreach`), which has temporaries of all; else they take one parameter after the other."""
    return kind not in ("cpu", _UNIFIED)


def fuses_updates(device: torch.device) -> bool:
    """Return True if the device has torch's fused kernels of optimizers."""
    key = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}.get(device.type, "PrivateUse1")
    has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return bool(has("aten::_fused_adamw_", key) and has("aten::_fused_sgd_", key))


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Return the free and all bytes of an accelerator's memory; None where it does not tell."""
    for source in (torch.accelerator, _module(device)):
        ask = getattr(source, "get_memory_info", None) or getattr(source, "mem_get_info", None)
        if ask is not None:
            with _untold():  # there, but not for this device
                free, total = ask(device)
                return int(free), int(total)
    with suppress(AttributeError):
        limit = int(_module(device).recommended_max_memory())  # of MPS
        return max(0, limit - int(_module(device).driver_allocated_memory())), limit
    return None


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors took on an accelerator; None where it does not tell."""
    return _allocated("max_memory_allocated", device)


def _allocated(which: str, device: torch.device) -> int | None:
    for source in (_module(device), torch.accelerator):
        # Each torch has it in one of the two, and MPS in none.
        with _untold():
            return int(getattr(source, which)(device))
    return None


@contextmanager
def _untold() -> Iterator[None]:
    """Suppress the errors of a torch that has no such figure; not those of a device that fails."""
    try:
        yield
    except torch.AcceleratorError:  # a RuntimeError, too
        raise
    except (AttributeError, RuntimeError):
        pass


_TRIED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMGT]iB)")
_MARGIN = 0.1  # of what fits, left to what no plan counts


def memory_that_fits(
    error: BaseException, device: torch.device, planned: int | None = None
) -> int | None:
    """Return the bytes that another plan may fill, after a device has run out of memory.

    They are what this process had and what was free, and no more than was planned less what was
    missing; less a tenth.

    Args:
        error: What torch has raised, while tensors that it found are still held.
        device: The device.
        planned: Bytes by the plan that has failed, or None.

    Returns:
        None where it was not an accelerator's memory, or the device does not tell.
    """
    memory, held = None, None
    if isinstance(error, torch.OutOfMemoryError) and device.type != "cpu":
        memory, held = memory_of(device), _allocated("memory_allocated", device)
    if memory is None or held is None:
        return None
    free, _ = memory
    fits = held + free
    if planned:
        tried = _TRIED.search(str(error))
        missing = max(0, parse_memory(tried[1]) - free) if tried else 0
        fits = min(fits, planned - missing)
    return int(max(0, fits) * (1 - _MARGIN))


def let_go_of_memory() -> None:
    """Free what is not used any more of an accelerator's memory, kept by torch or by circles."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def is_pinned_for(device: torch.device) -> bool:
    """Return True if copies between the host and this device are best from pinned memory."""
    return device.type not in ("cpu", _UNIFIED)


class PinnedMemory:
    """Host memory that an accelerator copies from and to; it is pinned until the object goes.

    On CUDA it is pinned as it is, where torch's own pinned memory would be rounded up to a power of
    two.

    Args:
        size: In bytes.
        device: The accelerator.

    Attributes:
        bytes: The memory, uint8.

    Raises:
        PathosegError: The host has not as much memory to pin.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        if device.type != "cuda":
            try:
                self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise _cannot_pin(size, device, str(error).splitlines()[0]) from error
            return
        self.bytes = torch.empty(size, dtype=torch.uint8)
        failed = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)  # type: ignore[no-untyped-call]  # untyped in torch
        if int(failed):
            raise _cannot_pin(size, device, f"error {int(failed)}")
        # The process's end unpins by itself.
        weakref.finalize(self, _unpin, self.bytes).atexit = False


def _cannot_pin(size: int, device: torch.device, why: str) -> PathosegError:
    return PathosegError(
        f"The device {device} cannot pin {memory_text(size)} of host memory ({why}).",
        "Give the job more host memory, or raise its limit of locked memory (ulimit -l).",
    )


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.synchronize()  # a copy may be on its way
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]  # untyped in torch


# ---- streams and events


def has_streams(device: torch.device) -> bool:
    """Return True if a device has queues of work that run beside each other."""
    return device.type not in ("cpu", _UNIFIED)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that this thread computes on."""
    return torch.accelerator.current_stream(device)


def record(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """Return an event at the present end of the stream that this thread computes on."""
    event = torch.Event(device, enable_timing=is_timed)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done all work that it was given."""
    torch.accelerator.synchronize(device)


@contextmanager
def tuned_kernels(device: torch.device, is_limited: bool) -> Iterator[None]:
    """Make a context in which cuDNN times its kernels for each new shape and keeps the fastest.

    It is for work whose shapes stay the same. They may take more workspace than a plan counts.

    Args:
        device: Where it runs; nothing changes for others than CUDA devices.
        is_limited: Whether memory is: then cuDNN chooses by its own rules, as it does without.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or (device.type == "cuda" and not is_limited)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# ---- random numbers


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators: that of the CPU, and of an accelerator its own."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(_module(device).get_rng_state(device))
    return states


def set_random_states(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Set the generators to what `random_states` returned."""
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        _module(device).set_rng_state(states[1], device)


def seed_random(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of an accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        with torch.accelerator.device_index(device.index):
            _module(device).manual_seed(seed)


# ---- pixels, there and back


def to_input(
    images: NDArray[np.uint8],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Scale pixels to a network's input, on the device: uint8 travels, a quarter of float32.

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
    if is_pinned_for(device):
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
def memory_told(
    what: str, hint: str, device: torch.device, can_be_planned: bool = False
) -> Iterator[None]:
    """Turn running out of the device's or the host's memory into an error that says what to change.

    Args:
        what: What did not fit.
        hint: What to change.
        device: The device that computes.
        can_be_planned: Whether a plan could make it fit into an accelerator: then the error is
            MemoryExhaustedError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = "into memory"
        if isinstance(error, torch.OutOfMemoryError):
            where = "on the GPU"
            if (memory := memory_of(device)) is not None:
                free, total = (size / 2**30 for size in memory)
                where += f" ({free:.1f} of {total:.1f} GiB are free)"
        said = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"{what} does not fit {where}: {said}."
        if can_be_planned and (fits := memory_that_fits(error, device)) is not None:
            raise MemoryExhaustedError(problem, hint, fits) from None
        raise PathosegError(problem, hint) from None


class Arrival:
    """A tensor on its way to the host.

    Args:
        tensor: On any device. On the CPU its memory is shared, not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.Event | None = None
        self._host = tensor
        if has_streams(tensor.device):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = record(tensor.device)
        elif tensor.device.type != "cpu":
            self._host = tensor.cpu()

    @property
    def is_here(self) -> bool:
        """Return True if `array` would not wait."""
        return self._copied is None or self._copied.query()

    def array(self) -> NDArray[Any]:
        """Wait until the tensor is on the host, and return it as an array.

        The array of a tensor that was on the CPU shares its memory.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()
