"""Training runs: what they leave behind, and that no interruption changes their course."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pathoseg import config_file
from pathoseg.config import TrainConfig
from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError
from pathoseg.host_memory import LARGE
from pathoseg.models.bundle import load_bundle
from pathoseg.training import run_folder, step_plan, trainer
from pathoseg.training.optimizer import learning_rate
from pathoseg.training.run_folder import bundle_of
from pathoseg.workflows import train as workflow
from pathoseg.workflows.early_checks import TrainingArguments
from pathoseg.workflows.train import train
from tests.conftest import draw_disc
from tests.forked import Forked
from tests.outputs.test_batch_report import parsed

Start = Callable[..., Forked]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def brief(toy_slides: Path) -> Path:
    """The slides; `tiny.toml` trains one epoch of two steps, for what lies around an epoch."""
    text = Path("tiny.toml").read_text()
    Path("tiny.toml").write_text(text.replace("epochs = 4", "epochs = 1\nsamples_per_epoch = 4"))
    return toy_slides


def _rows(run: Path) -> list[dict[str, str]]:
    """metrics.csv without the one figure that is a matter of speed."""
    with (run / "metrics.csv").open() as file:
        return [
            {k: v for k, v in row.items() if k != "tiles_per_s"} for row in csv.DictReader(file)
        ]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_bundle(run / "model")[0].state_dict()


def test_what_the_host_cannot_hold_is_refused_before_anything_is_read(
    brief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data": {"slides": str(brief)}, "train": {"epochs": 1, "batch": 4}}
    monkeypatch.setattr(step_plan, "available_memory", lambda: 2**20)
    with pytest.raises(PathosegError, match=r"takes about .* which has 1 MiB left") as refused:
        train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    assert '[parallel] memory = "922 KiB"' in refused.value.hint
    assert not Path("run").exists()
    needed = re.search(r"about ([\d.]+) MiB", refused.value.problem)
    assert needed is not None
    room = math.ceil(float(needed[1])) << 20
    kept: list[int] = []
    monkeypatch.setattr(step_plan, "keep_freed_memory", kept.append)
    monkeypatch.setattr(step_plan, "available_memory", lambda: room)
    train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    assert not kept  # what the heap's holes take is not there
    monkeypatch.setattr(step_plan, "available_memory", lambda: 2 * room)
    train(TrainingArguments(Path("tiny.toml"), flags, Path("roomy")))
    assert kept == [LARGE]


def test_a_run_leaves_what_the_contract_says_and_learns(toy_slides: Path) -> None:
    flags = {"data": {"slides": str(toy_slides)}, "train": {"epochs": 12}}
    run = train(TrainingArguments(Path("tiny.toml"), flags))
    for name in (
        "config.toml",
        "splits.csv",
        "metrics.csv",
        "model",
        "tensorboard",
        "summary.json",
    ):
        assert (run / name).exists(), name
    assert Path("runs/latest").resolve() == run.resolve()
    assert bundle_of(None) == run / "model"
    rows = _rows(run)
    assert [row["epoch"] for row in rows] == [str(i) for i in range(1, 13)]
    assert list(rows[0])[:6] == [
        "epoch",
        "step",
        "train_loss",
        "val_loss",
        "val_dice_mean",
        "val_iou_mean",
    ]
    assert float(rows[-1]["val_dice_disc"]) > 0.9
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    parsed(run / "report.html")
    page = (run / "report.html").read_text()
    assert "It is finished." in page
    assert "The validation score is the mean Dice of the classes that validation tiles show" in page
    best = max(rows, key=lambda row: float(row["val_dice_mean"]))
    assert f"{float(best['val_dice_mean']):.3f}" in page
    known = json.loads((run / "validation.json").read_text())
    assert str(known["epoch"]) == best["epoch"]
    (_, wrong), (missed, right) = known["confusion"]
    dice = 2 * right / (2 * right + wrong + missed)
    assert float(best["val_dice_disc"]) == pytest.approx(dice, abs=1e-6)
    assert sum(map(sum, known["confusion"])) == 96**2, "the pixels of a validation slide"
    assert known["tiles"]["best"]["loss"] <= known["tiles"]["worst"]["loss"]
    assert re.search(r"<code>train.epochs</code></td><td class=\"text\">12<", page)
    _, card = load_bundle(run / "model")
    assert (card.class_names, card.mpp, card.tile) == (("disc",), 0.5, 32)


def test_equal_seeds_make_equal_runs_and_others_do_not(toy_slides: Path) -> None:
    flags = {"data": {"slides": str(toy_slides)}, "train": {"epochs": 2, "samples_per_epoch": 8}}
    runs = [
        train(TrainingArguments(Path("tiny.toml"), {"": {"seed": seed}, **flags}, Path(f"r{i}")))
        for i, seed in enumerate([0, 0, 1])
    ]
    assert _rows(runs[0]) == _rows(runs[1])
    assert _rows(runs[0]) != _rows(runs[2])
    torch.testing.assert_close(_weights(runs[0]), _weights(runs[1]), rtol=0, atol=0)


@pytest.mark.slow
def test_killed_again_and_again_it_continues_as_if_nothing_had_happened(
    toy_slides: Path, start: Start
) -> None:
    common = ["train", "--slides", str(toy_slides), "--config", "tiny.toml", "--epochs", "10"]
    assert start(*common, "--out", "calm").wait() == 0
    rng = random.Random(0)
    for _ in range(4):
        process = start(*common, "--out", "killed", "--resume")
        metrics, seen = Path("killed/metrics.csv"), _size(Path("killed/metrics.csv"))
        while process.poll() is None and _size(metrics) == seen:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
    assert not Path("killed/summary.json").exists(), "it ended before it was killed four times"
    assert start(*common, "--out", "killed", "--resume").wait() == 0
    assert _rows(Path("killed")) == _rows(Path("calm"))
    torch.testing.assert_close(_weights(Path("killed")), _weights(Path("calm")), rtol=0, atol=0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(
    toy_slides: Path, start: Start, number: signal.Signals, code: int
) -> None:
    common = ["train", "--slides", str(toy_slides), "--config", "tiny.toml", "--epochs", "400"]
    process = start(*common)
    while not list(Path("runs").glob("*/metrics.csv")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Stopping, as soon as" in output
    assert "--resume" in output
    assert "Traceback" not in output
    assert list(Path("runs").glob("*/checkpoints/last.pt"))
    [page] = Path("runs").glob("*/report.html")
    parsed(page)
    assert "stopped before its end. It goes on with: pathoseg train" in page.read_text()


def test_a_time_limit_ends_in_order_and_is_laid_over_the_schedule(
    toy_slides: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks whenever it is read, so that no busy machine changes the course."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: 0.02 * next(ticks))
    for module in (trainer, workflow):
        monkeypatch.setattr(module, "time", clock)
    flags = {"data": {"slides": str(toy_slides)}, "train": {"epochs": None, "time_limit": 1.0}}
    config = Path("limited.toml")
    config.write_text(Path("tiny.toml").read_text().replace("epochs = 4\n", ""))
    run = train(TrainingArguments(config, flags))
    said = capsys.readouterr().err
    assert "epoch 2  " in said
    assert "epoch 2 of" not in said, "the limit may end it before the schedule does"
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    progress = state["progress"]
    assert progress["total_steps"] is not None
    assert 0 < progress["step"] <= progress["total_steps"]
    assert (run / "model" / "model.json").exists()


def test_no_step_begins_that_would_end_after_the_time_limit(
    toy_slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that become eight times as long once the schedule is laid, by a clock of their own."""
    ticks, waited = count(), [0.0]

    def slow(config: TrainConfig, step: int, total_steps: int) -> float:
        waited.append(waited[-1] + 0.15 * (step >= 20))
        return learning_rate(config, step, total_steps)

    clock = SimpleNamespace(monotonic=lambda: waited[-1] + 0.02 * next(ticks))
    for module in (trainer, workflow):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("pathoseg.training.trainer.learning_rate", slow)
    flags = {"data": {"slides": str(toy_slides)}, "train": {"time_limit": 1.0}}
    config = Path("limited.toml")
    config.write_text(Path("tiny.toml").read_text().replace("epochs = 4\n", ""))
    run = train(TrainingArguments(config, flags))
    progress = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["progress"]
    assert 20 < progress["step"] < progress["total_steps"]
    assert progress["seconds"] <= 1.0


