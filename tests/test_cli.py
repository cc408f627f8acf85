"""The command line: help, options, configuration errors, signals while it starts, its silence."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer.main
from PIL import Image

from pathoseg.cli import app, main
from pathoseg.version import __version__

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]

COMMANDS = ("check", "train", "infer", "evaluate", "view", "cache", "plan", "calibrate")
HEAVY = ("torch", "numpy", "tifffile", "zarr", "openslide", "scipy")


def test_help_lists_every_command_and_only_those(command: Command) -> None:
    for arguments in (["--help"], ["-h"]):
        code, said = command(*arguments)
        assert code == 0
        assert all(name in said for name in COMMANDS)
    assert {*typer.main.get_group(app).commands} == {*COMMANDS}
    code, said = command()
    assert code == 2
    assert "Usage" in said
    assert command("--version") == (0, f"pathoseg {__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_parses(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("slides", "runs/latest"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    code, said = command(name, "--help")
    assert code == 0
    assert ("--ranks" in said) == (name in ("train", "infer", "plan"))
    assert ("--order" in said) == (name in ("train", "plan"))
    example = said.partition("Example: ")[2].split()
    assert example[:2] == ["pathoseg", name]
    parser = typer.main.get_command(app)
    with parser.make_context("pathoseg", example[1:]) as context:
        sub = parser.get_command(context, name)
        assert sub.make_context(name, example[2:]).params["debug"] is False
        told = " ".join(re.sub("[│\n]", " ", said).split())
        for each in sub.params:
            stated = re.search(r"\[default: .*]", getattr(each, "help", None) or "")
            assert stated is None or stated[0] in told, each.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train --slides a --tile 256 --slides b --tile 512", "--tile is given 2 times"),
        ("evaluate --model a --out b --model a --debug --debug", "--model is given 2 times"),
        ("check --slides no1 --slides no2 --debug --debug", "names no1, which does not exist"),
    ],
)
def test_an_option_given_twice_is_taken_or_refused(
    arguments: str, told: str, command: Command
) -> None:
    code, said = command(*arguments.split())
    assert (code, told in said) == (2, True), said


@pytest.mark.process
@pytest.mark.parametrize("argument", ["--help", "--version", "infer --help", "nonsense"])
def test_help_imports_no_heavy_library(argument: str) -> None:
    program = (
        "import sys, pathoseg, pathoseg.__main__\n"
        f"sys.argv = ['pathoseg', *{argument.split()}]\n"
        "try:\n    pathoseg.__main__.main()\n"
        f"finally:\n    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_wrong_input_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    for name in ("empty", "plain", "broken"):
        (tmp_path / name).mkdir()
    for name in ("plain", "broken"):
        Image.new("RGB", (64, 64)).save(tmp_path / name / "a.png")
    (tmp_path / "broken" / "a.geojson").write_text('{"type": "FeatureCollection", "features": [')
    refused = {
        "train": "No slides are given",
        "train --slides empty": "holds no slides",
        "train --slides plain --from nope": "--from",
        "train --slides plain": "No slide can be used",
        "train --slides broken": "--assume-mpp",
        "train --slides broken --assume-mpp 0.5": "a.geojson",
        "train --slides plain --tile 1000": "Choose 992 or 1008 px",
        "train --resume": "no unfinished run",
        "evaluate": "no finished run",
        "evaluate --slides empty --model plain": "plain",
        "check --slides empty": "holds no slides",
    }
    if not (torch.version.cuda or torch.version.hip or torch.version.xpu):
        refused["calibrate --device cuda"] = "has the CPU alone"
    program = (
        "import sys, pathoseg.__main__\n"
        f"for arguments in {[*refused]}:\n"
        "    sys.argv = ['pathoseg', *arguments.split()]\n"
        "    try:\n        pathoseg.__main__.main()\n"
        "    except SystemExit as end:\n        print(end.code, 'torch' in sys.modules)\n"
        "        print('-' * 9, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["2 False"] * len(refused)
    said = done.stderr.split("-" * 9 + "\n")
    for words, told in zip(refused.values(), said, strict=False):
        assert words in " ".join(told.split()), told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trian",), ["trian", "train"]),
        (("infer", "s.svs", "--modle", "x"), ["--modle", "--model"]),
        (("infer",), ["SLIDE", "is missing"]),
        (("infer", "--ranks", "0", "s.svs"), ["--ranks", "1 or more"]),
        (("train", "slides/"), ["pathoseg train --slides slides/"]),
        (("cache", "slides/"), ["pathoseg cache --slides slides/"]),
        (("train", "--slides"), ["--slides needs a value"]),
        (("train", "--lr", "1"), ["--lr", "[train]", "--config"]),
        (("infer", "s.svs", "--time-limit", "1m"), ["--time-limit", "option of pathoseg train"]),
        (("evaluate", "--model", "no"), ["--model names no, which does not exist"]),
        (("evaluate", "--model", "no"), ["Run or bundle. [default: the newest finished run]"]),
        (("check", "--annotations", "no"), ["--annotations names no, which does not exist"]),
        (("train", "--out", "x", "--nothing-like-it"), ["--nothing-like-it", "--help"]),
        (
            ("train", "--slides", "slides", "--batch", "0"),
            ["--batch 0", "1 or more", "default is 4"],
        ),
        (("train", "--slides", "slides", "--readers", "none"), ["--readers", "a whole number"]),
        (("infer", "s.svs", "--memory", "lots"), ["--memory lots", "16GiB", "4GiB"]),
        (("train", "--tile", "wide"), ["--tile", "a whole number"]),
        (("train", "--mpp", "fine"), ["--mpp"]),
        (("train", "--time-limit", "soon"), ["soon", "30m"]),
        (("train",), ["No slides are given", "--slides"]),
        (("cache",), ["No slides are given", "--slides"]),
        (("train", "--resume"), ["no unfinished run", "--slides"]),
        (("train", "--resume", "--out", "nope"), ["no run in nope to go on with", "--slides"]),
        (("train", "--config", "no.toml"), ["no.toml", "--config"]),
        (("train", "--slides", "slides", "--tile", "0"), ["--tile 0 does not fit"]),
        (("train", "--slides", "slides", "--mpp", "-1"), ["--mpp -1"]),
        (("train", "--slides", "slides", "--mpp", "nan"), ["--mpp nan does not fit"]),
        (("train", "--slides", "slides", "--epochs", "0"), ["--epochs 0 does not fit"]),
        (("train", "--slides", "slides", "--time-limit", "0"), ["--time-limit 0"]),
        (("train", "--slides", "slides", "--assume-mpp", "0"), ["--assume-mpp 0"]),
        (("train", "--slides", "slides", "--model", "unett"), ["unett", "unet"]),
        (("train", "--slides", "slides", "--model", "no_module:make"), ["no_module"]),
        (("train", "--slides", "slides", "--model", "resnet50"), ["resnet50", "Known are"]),
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused_with_the_hint(
    arguments: tuple[str, ...], words: list[str], command: Command, toy_slides: Path
) -> None:
    if "--model" in arguments and "train" in arguments:
        Path("tiny.toml").write_text("[data]\nassume_mpp = 0.5\n[tiles]\ntile = 32\n")
        arguments = (*arguments, "--config", "tiny.toml")
    code, said = command(*arguments)
    assert code == 2
    assert "Traceback" not in said
    assert all(word in said for word in words), said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nepoch = 3\n", ["train.epoch", "`epochs`"]),
        ("[trian]\nepochs = 3\n", ["trian", "`train`"]),
        ("seeed = 3\n", ["seeed", "`seed`"]),
        ('[tiles]\ntile = "big"\n', ["tiles.tile", "'big'"]),
        ("tiles = 512\n", ["tiles", "[tiles]"]),
        ('[train]\noptimizer = "adam"\n', ["train.optimizer", "adamw"]),
        ("[train]\nepochs 3\n", ["line 2"]),
        ("[train]\nreaders = 0\n", ["train.readers"]),
        ("[infer]\noverlap = -8\n", ["infer.overlap"]),
        ("[infer]\nsimplify = nan\n", ["infer.simplify"]),
        ("[train]\nbatch = 0\n", ["train.batch"]),
        ("[train]\nlr = -1\n", ["train.lr"]),
        ("[data]\nval_share = 1.5\n", ["data.val_share"]),
    ],
)
def test_a_wrong_configuration_names_file_key_and_hint(
    text: str, words: list[str], toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    Path("wrong.toml").write_text(text)
    for arguments in (
        ("train", "--slides", toy_slides),
        ("infer", toy_slides / "slide0.png", "--model", tiny_bundle()),
    ):
        code, said = command(*arguments, "--config", "wrong.toml")
        assert code == 2
        assert "Traceback" not in said
        assert all(word in said for word in ["wrong.toml", *words]), said
    assert not Path("results").exists()


def test_only_debug_shows_the_traceback(tmp_path: Path, command: Command) -> None:
    arguments = ("train", "--config", tmp_path / "missing.toml")
    code, said = command(*arguments)
    assert code == 2
    assert said.startswith(f"Error: {tmp_path}/missing.toml cannot be read")
    code, loud = command(*arguments, "--debug")
    assert code == 2
    assert "Traceback" in loud
    assert loud.endswith(said)


def test_memory_that_runs_out_is_one_error(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("Unable to allocate 9.31 GiB")

    monkeypatch.setattr("pathoseg.workflows.check.check", exhausted)
    code, said = command("check", "--slides", ".")
    assert code == 2
    assert said.startswith("Error: The memory is used up (Unable to allocate 9.31 GiB).\n")
    assert said.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_any_moment_of_the_start_ends_quietly(
    toy_slides: Path, start_python: Start, number: signal.Signals, code: int
) -> None:
    """From the first import of ours on; before, the interpreter itself answers."""
    for delay in (0.0, 0.1, 0.5, 1.2, 2.0):
        process = start_python("train", "--slides", str(toy_slides), "--config", "tiny.toml")
        _wait_for_handlers(process)
        time.sleep(delay)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert "Traceback" not in said
        assert "Stopped." in said


_STOPPED_QUIETLY = """import signal, pathoseg.__main__ as start
from pathoseg.training.distributed import silent
signal.signal(signal.SIGTERM, start._stop)
with silent():
    signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.process
