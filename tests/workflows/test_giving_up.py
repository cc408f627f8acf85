"""Runs that are stopped in the middle of a step or validation go on to the digits of a calm one."""

from __future__ import annotations

import csv
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pathoseg.errors import StoppedError
from pathoseg.interruption import Interruption
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.infer import InferArguments, infer
from pathoseg.workflows.train import train
from tests.conftest import draw_toy_slides
from tests.forked import Forked

Start = Callable[..., Forked]

DROPPING = """
import torch
from pathoseg.models.unet import UNet

class Net(torch.nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.drop, self.body = torch.nn.Dropout2d(0.2), UNet(classes, width=4, depth=2)

    def forward(self, images):
        return torch.nn.functional.dropout(self.body(self.drop(images)), 0.1, self.training)
"""


# Sends its own process SIGTERM in the n-th forward, in the midst of a step. What it branches on is
# known in the forward alone, so that graphs of layers call it as one.
ALARM = """
import os, signal, torch
from pathoseg.models.unet import UNet

class Alarm(torch.nn.Module):
    calls = 0

    def forward(self, images):
        if float(images.sum()) != 0.5 and self.training and type(images) is torch.Tensor:
            Alarm.calls += 1
            if Alarm.calls == int(os.environ.get("ALARM", 0)):
                os.kill(os.getpid(), signal.SIGTERM)
        return images * 1

class Net(torch.nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.alarm, self.body = Alarm(), UNet(classes, width=4, depth=2)

    def forward(self, images):
        return self.body(self.alarm(images))
"""

# Is in one kernel for a minute, at the n-th call in a mode: in its forward, or in its backward. A
# signal comes meanwhile, and wakes it no more than it does a convolution: it waits for a mutex.
HELD = """
import ctypes, os, signal, threading, time, torch
from pathoseg.models.unet import UNet

def compute():
    open("held", "w").close()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    until, mutex = (ctypes.c_long * 2)(int(time.time()) + 60, 0), ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_timedlock(mutex, until)

class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(saved, images, place):
        saved.place = place
        if place == "forward":
            compute()
        return images * 1

    @staticmethod
    def backward(saved, gradient):
        if saved.place == "backward":
            compute()
        return gradient, None

class Held(torch.nn.Module):
    calls = 0

    def forward(self, images):
        mode, call, place = os.environ.get("HELD", "- 0 -").split()
        if float(images.sum()) != 0.5 and type(images) is torch.Tensor:
            Held.calls += mode == ("train" if self.training else "eval")
        return Kernel.apply(images, place if Held.calls == int(call) else None)

class Net(torch.nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.body, self.held = UNet(classes, width=4, depth=2), Held()

    def forward(self, images):
        return self.held(self.body(images))
"""


