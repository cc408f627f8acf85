"""Tests `pathoseg plan`: what it says and writes, and one clear error for each bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pathoseg.errors import PathosegError
from pathoseg.models.build import build_model
from pathoseg.models.model_options import ModelConfig
from pathoseg.parallel.cost import timing
from pathoseg.parallel.cost.calibration_layers import Case
from pathoseg.parallel.cost.hardware import load_hardware, save_hardware
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import Plan
from pathoseg.workflows.plan import largest_side

Command = Callable[..., tuple[int, str]]

SMALL = """
[tiles]
tile = 64
[model]
width = 4
depth = 2
[parallel]
hardware = "v100"
ranks = 4
"""
SHALLOW = SMALL.replace("depth = 2", "depth = 1")  # of which strips are read in half the time
GROUP_NORM = SHALLOW.replace("depth = 1", 'depth = 1\nnorm = "group"')
# Few layers, as a search for the largest tile that fits reads the network at each side it tries.
OWN = """
from torch import nn
def make(in_channels, classes):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.Conv2d(4, classes, 1))
class Chain(nn.Sequential):
    multiple = 4
    def __init__(self, in_channels, classes):
        widths = [in_channels, *[4] * 4, classes]
        pairs = zip(widths, widths[1:])
        super().__init__(*(nn.Conv2d(one, other, 3, padding=1) for one, other in pairs))
"""
CHAIN = 'name = "own_net:Chain"'
ODD = """
import torch
from torch import nn
class Odd(nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, classes, 3, padding=1)
    def forward(self, x):
        x = self.conv(x)
        return FORWARD
make = Odd
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def _plan(command: Command, *more: object) -> tuple[Plan, str]:
    code, said = command("plan", "--config", "small.toml", *more)
    assert code == 0, said
    folder = re.search(
        r"^Plan: (.*?)(?:, in place of an earlier one)?\. Timeline: (.*)\.$", said, re.MULTILINE
    )
    assert folder is not None
    ElementTree.fromstring(Path(folder[2]).read_text())
    return Plan.from_json(Path(folder[1]).read_text()), said


def test_strips_are_chosen_where_they_are_faster_or_all_that_fits(command: Command) -> None:
    wide = SHALLOW.replace("tile = 64", "tile = 256").replace("v100", "cpu")
    Path("small.toml").write_text(wide.replace("ranks = 4", "ranks = 2") + "[train]\nbatch = 1\n")
    found, said = _plan(command, "--memory", "16MiB")
    assert found.shards == 2
    reason = r"cut into 2 strips of rows, on as many ranks: whole tiles take \d.* s a step \("
    assert re.search(reason, said)
    assert "A rank here stands for 2 ranks that share each tile." in said
    kept = Path("small.toml").read_text()
    kept = kept.replace("ranks = 2", "ranks = 2\nrecompute = false\noffload = 'none'")
    Path("small.toml").write_text(kept)
    alone = ("--memory", "16MiB", "--order", "sequential")
    found, said = _plan(command, *alone)
    assert (found.shards, found.order) == (2, "sequential")
    assert "on as many ranks: whole tiles do not fit." in said
    Path("small.toml").write_text(kept.replace("ranks = 2", "ranks = 2\nshards = 1"))
    code, said = command("plan", "--config", "small.toml", *alone)
    assert code == 2, said
    assert "strips" not in said


def test_a_plan_is_shown_and_written(command: Command) -> None:
    found, said = _plan(command, "--batch", 4)
    assert "datasheet roofline of v100: nothing was measured" in said
    rows = [line.split() for line in said.splitlines() if re.search(r"\d s ", line)]
    assert {"sequential", "1f1b", "gems-mast", "gpipe"} <= {row[0] for row in rows}
    assert rows[0][0] == found.order
    assert Path("plan.json").is_file()
    with torch.device("meta"):
        model = build_model(ModelConfig("unet", "segment", 2, width=4, depth=2))
        graph = Traced(model, torch.empty(1, 3, 64, 64)).graph
    assert found.partition(graph).bounds == found.bounds


