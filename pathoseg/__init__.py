"""pathoseg: whole-slide-image segmentation for models and tiles too big for one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathoseg.errors import PathosegError, StoppedError
from pathoseg.version import __version__

if TYPE_CHECKING:
    from pathoseg.inference.loaded_model import LoadedModel
    from pathoseg.slides.slide import Slide
    from pathoseg.workflows.check import FolderCheck

__all__ = [
    "PathosegError",
    "StoppedError",
    "__version__",
    "check",
    "evaluate",
    "infer",
    "load_model",
    "open_slide",
    "train",
]

# The tables of the TOML file, such as {"tiles": {"mpp": 0.5}}; "" holds the keys above them.
Options = Mapping[str, Any]
Name = str | PathLike[str]


def check(
    slides: Name | Sequence[Name] | None = None,
    annotations: Name | None = None,
    *,
    out: Name = ".",
    config: Name | None = None,
    options: Options | None = None,
) -> FolderCheck:
    """Look through slides and annotations as `train` would with the same options.

    Args:
        slides: Folder of slides, or several; folders inside are searched too.
        annotations: Folder of annotations; None means beside the slides.
        out: Folder of check.csv and check.html.
        config: TOML file, as for `train`.
        options: As for `train`.

    Returns:
        `refusals` (why training would refuse), `warnings` (what else is likely not meant), and the
        paths of `table` and `page`.

    Raises:
        PathosegError: No slide is found, or an option is wrong.
    """
    from pathoseg.workflows.check import check as run

    return run(_path(config), _flags(options, slides, annotations), Path(out))


def train(
    slides: Name | Sequence[Name] | None = None,
    annotations: Name | None = None,
    *,
    start_from: Name | None = None,
    out: Name | None = None,
    config: Name | None = None,
    options: Options | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Train a model in this process; under mpirun, srun or torchrun on all ranks of the job.

    Args:
        slides: Folder of slides, or several; folders inside are searched too.
        annotations: Folder of annotations; None means beside the slides.
        start_from: Run, bundle or .safetensors file whose weights training starts from; None means
            random weights.
        out: Folder of the run; None takes `runs/<date>-<time>`.
        config: TOML file with everything else (docs/configuration.md).
        options: Keys of that file, by table; they overrule it.
        resume: Go on with `out`, or with the newest unfinished run; with more `epochs` or a longer
            `time_limit` among the options, a finished run trains longer.
        overwrite: Replace the run that `out` holds, once all input is read.

    Returns:
        The folder of the run; `model/` in it is the bundle.

    Raises:
        PathosegError: Input that cannot be used; it says what, and `hint` says what to do.
        StoppedError: Ctrl-C or SIGTERM, once the layer under way is over (a command does not wait
            for it); `resume=True` goes on.
    """
    from pathoseg.workflows.early_checks import TrainingArguments
    from pathoseg.workflows.train import train as run

    flags = _flags(options, slides, annotations)
    if start_from is not None:
        flags["train"] = flags.get("train", {}) | {"start_from": str(start_from)}
    asked = TrainingArguments(_path(config), flags, _path(out), resume, overwrite=overwrite)
    return run(asked)


def infer(
    slides: Name | Sequence[Name],
    model: Name | None = None,
    *,
    out: Name = "results",
    annotations: Name | None = None,
    config: Name | None = None,
    options: Options | None = None,
    resume: bool = False,
    overwrite: bool = False,
    factory: str | None = None,
) -> Path:
    """Segment slides into files: mask, outlines for QuPath, overlay and areas.

    Args:
        slides: A slide, a folder of slides, or several of either.
        model: Run or bundle; None takes the newest finished run.
        out: Folder of the results.
        annotations: Folder of annotations, whose regions of interest get rows of their own in
            `summary.csv`.
        config: TOML file, as for `train`.
        options: As for `train`.
        resume: Skip what is done, and go on in the middle of a slide.
        overwrite: Use `out` also where it holds results of another model or of other options; each
            is replaced when the new one is whole.
        factory: The `module:factory` of a network of your own that the bundle may import.

    Returns:
        `out`, with a folder for each slide, `summary.csv`, and `failures.csv` where slides failed.

    Raises:
        PathosegError: The model or the only slide cannot be used, or `out` holds results of
            another model or of other options.
        StoppedError: Ctrl-C or SIGTERM, once the layer under way is over (a command does not wait
            for it); `resume=True` goes on.
    """
    from pathoseg.workflows.infer import InferArguments
    from pathoseg.workflows.infer import infer as run

    given = [slides] if isinstance(slides, (str, PathLike)) else list(slides)
    asked = InferArguments(
        [Path(each) for each in given],
        _path(model),
        Path(out),
        _path(config),
        _flags(options),
        _path(annotations),
        resume=resume,
        overwrite=overwrite,
        factory=factory,
    )
    run(asked)
    return asked.out