def test_a_signal_while_slides_are_checked_quietly_is_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED_QUIETLY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (143, "Stopped. Run the same command again.\n")


def _wait_for_handlers(process: subprocess.Popen[str]) -> None:
    """Until SIGTERM is caught, as /proc tells."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        line = next(row for row in status.read_text().splitlines() if row.startswith("SigCgt"))
        if int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)


_COURSE = """import sys
from pathoseg.__main__ import main
for arguments in (
    "train --slides slides --config tiny.toml --epochs 1",
    "infer slides/slide0.png --assume-mpp 0.5",
):
    sys.argv = ["pathoseg", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        print("-" * 9, end.code, flush=True)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_whole_course_says_only_what_is_ours(toy_slides: Path, tmp_path: Path) -> None:
    """In one new interpreter, so that what imports and its end print is heard, too."""
    said = subprocess.run(
        [sys.executable, "-c", _COURSE],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    ).stdout  # fmt: skip
    trained, inferred, end = said.split("-" * 9)
    assert len(trained.splitlines()) == 6, said
    code, *inferred_lines = inferred.splitlines()
    assert (code.split(), len(inferred_lines)) == (["0"], 3), said
    assert end.split() == ["0"], said
    assert (tmp_path / "runs" / "latest" / "model").is_dir()
    assert (tmp_path / "results" / "slide0" / "summary.json").is_file()


@pytest.mark.slow
def test_what_was_asked_for_is_on_standard_output(
    toy_slides: Path,
    tiny_bundle: SaveBundle,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """So that it can be piped: the tables there, and on standard error where files are."""
    model, common = str(tiny_bundle()), ("--config", "tiny.toml")
    evaluate = ("evaluate", "--slides", str(toy_slides), "--model", model, "--assume-mpp", "0.5")
    small = ("--model", "unet", "--tile", "32", "--ranks", "2", "--level", "module")
    for arguments, answer, work in (
        (("check", "--slides", str(toy_slides), *common), "slide3.png", "Written to check.csv"),
        (("plan", *common, *small), "microbatches", "Plan: plan.json"),
        (
            (*evaluate, "--out", "out"),
            "slide3.png (unseen)  Dice: mean",
            "Written to out/evaluation.csv",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["pathoseg", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert end.value.code == 0, err
        assert (answer in out, answer in err) == (True, False), (out, err)
        assert (work in out, work in err) == (False, True), arguments
