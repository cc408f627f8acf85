"""Fixtures and hooks of all tests: the real data, tiny annotated images, and the command line."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import typer.main
from hypothesis import settings
from PIL import Image

from pathoseg.cli import main
from pathoseg.inference import windows
from pathoseg.models.build import build_model, declared_inputs, tile_multiple
from pathoseg.models.bundle import Bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from tests.fork_server import start_server
from tests.forked import Forked
from tests.forked_starts.sitecustomize import SERVER

# Examples are not timed: this suite runs on machines with two busy cores. They are the same in
# every run, so that a change is judged and not the luck of the draw.
settings.register_profile("pathoseg", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("quick", settings.get_profile("pathoseg"), max_examples=20)
settings.load_profile("pathoseg")  # --hypothesis-profile comes later and wins

_HERE = Path(__file__).resolve().parent

# What Python tells its audit hooks of a process that starts; of multiprocessing's we tell it.
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "Process"}
# Networks that take long to trace; and each test of `workflows` trains or segments.
_LARGE = re.compile(r"\[.*(inception-v3|InceptionV3|amoebanet-d|resnet110|resnet1001|Recurrent)")
_test: str | None = None  # the one that runs and is to start none


def pytest_configure(config: pytest.Config) -> None:
    """Hold `-m "not process"` to its word: a test that starts a process fails."""
    if "not process" in config.option.markexpr:
        sys.addaudithook(_refuse_start)
        BaseProcess.start = _start_of_multiprocessing
    elif SERVER not in os.environ:  # the workers of xdist have that of the process above them
        start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is known without being told: who asks for `start`, and what is large."""
    for item in items:
        if {"start", "start_python"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.process)
        if item.path.parent == _HERE / "workflows" or _LARGE.search(item.name):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of each later collection of garbage."""
    gc.collect()
    gc.freeze()  # a fifteenth of the time of the tests that trace networks


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers a core, where each can have 4 GiB: half of a test's time is spent waiting.

    A world of processes meets, a heartbeat falls silent, an interpreter starts: meanwhile another
    worker computes. Tests that start no process wait for nothing: one worker a core, for each
    imports everything and makes what tests share.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = cores if "not process" in config.option.markexpr else 2 * cores
    return max(1, min(workers, psutil.virtual_memory().available >> 32))


_start = BaseProcess.start


def _start_of_multiprocessing(process: BaseProcess) -> None:
    sys.audit("Process")
    _start(process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _test
    _test = item.nodeid
    torch.manual_seed(0)  # what it draws does not depend on the tests before it in its worker
    try:
        return (yield)
    finally:
        _test = None


def _refuse_start(event: str, arguments: tuple[object, ...]) -> None:
    if event in _STARTS and _test is not None:
        pytest.fail(f"{_test} starts a process ({event}): mark it with @pytest.mark.process")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real slides and annotations; skips where it is not at hand."""
    folder = Path(os.environ.get("PATHOSEG_DATA", _HERE.parents[1] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not at hand: neither $PATHOSEG_DATA nor {folder}")
    return folder


TINY = """
[data]
assume_mpp = 0.5
classes = ["disc"]
[tiles]
mpp = 0.5
tile = 32
[model]
width = 4
depth = 2
[train]
epochs = 4
batch = 2
lr = 1e-2
checkpoint_minutes = 0.0001
[augment]
blur = 0.0
noise = 0.0
"""


def draw_disc(path: Path, seed: int, side: int = 96) -> None:
    """A noisy pink image with a dark disc, and the disc's mask beside it."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    centre = rng.uniform(0.3, 0.7, 2) * side
    disc = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < (side / 5) ** 2
    image = np.where(disc[..., None], (120, 60, 140), (225, 170, 200))
    image = np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
    Image.fromarray(image).save(path)
    Image.fromarray(disc.astype(np.uint8)).save(path.with_name(f"{path.stem}_mask.png"))


def draw_toy_slides(place: Path) -> Path:
    """`slides` with four images, beside `tiny.toml`, which trains on them."""
    folder = place / "slides"
    folder.mkdir()
    for seed in range(4):
        draw_disc(folder / f"slide{seed}.png", seed)
    (place / "tiny.toml").write_text(TINY)
    return folder


@pytest.fixture
def toy_slides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tmp_path/slides` with four images, and the working directory set to `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return draw_toy_slides(tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """Starts the command in `tmp_path`, forked; what still runs at the test's end is killed."""
    with ExitStack() as stack:

        def run(*arguments: str) -> Forked:
            process = stack.enter_context(Forked(arguments, tmp_path))
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def start_python(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """As `start`, by an interpreter of its own: seconds of imports, for who tests its start."""
    with ExitStack() as stack:

        def run(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "pathoseg", *arguments],
                cwd=tmp_path,
                env={name: value for name, value in os.environ.items() if name != SERVER},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


_get_command = cache(typer.main.get_command)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command line in this process; gives its exit code and all that it printed."""

    # It is made of the signatures of all commands, in 40 ms, and keeps nothing of a call.
    monkeypatch.setattr(typer.main, "get_command", _get_command)

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pathoseg", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), "".join(capfd.readouterr())

    return run


def save_tiny_bundle(
    place: Path,
    folder: str = "model",
    network: ModelConfig | None = None,
    mpp: float = 0.5,
    tile: int = 64,
    overlap: int = 48,
    stain: str | None = None,
) -> Path:
    """Saves an untrained network of two classes, whose answers are as good as noise."""
    network = network or ModelConfig("unet", "segment", 3, width=4, depth=2)
    torch.manual_seed(1)
    model = build_model(network, network.name if network.is_factory else None)
    for name, values in model.named_buffers():
        if values.is_floating_point():  # running statistics, as of some training
            values.uniform_(*((-0.5, 0.5) if name.endswith("mean") else (0.5, 2.0)))
    card = Bundle(
        model=network,
        class_names=("gland", "stroma"),
        class_colours=((200, 0, 0), (0, 150, 0)),
        mpp=mpp,
        tile=tile,
        overlap=overlap,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        multiple=tile_multiple(model),
        context=declared_inputs(model, mpp, tile)[1:],
        stain=None if stain is None else {"method": stain},
    )
    save_bundle(place / folder, model.state_dict(), card)
    return place / folder


@pytest.fixture
def tiny_bundle(tmp_path: Path) -> Callable[..., Path]:
    """Saves an untrained network in `tmp_path`."""
    return partial(save_tiny_bundle, tmp_path)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows of few pixels, so that pictures of a few hundred have many."""
    for name, value in {"_CELL": 16, "_CELL_UM": 1.0, "_BAND": 48, "_LARGEST_SHARE": 1}.items():
        monkeypatch.setattr(windows, name, value)
