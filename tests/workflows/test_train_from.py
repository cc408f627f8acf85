"""Training from an earlier model, and longer than a run was begun with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError
from pathoseg.models.bundle import load_bundle
from pathoseg.models.bundle_identity import bundle_id
from pathoseg.training import trainer
from pathoseg.training.checkpoint import LAST, Progress, read_progress, save_checkpoint
from pathoseg.training.run_folder import bundle_of, is_finished
from pathoseg.training.trainer import check_limits
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.train import train
from tests.forked import Forked

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Start = Callable[..., Forked]

# The network, the resolution and the class list stand in the earlier model alone.
BARE = """
[data]
assume_mpp = 0.5
classes = ["stroma", "disc"]
[tiles]
tile = 32
[train]
epochs = 2
batch = 2
lr = 1e-2
samples_per_epoch = 4
"""


def _state(bundle: Path) -> dict[str, torch.Tensor]:
    return load_bundle(bundle)[0].state_dict()


def _losses(run: Path) -> list[str]:
    rows = (run / "metrics.csv").read_text().splitlines()
    return [row.rpartition(",")[0] for row in (",".join(row.split(",")[:6]) for row in rows)]


@pytest.fixture
def bare(toy_slides: Path) -> Path:
    Path("bare.toml").write_text(BARE)
    return Path("bare.toml")


def test_a_run_starts_where_the_earlier_model_stood(
    toy_slides: Path, bare: Path, tiny_bundle: SaveBundle, command: Command
) -> None:
    earlier = tiny_bundle(mpp=0.75, tile=64)
    theirs, identity = _state(earlier), bundle_id(earlier)
    arguments = ("train", "--slides", toy_slides, "--config", bare, "--from", earlier)
    code, said = command(*arguments, "--out", "run")
    assert code == 0, said
    assert "does not know: disc." in said
    assert "given up: gland ([data] classes)" in said
    begun = _state(Path("run/start"))
    for name, tensor in begun.items():
        if not name.startswith("head."):
            assert torch.equal(tensor, theirs[name]), name  # statistics of batch norm among them
    for name in ("head.weight", "head.bias"):  # background, gland, stroma: the last is ours too
        assert torch.equal(begun[name][:2], theirs[name][[0, 2]])
    assert not (begun["head.weight"][2] == theirs["head.weight"]).all(1).any()
    card = load_bundle(Path("run/model"))[1]
    assert (card.model.width, card.model.depth, card.mpp, card.tile) == (4, 2, 0.75, 32)
    assert card.class_names == ("stroma", "disc")
    assert {key: card.training[key] for key in card.training if key.startswith("from")} == {
        "from": "model",
        "from_id": identity,
        "from_model": "unet",
        "from_classes": ("gland", "stroma"),
    }
    # Killed before its first checkpoint, it begins with the same weights, whatever became of the
    # earlier model.
    losses, trained = _losses(Path("run")), _state(Path("run/model"))
    for folder in (Path("run/checkpoints"), Path("run/model"), earlier):
        shutil.rmtree(folder)
    Path("run/summary.json").unlink()
    code, said = command(*arguments, "--out", "run", "--resume")
    assert code == 0, said
    assert _losses(Path("run")) == losses
    torch.testing.assert_close(_state(Path("run/model")), trained, rtol=0, atol=0)
    assert load_bundle(Path("run/model"))[1].training["from_id"] == identity


def test_weights_of_another_program_fill_what_they_fit(
    toy_slides: Path, bare: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "network_of_a_lab.py").write_text(
        "from torch import nn\n"
        "def make(in_channels, classes):\n"
        "    stem = nn.Conv2d(in_channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)\n"
        "    return nn.Sequential(*stem, nn.ReLU(), nn.Conv2d(4, classes, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    theirs = {
        "0.weight": torch.randn(4, 3, 3, 3),
        "1.running_mean": torch.ones(4),
        "3.weight": torch.randn(21, 4, 1, 1),
        "decoder.weight": torch.randn(2),
    }
    safetensors.torch.save_file(theirs, "theirs.safetensors")
    options = ("--slides", toy_slides, "--config", bare, "--model", "network_of_a_lab:make")
    code, said = command("train", *options, "--from", "theirs.safetensors", "--out", "run")
    assert code == 0, said
    assert "2 of the network's 8 tensors. Drawn at random: 1.weight, 1.bias, 1.running_var" in said
    begun, card = load_bundle(Path("run/start"), "network_of_a_lab:make")
    for name in ("0.weight", "1.running_mean"):
        assert torch.equal(begun.state_dict()[name], theirs[name])
    assert card.training["from"] == "theirs.safetensors"


def _cut_short(bundle: Path) -> Path:
    weights = bundle / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return bundle


def _file(name: str, content: bytes) -> Path:
    Path(name).write_bytes(content)
    return Path(name)


STRANGE = safetensors.torch.save({"layer1.weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("source", "extra", "told"),
    [
        (lambda save: _cut_short(save()), "", "weights.safetensors is cut short"),
        (
            lambda save: save(),
            '[model]\nname = "resnet11_v2"\ntask = "classify"',
            "task classify, and the model",
        ),
        (lambda save: save(), "[model]\nwidth = 8", "model.width is 8, and 4 there"),
        (lambda save: save(), '[model]\nnorm = "group"', "model.norm is group, and batch there"),
        (lambda save: save(mpp=0.25), "[tiles]\nmpp = 0.5", "tiles.mpp is 0.5, and 0.25 there"),
        (
            lambda save: Path("nowhere"),
            "",
            "nowhere does not exist.\n  Check the path behind --from",
        ),
        (lambda save: save().parent / "slides", "", "slides holds no model"),
        (lambda save: _file("a.pt", b"\x80\x02cos\nsystem"), "", "a.pt is no run, bundle or .saf"),
        (lambda save: _file("a.safetensors", STRANGE[:-1]), "", "a.safetensors is no safetensors"),
        (lambda save: _file("a.safetensors", STRANGE), "", "None of its 1 tensors fits"),
    ],
    ids=[
        *("cut", "task", "width", "norm", "mpp", "nowhere", "no bundle", "pickle", "cut file"),
        "other names",
    ],
)
def test_what_cannot_be_started_from_is_refused(
    toy_slides: Path,
    bare: Path,
    command: Command,
    tiny_bundle: SaveBundle,
    source: Callable[[SaveBundle], Path],
    extra: str,
    told: str,
) -> None:
    bare.write_text(BARE.replace("[tiles]", extra) if "[tiles]" in extra else BARE + extra)
    place = source(tiny_bundle)
    before = set(Path.cwd().rglob("*"))
    code, said = command("train", "--slides", toy_slides, "--config", bare, "--from", place)
    assert code == 2, said
    assert told in said
    assert len(re.findall("^Error: ", said, re.MULTILINE)) == 1, said
    assert set(Path.cwd().rglob("*")) == before


def test_slides_that_the_earlier_model_has_seen_and_names_that_it_knew_otherwise_are_told(
    toy_slides: Path, bare: Path, tiny_bundle: SaveBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_bundle(folder="first/model")
    Path("first/splits.csv").write_text("slide,patient,split\nslide0.png,a,train\n")
    renamed = 'disc = "gland"\nring = "gland"'
    Path("first/config.toml").write_text(f"[annotations.rename]\n{renamed}\n")
    rows = "".join(f"slide{n}.png,{n},{'train' if n else 'val'}\n" for n in range(4))
    (toy_slides / "slides.csv").write_text(f"slide,patient,split\n{rows}")
    flags = {
        "data": {"slides": str(toy_slides)},
        "train": {"start_from": "first", "epochs": 1, "samples_per_epoch": 2},
    }
    train(TrainingArguments(bare, flags, Path("run")))
    said = capsys.readouterr().err
    assert "trained on slides that are held out now (slide0.png)" in said
    assert said.count("Take care: the earlier run took") == 1
    assert 'took "disc" for "gland" ([annotations] rename), and this one does not.' in said


@pytest.mark.slow
def test_ranks_and_a_plan_start_from_the_same_weights(
    toy_slides: Path,
    bare: Path,
    tiny_bundle: SaveBundle,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny_bundle()
    text = f'{BARE}microbatch = 1\noptimizer = "sgd"\nclip = 0.0\n'
    bare.write_text(text)
    Path("planned.toml").write_text(f'{text}[parallel]\nmemory = "1GiB"\n')
    common = ("train", "--slides", "slides", "--from", "model")
    for out, more in {
        "judge": ("--config", "bare.toml"),
        "ranks": ("--config", "bare.toml", "--ranks", "2", "--order", "gpipe"),
        "planned": ("--config", "planned.toml"),
    }.items():
        process = start(*common, *more, "--out", out)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        assert output.count("From model (unet") == 1
        assert "trained on tiles of 64 px)" in output
        for bundle in ("start", "model"):
            judge = _state(Path("judge", bundle))
            torch.testing.assert_close(_state(Path(out, bundle)), judge, rtol=0, atol=0)


def test_a_finished_run_trains_longer_and_survives_a_kill(
    toy_slides: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"slides": str(toy_slides)}
    flags = {"data": data, "train": {"epochs": 1}, "model": {"width": 4, "depth": 2}}
    other = train(TrainingArguments(bare, flags, Path("other")))
    flags = {"data": data, "train": {"patience": 1, "start_from": "other"}}
    run = train(TrainingArguments(bare, flags, Path("run")))
    summary = json.loads((run / "summary.json").read_text())
    first, best = _losses(run), summary["best_score"]
    steps = summary["steps"] // 2
    asked: list[tuple[int, int]] = []
    rate = trainer.learning_rate

    def learning_rate(config: Any, step: int, total: int) -> float:
        asked.append((step, total))
        assert not (run / "summary.json").exists()
        assert bundle_of(None) == Path("other/model")
        if step == 2 * steps + 1 and len(asked) == 2:
            raise KeyboardInterrupt
        return rate(config, step, total)

    monkeypatch.setattr(trainer, "learning_rate", learning_rate)
    with suppress(KeyboardInterrupt):
        train(TrainingArguments(None, {"train": {"epochs": 4}}, run, resume=True))
    assert load_config(run / "config.toml").train.epochs == 4
    train(TrainingArguments(None, {}, None, resume=True))
    assert {total for _, total in asked} == {4 * steps}
    assert [step for step, _ in asked][-1] >= 3 * steps - 1
    assert (_losses(run)[: len(first)], len(_losses(run)) > len(first)) == (first, True)
    assert json.loads((run / "summary.json").read_text())["best_score"] >= best
    assert bundle_of(None) == Path("run/model")
    assert (other / "summary.json").exists()


def test_other_limits_are_said_and_shorter_ones_refused(
    toy_slides: Path, bare: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    common = ("train", "--slides", toy_slides, "--config", bare, "--from", tiny_bundle())
    assert command(*common, "--out", "run", "--epochs", 2)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    for limits, told in (
        (("--epochs", 1), "run has trained 2 epochs already, and is to train 1 in all"),
        (
            ("--epochs", 2, "--time-limit", "1h"),
            "run has trained 2 epochs already, and is to train 2 in all",
        ),
        (("--epochs", 3, "--time-limit", "0.001s"), "time limit of run is 1.667e-05 min, and it"),
    ):
        code, said = command("train", "--out", "run", "--resume", *limits)
        assert (code, "Traceback" in said) == (2, False)
        assert told in said
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    # With no unfinished run, the newest finished one is meant.
    code, said = command("train", "--resume", "--epochs", 3)
    assert code == 0, said
    assert "run goes on to 3 epochs (before: 2 epochs)." in said
    assert len(_losses(Path("run"))) == 1 + 3
    shutil.rmtree("run/checkpoints")
    code, said = command("train", "--resume", "--epochs", 4)
    assert (code, "new run from its model" in said, is_finished(Path("run"))) == (2, True, True)


def test_a_longer_time_limit_is_laid_over_what_is_left(
    toy_slides: Path, bare: Path, tiny_bundle: SaveBundle
) -> None:
    bare.write_text(BARE.replace("epochs = 2\n", ""))
    limited = {"time_limit": 0.1, "start_from": str(tiny_bundle())}
    run = train(
        TrainingArguments(
            bare, {"data": {"slides": str(toy_slides)}, "train": limited}, Path("run"), resume=False
        )
    )
    before = read_progress(run / "checkpoints" / LAST)
    limit = before.seconds + 60  # of which two epochs take what the machine needs for them
    more = {"time_limit": limit, "epochs": before.epoch + 2}
    train(TrainingArguments(None, {"train": more}, run, resume=True))
    after = read_progress(run / "checkpoints" / LAST)
    assert after.step > before.step
    assert after.prolonged == before.epoch
    np.testing.assert_equal(after.rows[: len(before.rows)], before.rows)  # nan is nan
    assert load_config(run / "config.toml").train.time_limit == limit


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"time_limit": 650.0}, {"time_limit": 700.0}, False),
        ({"time_limit": 650.0}, {"time_limit": 600.0}, True),
        ({"time_limit": 610.0, "epochs": 4}, {"time_limit": 610.0, "epochs": 9}, True),
        ({"time_limit": 900.0, "epochs": 4}, {"time_limit": 900.0, "epochs": 9}, False),
        ({"epochs": 4}, {"epochs": 4, "time_limit": 900.0}, True),
        ({}, {"time_limit": 900.0}, False),
    ],
)
def test_limits_that_leave_something_to_do(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], refused: bool
) -> None:
    progress = Progress(epoch=4, seconds=600.0)
    save_checkpoint(tmp_path / "checkpoints" / LAST, progress, {"model": {}})
    was, becomes = trainer.TrainConfig(**before), trainer.TrainConfig(**now)
    if refused:
        with pytest.raises(PathosegError, match=r"4 epochs already|10 min already"):
            check_limits(tmp_path, was, becomes)
    else:
        check_limits(tmp_path, was, becomes)
