"""Checks of a command's input that need no PyTorch: it takes over a second to import.

The workflows check again whatever they use. Under a launcher (mpirun, srun) they alone check, so
that one rank tells what is wrong and not all.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pathoseg.config import FORMAT, Config, ParallelConfig
from pathoseg.config_file import UNNUMBERED, load_config
from pathoseg.errors import PathosegError
from pathoseg.models.model_options import check_side
from pathoseg.parallel.comm.launcher import find_world
from pathoseg.parallel.planning.orders import find_order
from pathoseg.training.distributed import silent
from pathoseg.training.labelled_slides import find_labelled_slides, slide_files
from pathoseg.training.run_folder import (
    CONFIG,
    LIMITS,
    bundle_of,
    named_run,
    new_run,
    refuse_overwriting,
    run_to_resume,
)

_FEW = 16  # slides that are read twice, here and by the workflow

Flags = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingArguments:
    """The arguments of a training.

    Attributes:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        out: The run's folder; None takes a new one, or the newest unfinished one.
        resume: Go on with a run.
        trace: On several ranks, draw what they do in one step.
        overwrite: Replace the run that `out` holds, once all input is read.
        verbose: Tell in the end where the time went.
        ends_process: After a signal, once the run is saved, end the process where a layer under way
            takes longer than two seconds; else that layer is waited for.
    """

    config_file: Path | None
    flags: Flags
    out: Path | None = None
    resume: bool = False
    trace: bool = False
    overwrite: bool = False
    verbose: bool = False
    ends_process: bool = False

    def refuse_overwriting(self) -> None:
        """Refuse to write where a run is, see `run_folder.refuse_overwriting`."""
        refuse_overwriting(self.out, self.resume, self.overwrite)


def check_training_input(asked: TrainingArguments) -> None:
    """Refuse a training that cannot begin: its run, slides, annotations, first weights or device.

    Raises:
        PathosegError: The first of these that cannot be used.
    """
    config = load_config(asked.config_file, asked.flags)
    if find_world().launcher is not None:
        return
    wanted = parallel_options(asked)
    asked.refuse_overwriting()
    if not asked.resume:
        new_run(named_run(asked.out) if asked.out else None, asked.overwrite)
        if config.model.encoder_weights is None:  # else the two contradict each other
            check_first_weights(config.train.start_from)
        if config.train.start_from is None and config.model.encoder_weights is None:
            _check_tile(config)  # else sizes of the network may follow from the weights
        _check_slides(config, are_read=config.train.start_from is None)
    check_device(wanted.device)


def check_evaluation_input(config_file: Path | None, flags: Flags, model: Path | None) -> None:
    """Refuse an evaluation without a model, or of a folder without slides.

    Args:
        config_file, flags, model: As for `evaluate`.

    Raises:
        PathosegError: The first of these that cannot be used.
    """
    config = load_config(config_file, flags)
    bundle_of(model)
    if config.data.slides:  # else they are those of the model's run
        _check_slides(config, are_read=False)
    check_device(config.parallel.device)


def check_folder_input(config_file: Path | None, flags: Flags) -> None:
    """Refuse a folder without slides, for `check`, which tells all else slide by slide.

    Raises:
        PathosegError: No folder is given, or it holds no slides.
    """
    _check_slides(load_config(config_file, flags), are_read=False)


def parallel_options(asked: TrainingArguments) -> ParallelConfig:
    """Return the table [parallel] of the command; on `--resume` without a file that of the run.

    Raises:
        PathosegError: The configuration is wrong, or there is no run to go on with.
    """
    config_file, unnumbered = asked.config_file, FORMAT
    if asked.resume and config_file is None:
        begun = (named_run(asked.out) if asked.out else resumed_run(asked.flags)) / CONFIG
        if begun.is_file():
            config_file, unnumbered = begun, UNNUMBERED
        elif not asked.flags.get("data", {}).get("slides"):
            raise PathosegError(
                f"There is no run in {begun.parent} to go on with.",
                "Check --out; --resume alone takes the newest unfinished run in runs/. To begin "
                "one there, name its slides with --slides DIR.",
            )
    wanted = load_config(config_file, asked.flags, unnumbered).parallel
    find_order(wanted.order)  # before any rank starts
    if wanted.parked and wanted.offload == "none" and not asked.resume:
        raise PathosegError(
            '[parallel] parked asks for offload, and offload = "none" excludes it.',
            'Choose another form of offload, such as "overlapped", or leave out parked.',
        )
    return wanted


def resumed_run(flags: Flags) -> Path:
    """Return the run that `--resume` means where it names none.

    Raises:
        PathosegError: There is none.
    """
    longer = any(flags.get("train", {}).get(limit) is not None for limit in LIMITS)
    return run_to_resume(longer)


def check_first_weights(name: str | None) -> None:
    """Refuse an earlier model to start from that is not there.

    Args:
        name: Path of a run, a bundle or a .safetensors file; None begins with random weights.

    Raises:
        PathosegError: There is none.
    """
    if name is not None and not Path(name).is_file():
        bundle_of(Path(name), "--from")


def _check_tile(config: Config) -> None:
    tile, sides = config.tiles.tile, config.model.with_classes(2).tile_sides
    if tile is not None and sides is not None:
        check_side(tile, *sides)


def _check_slides(config: Config, *, are_read: bool) -> None:
    """Refuse slides that are not given or not there; of a few, also those that cannot be used."""
    files = slide_files(config.data)
    if are_read and len(files) <= _FEW:
        with silent():  # the workflow shows how far it is
            find_labelled_slides(config)


def check_device(name: str | None) -> None:
    """Refuse a device that is not there; one that the installed PyTorch cannot have, unimported.

    Under a launcher nothing is refused: CUDA begins here, and its variables are set later
    (`prepare_cuda`).

    Args:
        name: As for `pick_device`.

    Raises:
        PathosegError: There is none of this name.
    """
    if name is None or name == "cpu" or find_world().launcher is not None:
        return
    if "torch" not in sys.modules and not entry_points(group="torch.backends"):
        build = _torch_build()
        if sys.platform != "darwin" and not any(build.get(key) for key in ("cuda", "hip", "xpu")):
            raise PathosegError(
                f"There is no device {name} here: torch {build['__version__']} has the CPU alone.",
                "Install the PyTorch of your GPU (https://pytorch.org), or leave --device out.",
            )
    from pathoseg.device import pick_device

    pick_device(name)


def _torch_build() -> Mapping[str, Any]:
    """Return what torch's `version.py` defines, without importing torch."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