def test_the_files_go_where_they_are_asked_for(command: Command) -> None:
    _plan(command, "--out", "there/plans", "--draw", "model.svg", "--order", "1f1b")
    assert sorted(str(path) for path in Path().rglob("*.[js]*")) == [
        "model.svg",
        "there/plans/plan.json",
        "there/plans/timeline.svg",
    ]
    ElementTree.parse("model.svg")


def test_files_that_are_replaced_are_told(command: Command) -> None:
    options = ("--draw", "model.svg", "--order", "1f1b")
    assert "earlier" not in _plan(command, *options)[1]
    again = _plan(command, *options)[1].splitlines()
    assert "Plan: plan.json, in place of an earlier one. Timeline: timeline.svg." in again
    assert "Drawing: model.svg, in place of an earlier one." in again


def test_the_drawing_shows_times_and_stages(command: Command) -> None:
    found, _ = _plan(command, "--order", "1f1b", "--cut", "encoder.1,decoder.0", "--draw", "it.svg")
    drawn = ElementTree.parse("it.svg")
    words = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"seconds", "stage", "receives"} <= words
    assert {str(stage) for stage in range(found.stages)} <= words


@pytest.mark.parametrize(
    ("level", "count", "name"),
    [
        ("module", 6, "decoder.0"),
        ("block", 27, "decoder.0.convolve"),
        ("layer", 37, "decoder.0.up"),
    ],
)
def test_a_level_lists_the_graph_and_draws_it_so(
    level: str, count: int, name: str, command: Command
) -> None:
    options = ("--order", "1f1b", "--cut", "encoder.1,decoder.0", "--level", level)
    found, said = _plan(command, *options, "--draw", "it.svg")
    listed = [line.split()[0] for line in said.splitlines() if line.endswith(" saved")]
    assert len(listed) == count
    assert name in listed
    drawn = ElementTree.parse("it.svg")
    words = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {str(stage) for stage in range(found.stages)} <= words


def test_stages_that_begin_inside_of_a_module_are_not_drawn_on_it(command: Command) -> None:
    options = ("--order", "1f1b", "--cut", "encoder.1.conv2", "--level", "module")
    _, said = _plan(command, *options, "--draw", "it.svg")
    assert "It shows no stages: they begin inside of a module." in said


def test_an_order_and_a_cut_are_kept(command: Command) -> None:
    found, said = _plan(
        command, "--order", "gems-mast", "--cut", "encoder.1,decoder.0", "--batch", 4
    )
    assert (found.order, found.stages, found.placement) == ("gems-mast", 3, "mirrored")
    assert "Best: gems-mast, 3 stages (mirrored)" in said


def test_ranks_that_stay_idle_are_told(command: Command) -> None:
    options = ("--ranks", 3, "--order", "data-parallel", "--batch")
    _, said = _plan(command, *options, 2)
    assert "Idle: one rank; --batch 3 would use all." in said
    assert "Idle" not in _plan(command, *options, 3)[1]


@pytest.mark.usefixtures("own")
def test_a_profile_times_the_layers_themselves(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("small.toml").write_text(SMALL.replace("width = 4\ndepth = 2", CHAIN))
    two_layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))  # all take 15 s
    one = Case(two_layers, ((2, 3, 32, 32),))
    monkeypatch.setattr(timing, "reference_networks", lambda: [one])
    fitted, _ = _plan(command, "--hardware", "cpu")
    profiled, said = _plan(command, "--hardware", "cpu", "--profile")
    assert "distinct layers timed on this device (cpu)" in said
    assert "timed on this device" in profiled.note
    assert (profiled.model, profiled.digest) == (fitted.model, fitted.digest)
    assert profiled.seconds != fitted.seconds


def test_what_fits_alone_stays_whole(command: Command) -> None:
    Path("small.toml").write_text(SHALLOW)
    assert "One rank alone" in _plan(command, "--ranks", 1)[1]
    device = load_hardware("v100")
    slow = {"alpha": 1.0, "beta": 0.0}
    save_hardware(device, Path("slow.json"))
    data = json.loads(Path("slow.json").read_text()) | {"inside": slow, "between": slow}
    Path("slow.json").write_text(json.dumps(data))
    assert "More ranks would only" in _plan(command, "--hardware", "slow.json")[1]