def evaluate(
    slides: Name | Sequence[Name] | None = None,
    annotations: Name | None = None,
    *,
    model: Name | None = None,
    out: Name | None = None,
    split: str | None = None,
    config: Name | None = None,
    options: Options | None = None,
    factory: str | None = None,
) -> Path:
    """Compare a model's segmentation of whole annotated slides with their annotations.

    Args:
        slides: Folder of slides, or several; folders inside are searched too.
        annotations: Folder of annotations; None means beside the slides.
        model: Run or bundle; None takes the newest finished run.
        out: Folder of the tables; None means the run's.
        split: Only slides of this split: train, val, test or unseen.
        config: TOML file, as for `train`; None reads slides as the model's run did.
        options: As for `train`.
        factory: As for `infer`.

    Returns:
        The table of Dice and IoU by slide.

    Raises:
        PathosegError: The model, a slide or an annotation cannot be used.
        StoppedError: Ctrl-C or SIGTERM, once the layer under way is over.
    """
    from pathoseg.workflows.evaluate import evaluate as run

    flags = _flags(options, slides, annotations)
    return run(_path(model), _path(out), _path(config), flags, split, factory)


def load_model(
    model: Name | None = None, *, factory: str | None = None, device: str | None = None
) -> LoadedModel:
    """Load a trained model that predicts pictures in memory.

    Args:
        model: Run or bundle; None takes the newest finished run.
        factory: As for `infer`.
        device: What computes, such as "cpu", "cuda:1" or "mps"; None takes the accelerator where
            there is one, else the CPU.

    Raises:
        PathosegError: There is no such model or device, or the bundle is damaged.
    """
    from pathoseg.inference.loaded_model import LoadedModel
    from pathoseg.training.run_folder import bundle_of

    return LoadedModel.load(bundle_of(_path(model), "load_model"), factory, device)


def open_slide(path: Name, assume_mpp: float | None = None) -> Slide:
    """Open a slide of any format that pathoseg reads; close it, or use it in a `with` statement.

    Args:
        path: The file.
        assume_mpp: Microns per pixel, used only where the file states none.

    Raises:
        PathosegError: The file cannot be read, or its resolution is unknown.
    """
    from pathoseg.slides.slide import open_slide as run

    return run(Path(path), assume_mpp)


def _path(name: Name | None) -> Path | None:
    return None if name is None else Path(name)


def _flags(
    options: Options | None,
    slides: Name | Sequence[Name] | None = None,
    annotations: Name | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the options as tables of their own, `slides` and `annotations` in that of `data`."""
    flags = dict[str, dict[str, Any]]()
    top = dict[str, Any]()  # options of no table, and what is none, for `load_config` to refuse
    for table, values in (options or {}).items():
        if isinstance(values, Mapping):
            flags[table] = {
                key: fspath(value) if isinstance(value, PathLike) else value
                for key, value in values.items()
            }
        else:
            top[table] = values
    given = dict[str, Any]()
    if slides is not None:
        several = [slides] if isinstance(slides, (str, PathLike)) else slides
        given["slides"] = tuple(map(str, several))
    if annotations is not None:
        given["annotations"] = str(annotations)
    flags["data"] = flags.get("data", {}) | given
    flags[""] = flags.get("", {}) | top
    return flags
