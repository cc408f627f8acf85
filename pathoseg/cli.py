"""The command line: parses, calls a workflow, prints; no logic."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from pathoseg.command_parser import Command
from pathoseg.errors import PathosegError, StoppedError
from pathoseg.version import __version__

app = typer.Typer(
    name="pathoseg",
    help="Whole-slide-image segmentation: train on outlined slides, segment the next one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with everything else.", metavar="FILE")
]
AssumeMpp = Annotated[
    float | None,
    typer.Option(help="Microns per pixel of slides that state none.", metavar="MPP"),
]
Seed = Annotated[int | None, typer.Option(help="Seed of all randomness. \\[default: 0]")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tell where the time went.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Slides = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder of slides; may be given several times.",
        metavar="DIR",
        show_default=False,
        exists=True,
    ),
]
Annotations = Annotated[
    Path | None,
    typer.Option(
        help="Folder of annotations. \\[default: beside the slides]", metavar="DIR", exists=True
    ),
]
MppOption = Annotated[
    float | None, typer.Option(help="Microns per pixel the model sees. \\[default: 0.5]")
]
TileOption = Annotated[
    int | None,
    typer.Option(help="Side of a tile in pixels. \\[default: what most images hold, at most 1024]"),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="unet, hooknet, unet_resnet50, vit_seg… or module:factory. \\[default: unet]",
        metavar="NAME",
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="How ranks take turns, e.g. 1f1b or gems-master. \\[default: auto]", metavar="NAME"
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Run or bundle. \\[default: the newest finished run]",
        metavar="RUN",
        exists=True,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Start so many ranks on this machine. \\[default: 1]", min=1),
]
Batch = Annotated[int | None, typer.Option(help="Tiles a step. \\[default: 4]")]
Memory = Annotated[
    str | None,
    typer.Option(
        help="What a rank may take, such as 16GiB; more than that is recomputed or offloaded."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="What computes: cpu, cuda:1, xpu… \\[default: the GPU if any]", metavar="NAME"
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace another run, or other results, in --out.")
]
Readers = Annotated[
    int | None,
    typer.Option(help="Threads that read tiles. \\[default: the cores it may use]"),
]
SkipBadSlides = Annotated[
    bool, typer.Option("--skip-bad-slides", help="Leave out slides that cannot be read.")
]
Level = Literal["layer", "block", "module"]
Factory = Annotated[
    str | None,
    typer.Option(
        help="Permit a bundle to import this network of your own.", metavar="MODULE:FACTORY"
    ),
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"pathoseg {__version__}")
        raise typer.Exit


def _refuse_wrong_options(config: Path | None, flags: dict[str, dict[str, Any]]) -> None:
    """Refuse a wrong value within half a second, before torch is imported."""
    from pathoseg.config_file import load_config

    load_config(config, flags)


def _data(
    slides: list[Path] | None, annotations: Path | None, assume_mpp: float | None
) -> dict[str, Any]:
    """The flags of the table `data`; None is a flag not given."""
    return {
        "slides": tuple(map(str, slides)) if slides else None,
        "annotations": annotations and str(annotations),
        "assume_mpp": assume_mpp,
    }


@app.command(cls=Command, epilog="Example: pathoseg check --slides slides/ --mpp 0.5 --tile 1024")
def check(
    slides: Slides = None,
    annotations: Annotations = None,
    out: Annotated[
        Path, typer.Option(help="Folder of check.csv and check.html.", metavar="DIR")
    ] = Path(),
    model: ModelName = None,
    mpp: MppOption = None,
    tile: TileOption = None,
    skip_bad_slides: SkipBadSlides = False,
    config: ConfigFile = None,
    seed: Seed = None,
    assume_mpp: AssumeMpp = None,
    debug: Debug = False,
) -> None:
    """Tell what training would make of slides and annotations, before hours are spent.

    Exit code 0: nothing to tell; 1: look at what it says; 2: training would refuse.
    """
    flags: dict[str, dict[str, Any]] = {
        "": {"seed": seed},
        "data": _data(slides, annotations, assume_mpp)
        | {"skip_bad_slides": skip_bad_slides or None},
        "tiles": {"mpp": mpp, "tile": tile},
        "model": {"name": model},
    }
    from pathoseg.workflows.early_checks import check_folder_input

    check_folder_input(config, flags)
    from pathoseg.workflows.check import check as run_check

    raise typer.Exit(run_check(config, flags, out).exit_code)


@app.command(
    cls=Command,
    epilog="Example: pathoseg train --slides slides/ --mpp 0.5 --tile 1024 --time-limit 2h",
)
def train(
    slides: Slides = None,
    annotations: Annotations = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from the weights of this run, bundle or .safetensors file.",
            metavar="RUN|FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. \\[default: runs/<date>-<time>]")
    ] = None,
    model: ModelName = None,
    mpp: MppOption = None,
    tile: TileOption = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the tiles.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Finish within this time, e.g. 90s, 30m or 2h; a bare number is minutes. What a "
            "resumed run has taken before counts; at worst one step and one validation more.",
            metavar="DURATION",
        ),
    ] = None,
    batch: Batch = None,
    memory: Memory = None,
    readers: Readers = None,
    device: Device = None,
    ranks: Ranks = None,
    order: Order = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Draw what the ranks do in one step.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with --out, or the newest unfinished run; given more --epochs or a longer "
            "--time-limit, a finished run trains longer.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    skip_bad_slides: SkipBadSlides = False,
    config: ConfigFile = None,
    seed: Seed = None,
    assume_mpp: AssumeMpp = None,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a model from slides and their annotations."""
    flags: dict[str, dict[str, Any]] = {
        "": {"seed": seed},
        "data": _data(slides, annotations, assume_mpp)
        | {"skip_bad_slides": skip_bad_slides or None},
        "tiles": {"mpp": mpp, "tile": tile},
        "model": {"name": model},
        "train": {
            "start_from": start_from,
            "epochs": epochs,
            "time_limit": time_limit,
            "batch": batch,
            "readers": readers,
        },
        "parallel": {"device": device, "ranks": ranks, "memory": memory, "order": order},
    }
    from pathoseg.workflows.early_checks import TrainingArguments, check_training_input

    asked = TrainingArguments(config, flags, out, resume, trace, overwrite, verbose)
    check_training_input(asked)
    from pathoseg.workflows.train import launch

    raise typer.Exit(launch(asked, sys.argv[1:]))