def test_batch_norm_keeps_its_microbatch(command: Command) -> None:
    Path("small.toml").write_text(SHALLOW)
    assert _plan(command, "--batch", 8)[0].microbatch == 1
    Path("small.toml").write_text(SHALLOW + "[train]\nmicrobatch = 2\n")
    assert _plan(command, "--batch", 8)[0].microbatch == 2
    Path("small.toml").write_text(GROUP_NORM)
    assert _plan(command, "--batch", 8, "--ranks", 1)[0].microbatch > 1


@pytest.mark.usefixtures("own")
def test_a_network_of_ones_own(command: Command) -> None:
    Path("small.toml").write_text(SMALL.replace("width = 4\ndepth = 2", 'name = "own_net:make"'))
    assert _plan(command)[0].model == "Sequential"


@pytest.mark.parametrize(
    ("name", "forward", "option", "told"),
    [
        (
            "of_one_size",
            "x + torch.ones(1, 1, 64, 64)",
            "shards = 2",
            "Strips of of_one_size:make cannot be priced: Odd fails its own forward",
        ),
        (
            "of_one_layer",
            "x if x.mean() > 0 else 2 * x",
            'order = "1f1b"',
            "The order 1f1b needs several stages, and Odd is one layer, which cannot be cut.",
        ),
    ],
)
def test_a_network_that_cannot_be_shared_as_asked_is_told(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    forward: str,
    option: str,
    told: str,
) -> None:
    Path(f"{name}.py").write_text(ODD.replace("FORWARD", forward))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    text = SMALL.replace("width = 4\ndepth = 2", f'name = "{name}:make"')
    Path("small.toml").write_text(text + option)
    code, said = command("plan", "--config", "small.toml")
    assert (code, told in " ".join(said.split())) == (2, True), said


