"""The simulated device `sim` in Python: loaded into torch by `register`, asked by tests.

Processes that find the folder `autoload` beside this file on their path load the device when they
import torch, as they would a vendor's (torch's entry point `torch.backends`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tests.simulated_device.build import built_library

DEVICES = 2
NAME = "sim"


class Counts(NamedTuple):
    """Counts of the device's work since it was reset.

    Attributes:
        host_syncs: The host waited for the device.
        bytes_to_host: Copied from the device to the host.
        bytes_to_device: Copied from the host to the device.
        late_copies: Copies that were put off.
        kernels: Operators.
    """

    host_syncs: int
    bytes_to_host: int
    bytes_to_device: int
    late_copies: int
    kernels: int


def register() -> None:
    """Make `sim` a device of this process's torch, with its module `torch.sim`."""
    torch.ops.load_library(str(built_library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def is_loaded() -> bool:
    """Return True if this process has the device."""
    return bool(torch._C._get_privateuse1_backend_name() == NAME)


def reset(seed: int = 0) -> None:
    """Drop all work that is put off, and set counters, problems and limits to their beginning.

    Args:
        seed: Decides which queries find an event passed before anybody has waited for it.
    """
    torch.ops.sim.reset(seed)


def counts() -> Counts:
    """Return the device's counters."""
    return Counts(*(torch.ops.sim.counter(name) for name in Counts._fields))


def problems() -> list[str]:
    """Return the races and uses of freed memory that were found, those too that were raised."""
    return list(torch.ops.sim.problems())


def set_memory_limit(size: int, device: int = 0) -> None:
    """Let a device have `size` bytes; 0 is without limit."""
    torch.ops.sim.set_limit(device, size)


def set_passes(chance: float) -> None:
    """Set the chance that a query finds an event passed that need not be passed yet."""
    torch.ops.sim.set_passes(chance)


def _generator(device: Any) -> torch.Generator:
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    return _GENERATORS[torch.accelerator.current_device_index() if index in (None, -1) else index]


_GENERATORS: list[torch.Generator] = []


def _module() -> ModuleType:
    """Make what torch and its users expect of `torch.<device>`."""
    _GENERATORS.extend(torch.ops.sim.default_generator(index) for index in range(DEVICES))

    def manual_seed_all(seed: int) -> None:
        for generator in _GENERATORS:
            generator.manual_seed(seed)

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        "default_generators": tuple(_GENERATORS),
        "manual_seed": lambda seed: _generator(None).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    module = ModuleType(f"torch.{NAME}")
    for name, member in members.items():
        setattr(module, name, member)
    sys.modules[module.__name__] = module
    return module