@app.command(
    cls=Command, epilog="Example: pathoseg infer slide.svs --model runs/latest --out results/"
)
def infer(
    slides: Annotated[
        list[Path], typer.Argument(help="Slides, or folders of slides.", metavar="SLIDE|DIR...")
    ],
    model: ModelFolder = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.", metavar="DIR")] = Path(
        "results"
    ),
    batch: Annotated[int | None, typer.Option(help="Tiles a forward pass. \\[default: 1]")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What a forward pass may take, such as 4GiB.")
    ] = None,
    readers: Readers = None,
    device: Device = None,
    ranks: Ranks = None,
    annotations: Annotated[
        Path | None,
        typer.Option(
            help="Folder of annotations, whose regions of interest get rows of their own.",
            metavar="DIR",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what is done already.")] = False,
    overwrite: Overwrite = False,
    factory: Factory = None,
    config: ConfigFile = None,
    assume_mpp: AssumeMpp = None,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Segment slides: mask, outlines for QuPath, overlay and areas."""
    flags: dict[str, Any] = {
        "data": {"assume_mpp": assume_mpp},
        "infer": {"batch": batch, "memory": memory, "readers": readers},
        "parallel": {"device": device, "ranks": ranks},
    }
    _refuse_wrong_options(config, flags)
    from pathoseg.workflows.infer import InferArguments
    from pathoseg.workflows.infer import infer as run

    asked = InferArguments(
        slides,
        model,
        out,
        config,
        flags,
        annotations,
        resume=resume,
        overwrite=overwrite,
        factory=factory,
        verbose=verbose,
        command_line=sys.argv[1:],
    )
    raise typer.Exit(run(asked))


@app.command(cls=Command, epilog="Example: pathoseg evaluate --slides slides/ --split test")
def evaluate(
    slides: Slides = None,
    annotations: Annotations = None,
    model: ModelFolder = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of evaluation.html and its tables. \\[default: the run's]"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Only slides of this split: train, val, test or unseen.")
    ] = None,
    device: Device = None,
    factory: Factory = None,
    config: ConfigFile = None,
    assume_mpp: AssumeMpp = None,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Compare a model's segmentation of whole slides with their annotations."""
    flags: dict[str, Any] = {"data": _data(slides, annotations, assume_mpp)}
    flags["parallel"] = {"device": device}
    from pathoseg.workflows.early_checks import check_evaluation_input

    check_evaluation_input(config, flags, model)
    from pathoseg.workflows.evaluate import evaluate as run_evaluation

    run_evaluation(model, out, config, flags, split, factory, verbose, ends_process=True)


@app.command(cls=Command, epilog="Example: pathoseg view results/ --slides slides/")
def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results, runs or slides, or folders of them. \\[default: results, or else the "
            "newest finished run]",
            metavar="RESULTS|RUN|SLIDE...",
            show_default=False,
        ),
    ] = None,
    slides: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where slides of results are now; may be given several times.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    annotations: Annotations = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at, of the loopback interface.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen at. \\[default: 8765, or a free one]", min=0, max=65535),
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and open no browser.")
    ] = False,
    config: ConfigFile = None,
    assume_mpp: AssumeMpp = None,
    debug: Debug = False,
) -> None:
    """Show slides, masks and objects in the browser, on this machine alone."""
    flags: dict[str, dict[str, Any]] = {"data": _data(slides, annotations, assume_mpp)}
    _refuse_wrong_options(config, flags)
    from pathoseg.workflows.view import view as run_viewer

    run_viewer(paths or [], host, port, not no_browser, config, flags)