@pytest.fixture
def own(small: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Networks of one's own: `own_net:make`, of two layers, and `own_net:Chain`, of five."""
    (small / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(small))
    yield
    sys.modules.pop("own_net", None)


def test_what_would_fit_does(command: Command) -> None:
    kept = '[parallel]\noffload = "none"\nrecompute = false\nshards = 1'
    bare = SMALL.replace("[parallel]", kept)
    Path("bare.toml").write_text(bare + '[train]\namp = "none"\nbatch = 4\n')
    refused = ("plan", "--config", "bare.toml", "--ranks", 2, "--memory")
    enough_for_little = f"{64 * 1024 + 600}KiB"  # cuDNN takes the first 64 MiB
    code, said = command(*refused, enough_for_little)
    assert code == 2
    offers = re.search(r"What would fit: (\d+) ranks of .*; or 2 ranks of (.*?); or", said)
    assert offers is not None, said
    assert command(*refused[:-2], offers[1], "--memory", enough_for_little)[0] == 0
    assert command(*refused, offers[2])[0] == 0
    tile = re.search(r"tiles of (\d+) px", said)
    assert tile is not None
    assert command(*refused, enough_for_little, "--tile", tile[1])[0] == 0
    # Orders made to measure, which the offers leave out, may fit somewhat more.
    assert command(*refused, enough_for_little, "--tile", 2 * int(tile[1]))[0] == 2


@pytest.mark.usefixtures("own")
def test_where_nothing_fits_a_tile_that_does_in_strips_is_told(command: Command) -> None:
    bare = (
        SMALL.replace("v100", "cpu")
        .replace("tile = 64", "tile = 384")
        .replace("ranks = 4", "ranks = 2")
        .replace("width = 4\ndepth = 2", CHAIN)
    )
    kept = bare.replace("[parallel]", '[parallel]\noffload = "none"\nrecompute = false')
    Path("small.toml").write_text(kept + "[train]\nbatch = 1\n")
    code, said = command("plan", "--config", "small.toml", "--memory", "6MiB")
    assert code == 2, said
    offered = re.search(r"tiles of (\d+) px, each in 2 strips of rows", " ".join(said.split()))
    assert offered is not None, said
    assert _plan(command, "--memory", "6MiB", "--tile", offered[1])[0].shards == 2


@given(st.data())
def test_the_largest_side_that_fits_is_found_within_two_per_cent(data: st.DataObject) -> None:
    multiple = data.draw(st.sampled_from([1, 4, 32]), "multiple")
    tile = multiple * data.draw(st.integers(1, 300), "of the tile")
    limit = data.draw(st.integers(0, tile - 1), "limit")
    halo = data.draw(st.just(0) | st.integers(0, tile), "halo")
    sides, tried = range(2 * multiple, tile, multiple), []

    def fit(side: int) -> bool:
        tried.append(side)
        if side < halo:
            raise PathosegError("The strips are lower than a halo.", "Take larger tiles.")
        return side <= limit

    found = largest_side(sides, fit, data.draw(st.floats(0.5, 2 * tile), "guess"))
    assert len(tried) == len({*tried}), "no network is read twice"
    fitting = [side for side in sides if halo <= side <= limit]
    if found is None:
        assert not fitting or fitting[0] * 1.02 > fitting[-1]
    else:
        assert found in fitting
        assert fitting[-1] < found * 1.02


def test_a_good_guess_saves_reading() -> None:
    tried = []

    def fit(side: int) -> bool:
        tried.append(side)
        return side <= 1112

    assert largest_side(range(8, 4096, 4), fit, 1063) == 1112
    assert len(tried) <= 5


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tile", "66"], "Tiles of 66 px do not fit"),
        (["--cut", "nowhere"], "no layer or module 'nowhere'"),
        (["--cut", "decoder.0,decoder.0"], "leave a stage without layers"),
        (["--memory", "10KiB", "--config", "whole.toml"], "cannot be cut further, needs"),
        (["--memory", "lots"], "--memory lots does not fit (no size of a memory"),
        (["--memory", "16"], "no size of a memory; write for example 16GiB"),
        (["--ranks", "1", "--cut", "decoder.0"], "no way to run 2 stages on one rank"),
        (["--ranks", "1", "--cut", "nowhere"], "no layer or module 'nowhere'"),
        (
            ["--ranks", "4", "--batch", "2", "--order", "gems-master"],
            "batch of 2, in 2 microbatches",
        ),
        (["--order", "GPipe"], "Did you mean gpipe?"),
        (["--order", "gems"], "no order 'gems'"),
        (["--ranks", "0"], "--ranks 0 does not fit"),
        (["--batch", "0"], "--batch 0 does not fit"),
        (["--batch", "3", "--config", "pair.toml"], "no multiple of a microbatch of 2"),
        (["--model", "unnet"], "no model 'unnet'"),
        (["--model", "nowhere:make"], "nowhere:make"),
        (["--hardware", "v200"], "no hardware 'v200'"),
        (["--hardware", "old.json"], "old.json is a hardware file of format 0"),
        (["--hardware", "."], "no hardware '.'"),
        (["--config", "stages.toml"], "cannot be cut into 500 stages"),
        (
            ["--order", "sequential", "--memory", "600KiB", "--config", "whole.toml"],
            "No plan of UNet fits",
        ),
    ],
)
def test_bad_input_is_one_clear_error(options: list[str], problem: str, command: Command) -> None:
    Path("old.json").write_text('{"format": 0}')
    Path("pair.toml").write_text(SMALL + "[train]\nmicrobatch = 2\n")
    Path("stages.toml").write_text(SMALL + "stages = 500\n")
    Path("whole.toml").write_text(SHALLOW + "shards = 1\n")
    before = set(Path().rglob("*"))
    small = () if "--config" in options else ("--config", "small.toml")
    code, said = command("plan", *small, *options)
    assert code == 2, said
    assert problem in said
    assert len(re.findall("^Error: ", said, re.MULTILINE)) == 1
    assert "Traceback" not in said
    assert set(Path().rglob("*")) == before