def test_a_time_limit_below_a_step_says_what_still_follows(
    toy_slides: Path, command: Command
) -> None:
    options = ("--config", "tiny.toml", "--slides", str(toy_slides), "--time-limit", "0.01s")
    code, said = command("train", *options)
    assert code == 0, said
    assert "The time limit of 0.01 s is over after" in said
    assert "1 step: what is left is one validation" in said
    [run] = [path for path in Path("runs").iterdir() if path.is_dir() and path.name != "latest"]
    progress = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["progress"]
    longer = f"{progress['seconds'] + 0.001}s"
    code, said = command("train", "--resume", "--out", run, "--time-limit", longer)
    assert code == 0, said
    assert "Nothing was trained: what was left of the limits was too short" in said
    after = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["progress"]
    assert after["step"] == progress["step"]


def test_resuming_with_other_values_is_refused_by_name(brief: Path) -> None:
    flags = {"data": {"slides": str(brief)}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    with pytest.raises(PathosegError, match=r"tiles\.tile"):
        train(TrainingArguments(None, {"tiles": {"tile": 64}}, run, resume=True))


def test_a_resumed_run_keeps_the_defaults_of_its_format(
    toy_slides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file it began by, too, which says nothing of formats."""
    monkeypatch.setattr(config_file, "_FORMER_DEFAULTS", {1: {"train": {"epochs": 2}}})
    text = Path("tiny.toml").read_text().replace("epochs = 4", "samples_per_epoch = 4")
    text = text.replace("[data]", '[data]\nslides = "slides"')
    Path("run").mkdir()
    for name in ("tiny.toml", "run/config.toml"):
        Path(name).write_text(text)
    assert (
        len(_rows(train(TrainingArguments(Path("tiny.toml"), {}, Path("run"), resume=True)))) == 2
    )


@pytest.mark.parametrize("parallel", [{}, {"memory": "2GiB"}], ids=["alone", "planned"])
def test_layers_are_compiled_where_it_is_asked_for(
    parallel: dict[str, str], brief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler that does nothing: the weights are those of a run without, to the bit."""
    blocks = []

    def compile_nothing(block: torch.nn.Module, **_: Any) -> torch.nn.Module:
        blocks.append(block)
        return block

    monkeypatch.setattr(torch, "compile", compile_nothing)
    flags: dict[str, dict[str, Any]] = {"data": {"slides": str(brief)}, "parallel": parallel}
    weights = []
    for compiles in (False, True):
        assert not blocks
        flags["train"] = {"epochs": 1, "compile": compiles}
        weights.append(
            _weights(train(TrainingArguments(Path("tiny.toml"), flags, Path(str(compiles)))))
        )
    assert blocks
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_resuming_in_other_microbatches_says_what_changes(
    brief: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, dict[str, Any]] = {"data": {"slides": str(brief)}, "train": {"epochs": 1}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    said = []
    for wanted in ({}, {"microbatch": 1}, {}):  # as it was, another, and that again
        (run / "summary.json").unlink()
        capsys.readouterr()
        train(TrainingArguments(None, {"train": wanted}, run, resume=True))
        said.append("Microbatches of 1, not 2 as before: random layers" in capsys.readouterr().err)
    assert said == [False, True, False]
    assert load_config(run / "config.toml").train.microbatch == 1


def test_a_finished_run_is_not_trained_again(brief: Path) -> None:
    flags = {"data": {"slides": str(brief)}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    before = (run / "metrics.csv").stat().st_mtime_ns
    train(TrainingArguments(None, {}, run, resume=True))
    assert (run / "metrics.csv").stat().st_mtime_ns == before
    with pytest.raises(PathosegError, match=r"already holds a run, finished, by .*config\.toml"):
        train(TrainingArguments(Path("tiny.toml"), flags, run))


def test_a_run_is_replaced_once_all_input_is_read(brief: Path) -> None:
    flags: dict[str, dict[str, Any]] = {"data": {"slides": str(brief)}, "train": {"epochs": 2}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    calm = _rows(run)
    (run / "notes.txt").write_text("mine")
    (run / "evaluation.csv").touch()
    (run / "splits.csv").write_text("slide,patient,split\n")  # of no slide any more
    latest = Path("runs/latest").resolve()
    assert latest == run.resolve()
    for options, out, resume, words in (
        ({"start_from": "nothing"}, run, False, "nothing"),
        ({}, run, True, "--resume goes on"),
        ({}, None, False, "is not given"),
    ):
        with pytest.raises(PathosegError, match=words):
            train(
                TrainingArguments(
                    Path("tiny.toml"), flags | {"train": options}, out, resume, overwrite=True
                )
            )
        assert _rows(run) == calm, "nothing is touched by what is refused"
        assert (run / "summary.json").exists()
    assert train(TrainingArguments(Path("tiny.toml"), flags, run, overwrite=True)) == run
    assert _rows(run) == calm, "it begins anew"
    assert not (run / "evaluation.csv").exists()
    assert (run / "notes.txt").read_text() == "mine"
    assert bundle_of(None).resolve() == (run / "model").resolve()


def test_the_run_behind_latest_is_replaced_and_no_other(brief: Path) -> None:
    flags: dict[str, dict[str, Any]] = {"data": {"slides": str(brief)}, "train": {"epochs": 1}}
    config = Path("tiny.toml")
    first, second = (train(TrainingArguments(config, flags, Path("runs") / name)) for name in "ab")
    files = [path for path in first.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    again = train(TrainingArguments(config, flags, Path("runs/latest"), overwrite=True))
    assert again == second
    longer = {"train": {"epochs": 2}}
    assert train(TrainingArguments(None, longer, Path("runs/latest"), resume=True)) == second
    assert len(_rows(second)) == 2
    assert {path: path.read_bytes() for path in files} == before
    assert Path("runs/latest").resolve() == second.resolve()


def test_slides_that_came_later_stay_out_of_a_run_that_goes_on(brief: Path) -> None:
    flags = {"data": {"slides": str(brief)}, "train": {"epochs": 1}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    splits = (run / "splits.csv").read_text()
    (run / "summary.json").unlink()
    for seed in range(4, 9):
        draw_disc(brief / f"slide{seed}.png", seed)
    (brief / "slide5_mask.png").write_bytes(b"cut short")  # not looked at
    away = brief / "slide0_mask.png"
    away.rename("away.png")
    (brief / "slide1.png").rename("gone.png")
    train(TrainingArguments(None, {}, run, resume=True))
    assert '"slide1.png": "it is gone' in (run / "summary.json").read_text()
    assert (run / "splits.csv").read_text() == splits, "one that is away for once keeps its place"
    Path("away.png").rename(away)
    Path("gone.png").rename(brief / "slide1.png")
    (run / "summary.json").unlink()
    train(TrainingArguments(None, {}, run, resume=True))
    assert "slide0" not in (run / "summary.json").read_text()
    assert '"slide8.png": "it came after the run began"' in (run / "summary.json").read_text()
    Path("other").mkdir()
    draw_disc(Path("other/else.png"), 9)
    (run / "summary.json").unlink()
    with pytest.raises(
        PathosegError, match="other holds none of the run's slides: slide"
    ) as refused:
        train(TrainingArguments(None, {"data": {"slides": "other"}}, run, resume=True))
    assert "that the run began with" in refused.value.hint


def test_a_run_goes_on_where_its_slides_were_moved(brief: Path) -> None:
    """Compare its losses with those of a run that stayed; read the new folder in its options."""
    longer: dict[str, dict[str, Any]] = {"train": {"epochs": 2}}
    runs = []
    for name in "ab":
        flags: dict[str, Any] = {"data": {"slides": str(brief)}, "train": {"epochs": 1}}
        run = train(TrainingArguments(Path("tiny.toml"), flags, Path(name)))
        if name == "b":
            moved = brief.rename("elsewhere")
            with pytest.raises(PathosegError, match="slides, which is not there") as refused:
                train(TrainingArguments(None, {"train": {"epochs": 2}}, run, resume=True))
            assert "--slides DIR" in refused.value.hint
            longer = {
                "data": {"slides": str(moved)},
                "tiles": {"cache": "cache"},
                "train": {"epochs": 2, "readers": 1},
            }
        runs.append(train(TrainingArguments(None, longer, run, resume=True)))
    stayed, moved_run = map(_rows, runs)
    assert [row["train_loss"] for row in moved_run] == [row["train_loss"] for row in stayed]
    assert 'slides = "elsewhere"' in (runs[1] / "config.toml").read_text()
    assert train(TrainingArguments(None, {"train": {"epochs": 3}}, runs[1], resume=True)) == runs[1]


def test_a_truncated_checkpoint_is_named(brief: Path) -> None:
    flags = {"data": {"slides": str(brief)}}
    run = train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    (run / "summary.json").unlink()
    last = run / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(PathosegError, match=r"last\.pt cannot be used"):
        train(TrainingArguments(None, {}, run, resume=True))


def test_microbatches_with_group_norm_train_the_same_course(toy_slides: Path) -> None:
    text = Path("tiny.toml").read_text().replace("[model]", '[model]\nnorm = "group"')
    Path("whole.toml").write_text(text)
    Path("parts.toml").write_text(text.replace("batch = 2", "batch = 2\nmicrobatch = 1"))
    flags = {"data": {"slides": str(toy_slides)}}
    whole, parts = (
        _rows(train(TrainingArguments(Path(f"{name}.toml"), flags, Path(name))))
        for name in ("whole", "parts")
    )
    for one, other in zip(whole, parts, strict=True):
        assert float(one["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-2)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: [p.unlink() for p in folder.glob("*_mask.png")], "No slide can be used"),
        (lambda folder: [p.unlink() for p in folder.iterdir()], "holds no slides"),
        (lambda folder: (folder / "slide1.png").write_bytes(b"\x89PNG broken"), "slide1.png"),
    ],
)
def test_folders_that_cannot_be_trained_on_are_refused(
    toy_slides: Path, prepare: Callable[[Path], object], message: str
) -> None:
    prepare(toy_slides)
    with pytest.raises(PathosegError, match=message):
        train(TrainingArguments(Path("tiny.toml"), {"data": {"slides": str(toy_slides)}}))


def test_a_bad_slide_can_be_left_out_and_is_recorded(brief: Path) -> None:
    (brief / "slide1.png").write_bytes(b"\x89PNG broken")
    flags = {"data": {"slides": str(brief), "skip_bad_slides": True}}
    run = train(TrainingArguments(Path("tiny.toml"), flags))
    assert "slide1.png" in (run / "summary.json").read_text()
    assert "slide1.png" not in (run / "splits.csv").read_text()


def test_tiles_are_classified_and_judged(toy_slides: Path) -> None:
    for image, mask in zip(
        sorted(toy_slides.glob("slide?.png")), sorted(toy_slides.glob("*_mask.png")), strict=True
    ):
        _paint_halves(image, mask)
    text = Path("tiny.toml").read_text()
    text = text.replace('classes = ["disc"]', 'classes = ["light", "dark"]')
    text = text.replace("width = 4\ndepth = 2", 'name = "resnet11_v2"\ntask = "classify"')
    Path("classify.toml").write_text(text)
    flags = {"data": {"slides": str(toy_slides)}, "train": {"epochs": 6}}
    rows = _rows(train(TrainingArguments(Path("classify.toml"), flags)))
    assert float(rows[-1]["val_accuracy"]) > 0.9
    assert float(rows[-1]["val_auc_dark"]) > 0.95
    assert rows[-1]["val_dice_mean"] == ""


def _paint_halves(image: Path, mask: Path) -> None:
    """A light and a dark half, with a label each."""
    classes = np.repeat([[1, 2]], 96, axis=0).repeat(48, axis=1).astype(np.uint8)
    noise = np.random.default_rng(0).normal(0, 8, (96, 96, 3))
    pixels = np.where(classes[..., None] == 1, (230, 180, 210), (130, 70, 150)) + noise
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(image)
    Image.fromarray(classes).save(mask)


@pytest.mark.parametrize("method", ["macenko", "reinhard"])
def test_a_stain_normaliser_is_fitted_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {
        "data": {"slides": str(Path(__file__).resolve().parents[2] / "sample_data")},
        "tiles": {"stain": method, "mpp": 4, "tile": 128},
        "model": {"width": 4, "depth": 2},
        "train": {"epochs": 1, "samples_per_epoch": 4},
    }
    _, card = load_bundle(train(TrainingArguments(None, flags)) / "model")
    assert card.stain == {"method": method}


def test_an_order_that_one_process_cannot_follow_is_named(
    brief: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "data": {"slides": str(brief)},
        "train": {"epochs": 1},
        "parallel": {"order": "1f1b"},
    }
    train(TrainingArguments(Path("tiny.toml"), flags))
    said = capsys.readouterr().err
    assert "the order 1f1b is for several ranks" in said
    assert "Every slide counts as a patient of its own" in said
    assert "epoch 1 of 1  " in said


def test_without_validation_the_last_epoch_is_kept(
    brief: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("slide1", "slide2", "slide3"):
        (brief / f"{name}.png").unlink()
        (brief / f"{name}_mask.png").unlink()
    table = brief / "slides.csv"
    table.write_text("slide,patient,split\nslide0.png,anna,train\n")
    flags = {"data": {"slides": str(brief)}, "train": {"epochs": 3, "time_limit": 600.0}}
    run = train(TrainingArguments(Path("tiny.toml"), flags))
    assert len(_rows(run)) == 3
    last = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    torch.testing.assert_close(_weights(run), dict(last["model"]), rtol=0, atol=0)
    assert '"best_score": null' in (run / "summary.json").read_text()
    said = capsys.readouterr().err
    assert f"Patients and splits: {table}" in said
    assert "a patient of its own" not in said
    assert "Last epoch: 3. Model:" in said


@pytest.mark.parametrize("tissue", [True, False])
def test_validation_slides_without_any_class_judge_no_epoch(
    brief: Path, capsys: pytest.CaptureFixture[str], tissue: bool
) -> None:
    """Keep the newest model: without foreground Dice is 0 from the first false positive on."""
    Image.fromarray(np.zeros((96, 96), np.uint8)).save(brief / "slide3_mask.png")
    if not tissue:
        Image.fromarray(np.full((96, 96, 3), 255, np.uint8)).save(brief / "slide3.png")
    table = brief / "slides.csv"
    splits = ["train", "train", "train", "val"]
    rows = [f"slide{number}.png,p{number},{split}\n" for number, split in enumerate(splits)]
    table.write_text("".join(["slide,patient,split\n", *rows]))
    flags = {"data": {"slides": str(brief)}, "train": {"epochs": 3, "patience": 1}}
    run = train(TrainingArguments(Path("tiny.toml"), flags))
    assert len(_rows(run)) == 3, "patience waits for a score"
    last = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    torch.testing.assert_close(_weights(run), dict(last["model"]), rtol=0, atol=0)
    assert json.loads((run / "summary.json").read_text())["best_score"] is None
    said = capsys.readouterr().err
    assert ("nothing tells which epoch is best" in said) == tissue
    assert "Last epoch: 3. Model:" in said


def test_a_run_that_another_command_has_begun_meanwhile_is_kept(
    brief: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data": {"slides": str(brief)}, "train": {"epochs": 1}}
    cut = workflow.cut_labelled_slides

    def overtaken(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(workflow, "cut_labelled_slides", cut)
        train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
        return cut(*arguments, **named)

    monkeypatch.setattr(workflow, "cut_labelled_slides", overtaken)
    with pytest.raises(PathosegError, match="Another command has begun a run in run meanwhile"):
        train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    assert (run_folder.is_finished(Path("run")), len(_rows(Path("run")))) == (True, 1)


def test_class_weights_for_other_classes_are_refused_ahead_of_the_run(toy_slides: Path) -> None:
    flags = {"data": {"slides": str(toy_slides)}, "loss": {"class_weights": [1.0, 2.0, 3.0]}}
    with pytest.raises(PathosegError, match="3 numbers for 2 classes"):
        train(TrainingArguments(Path("tiny.toml"), flags, Path("run")))
    assert not Path("run").exists()