@app.command(
    cls=Command,
    epilog="Example: pathoseg cache --slides slides/ --mpp 0.5 --tile 1024 --out tiles/",
)
def cache(
    slides: Slides = None,
    annotations: Annotations = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the cache. \\[default: tiles]", metavar="DIR")
    ] = None,
    model: ModelName = None,
    mpp: MppOption = None,
    tile: TileOption = None,
    config: ConfigFile = None,
    assume_mpp: AssumeMpp = None,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Fill the tile cache ahead of training."""
    flags: dict[str, Any] = {
        "data": _data(slides, annotations, assume_mpp),
        "model": {"name": model},
        "tiles": {"mpp": mpp, "tile": tile, "cache": out and str(out)},
    }
    _refuse_wrong_options(config, flags)
    from pathoseg.workflows.cache import fill_cache

    fill_cache(config, flags, verbose)


@app.command(
    cls=Command,
    epilog="Example: pathoseg plan --model unet --tile 2048 --ranks 8 --memory 16GiB --batch 8",
)
def plan(
    model: ModelName = None,
    tile: Annotated[
        int | None, typer.Option(help="Side of a tile in pixels. \\[default: 1024]")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks that share a step. \\[default: 1]")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of a rank. \\[default: the hardware's]")
    ] = None,
    batch: Batch = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="A GPU such as a100 or l40s, cpu, or a file of `pathoseg calibrate`. "
            "\\[default: this machine's]",
            metavar="NAME|FILE",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time the model's layers on this machine.")
    ] = False,
    order: Order = None,
    cut: Annotated[
        str | None, typer.Option(help="Layers or modules before which to cut.", metavar="A,B")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the model into this SVG.", metavar="FILE")
    ] = None,
    level: Annotated[
        Level | None,
        typer.Option(help="List the model's layers, blocks or modules, and draw these."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of plan.json and timeline.svg.", metavar="DIR")
    ] = Path(),
    config: ConfigFile = None,
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Find the fastest way to share a training step among ranks."""
    flags: dict[str, dict[str, Any]] = {
        "": {"seed": seed},
        "tiles": {"tile": tile},
        "model": {"name": model},
        "train": {"batch": batch},
        "parallel": {
            "ranks": ranks,
            "memory": memory,
            "hardware": hardware,
            "profile": profile or None,
            "order": order,
            "cut": cut and tuple(cut.split(",")),
        },
    }
    _refuse_wrong_options(config, flags)
    from pathoseg.workflows.plan import plan as run_planning

    run_planning(config, flags, out, draw, level)


@app.command(cls=Command, epilog="Example: pathoseg calibrate --out hardware.json")
def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE")] = Path("hardware.json"),
    quick: Annotated[bool, typer.Option("--quick", help="A rougher fit, sooner.")] = False,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Measure what layers take on this device, and write it to a file for `plan`."""
    from pathoseg.workflows.early_checks import check_device

    check_device(device)
    from pathoseg.workflows.calibrate import calibrate as run_calibration

    run_calibration(out, quick, device)


def main() -> NoReturn:
    """Run the command line; every failure ends as one message and its exit code.

    0 done; 1 some slides failed (`infer`), or there are warnings (`check`); 2 bad input, what
    training would refuse (`check`), or slides that could not be compared (`evaluate`); 130 Ctrl-C;
    143 SIGTERM.
    """
    # Threads that wait by spinning take the cores from those that work: on a machine with other
    # jobs a forward pass took up to 15 times longer. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in sys.argv
    with nullcontext() if debug else _libraries_silenced():
        try:
            app()
        except StoppedError as stop:
            typer.echo(f"Stopped. {stop.advice}", err=True)
            sys.exit(stop.exit_code)
        except PathosegError as error:
            _refuse(error, debug)
        # What no workflow knows more about: no memory; a disk that is full, read-only or gone.
        except MemoryError as error:
            what = "The memory is used up" + (f" ({error})." if str(error) else ".")
            hint = "Close other programs, or try fewer --readers, a smaller batch or more memory."
            _refuse(PathosegError(what, hint), debug)
        except OSError as error:
            where, why = error.filename or "A file", error.strerror or error
            hint = "Free space on its disk, see whether it may be written, or choose another place."
            if isinstance(error, (NotADirectoryError, FileExistsError)):
                hint = "A file stands where a folder is needed: choose another place."
            _refuse(PathosegError(f"{where} cannot be read or written ({why}).", hint), debug)
    sys.exit(0)


def _refuse(error: PathosegError, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    typer.secho(f"Error: {error.problem}", fg="red", err=True)
    typer.echo(f"  {error.hint}", err=True)
    sys.exit(2)


@contextmanager
def _libraries_silenced() -> Iterator[None]:
    """Keep what libraries warn, log and print from threads away from the user."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(format="%(message)s", level=logging.CRITICAL)
    logging.getLogger("pathoseg").setLevel(logging.WARNING)
    # TensorBoard's thread prints its error, which the next event raises again.
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        threading.excepthook = hook