class _At(Interruption):
    """Has the signal come at the n-th question.

    Attributes:
        questions: How many have been asked.
    """

    when = 0
    questions = 0

    def is_asked(self) -> bool:
        _At.questions += 1
        if _At.questions == self.when:
            self.number = signal.SIGTERM
        return super().is_asked()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with slides, a network with batch norm and dropout, and its configuration."""
    folder = tmp_path_factory.mktemp("dropping")
    draw_toy_slides(folder)
    text = (folder / "tiny.toml").read_text()
    text = text.replace("width = 4\ndepth = 2", 'name = "dropping_4:Net"')
    text = text.replace("epochs = 4", "epochs = 2\nmicrobatch = 1\nsamples_per_epoch = 4")
    (folder / "dropping.toml").write_text(text)
    (folder / "alarmed.toml").write_text(text.replace("dropping_4:Net", "alarm_4:Net"))
    (folder / "dropping_4.py").write_text(DROPPING)
    (folder / "alarm_4.py").write_text(ALARM)
    (folder / "held.toml").write_text(text.replace("dropping_4:Net", "held_4:Net"))
    (folder / "held_4.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for command in ("train", "infer"):
            patch.setattr(f"pathoseg.workflows.{command}.Interruption", _At)
        yield folder


def _part(run: str, when: int, config: str = "dropping.toml") -> bool:
    """Trains one part of a run, until its `when`-th question; says whether it has finished."""
    _At.when, _At.questions = when, 0
    flags = {"data": {"slides": "slides"}, "parallel": {"ranks": 1}}
    try:
        train(TrainingArguments(Path(config), flags, Path(run), resume=True))
    except StoppedError:
        return False
    return True


def _figures(run: str) -> list[dict[str, str]]:
    with (Path(run) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(float(row.pop("tiles_per_s")) > 0 for row in rows)
    return rows


def _weights(run: str) -> dict[str, torch.Tensor]:
    return dict(load_file(Path(run) / "model" / "weights.safetensors"))


@pytest.fixture(scope="module")
def questions(place: Path) -> int:
    """Return the number of questions that the undisturbed run asks."""
    assert _part("calm", 0)
    return _At.questions


@settings(max_examples=5)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_stopped_anywhere_a_run_goes_on_to_the_same_digits(
    place: Path, questions: int, shares: list[float]
) -> None:
    shutil.rmtree("stopped", ignore_errors=True)
    for share in shares:
        if _part("stopped", 1 + round(share * (questions - 1))):
            break
    else:
        assert _part("stopped", 0)
    assert _figures("stopped") == _figures("calm")
    torch.testing.assert_close(_weights("stopped"), _weights("calm"), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_that_gets_sigterm_within_a_step_leaves_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Test a signal that reaches only the rank of the first layers, of two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, calm = f"alarmed-{ranks}", f"quiet-{ranks}"
    command = ["train", "--slides", "slides", "--config", "alarmed.toml", "--out", out]
    monkeypatch.setenv("ALARM", "4")  # the second microbatch of the second step
    with Forked([*command, "--ranks", str(ranks), "--order", "1f1b"], place) as process:
        said, _ = process.communicate()
    assert process.returncode == 143, said
    assert "What follows step 1 is given up" in said
    assert "Traceback" not in said
    state = torch.load(Path(out) / "checkpoints" / "last.pt", weights_only=True)
    assert state["progress"]["step"] == 1
    monkeypatch.delenv("ALARM")
    assert _part(out, 0, "alarmed.toml")
    assert _part(calm, 0, "alarmed.toml")
    assert _figures(out) == _figures(calm)
    torch.testing.assert_close(_weights(out), _weights(calm), rtol=0, atol=0)


def test_a_slide_is_left_within_a_tile_and_taken_up_again(place: Path, questions: int) -> None:
    def predict(out: str, when: int) -> bytes:
        _At.when, _At.questions = when, 0
        slide, resume, factory = Path("slides/slide0.png"), when == 0, "dropping_4:Net"
        given = (Path("calm"), Path(out), None, data)
        assert infer(InferArguments([slide], *given, resume=resume, factory=factory)) == 0
        return (Path(out) / "slide0" / "mask.ome.tiff").read_bytes()

    data = {"data": {"assume_mpp": 0.5}}
    whole = predict("whole", 0)
    asked = _At.questions
    assert asked > 20, "a layer each"
    for when in (1, asked // 2, asked):
        with pytest.raises(StoppedError):
            predict("left", when)
        assert not Path("left/slide0").exists()
        assert _At.questions == when, "nothing more was computed"
    assert predict("left", 0) == whole


@pytest.fixture(scope="module")
def not_held(place: Path) -> str:
    """Return the undisturbed run of the network whose layers can take a minute."""
    assert _part("not-held", 0, "held.toml")
    return "not-held"


def _end_while_held(process: Forked) -> str:
    """Return the output of a process; it must end while its kernel still runs."""
    while not Path("held").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    Path("held").unlink()
    return process.communicate(timeout=50)[0]


@pytest.mark.parametrize(
    ("held", "ranks", "step"),
    [
        ("train 4 forward", 1, 1),  # the second microbatch of the second step
        ("train 1 backward", 2, 0),
        ("eval 2 forward", 1, 2),  # the validation of the first epoch
    ],
)
def test_a_layer_of_a_minute_ends_a_run_no_later(
    place: Path, not_held: str, monkeypatch: pytest.MonkeyPatch, held: str, ranks: int, step: int
) -> None:
    """Test a signal that comes while a kernel runs, of ranks to the one whose kernel that is."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HELD", held)
    out = held  # blanks included
    command = ["train", "--slides", "slides", "--config", "held.toml", "--out", out, "-v"]
    with Forked([*command, "--ranks", str(ranks), "--order", "1f1b"], place) as process:
        said = _end_while_held(process)
    assert process.returncode == 143, said
    assert f"What follows step {step} is given up" in said
    assert "the rest" in said, "where the time went"
    assert f"Stopped. Continue with: pathoseg train --resume --out '{out}'" in said
    assert "stopped before its end" in (Path(out) / "report.html").read_text()
    monkeypatch.delenv("HELD")
    assert _part(out, 0, "held.toml")
    assert _figures(out) == _figures(not_held)
    torch.testing.assert_close(_weights(out), _weights(not_held), rtol=0, atol=0)


def test_a_layer_of_a_minute_ends_a_slide_no_later(
    place: Path, not_held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", "eval 2 forward")
    command = ["infer", "slides/slide0.png", "--model", not_held, "--factory", "held_4:Net"]
    with Forked([*command, "--assume-mpp", "0.5", "--out", "half"], place) as process:
        said = _end_while_held(process)
    assert process.returncode == 143, said
    assert "Stopped. What is done is in half. Go on with the same command and --resume." in said
    assert (Path("half") / "report.html").exists()
    assert not [*Path("half").rglob("*claim")], "others may take it up"
