"""Training with each tile in strips, from the command line: the run that one process makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pathoseg.parallel.planning.plan import Plan
from tests.workflows import test_ranks
from tests.workflows.test_ranks import SAMPLES, Start

judged, train, one_thread = test_ranks.judged, test_ranks.train, test_ranks._one_thread
STRIPS = "[parallel]\nshards = 2\n"


def test_two_ranks_with_half_of_each_tile_train_as_one_process(
    judged: Callable[[str, int], Path], tmp_path: Path, start: Start
) -> None:
    """Three steps of SGD, then a validation, whose figures are those of whole tiles.

    In float32 sums of another order turn over a ReLU or a pooling here and there: one process in
    single and in double precision differ by 1 % in a norm's bias after three such steps. So the
    weights are compared as a whole; tests/parallel/shards judges each tensor in double, to 1e-13.
    """
    judge = judged("dropping", 1)
    more = f'{STRIPS}transport = "mpi"\n'
    test_ranks._sample_config(tmp_path / "ranks.toml", "dropping", 1, more)
    command = ["train", "--slides", str(SAMPLES), "--config", "ranks.toml", "--out", "ranks"]
    process = start(*command, "--ranks", "2")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    plan = Plan.from_json((tmp_path / "ranks" / "plan.json").read_text())
    assert (plan.ranks, plan.shards, plan.stages, plan.microbatch) == (2, 2, 1, 2)
    assert "2 strips of rows of each tile" in output
    assert "looks at whole tiles" not in output
    ours, theirs = (
        load_file(run / "model" / "weights.safetensors") for run in (tmp_path / "ranks", judge)
    )
    differences = [(ours[name] - tensor).double().norm() for name, tensor in theirs.items()]
    sizes = [tensor.double().norm() for tensor in theirs.values()]
    assert torch.stack(differences).norm() <= 5e-5 * torch.stack(sizes).norm()
    [row], [whole] = test_ranks._rows(tmp_path / "ranks"), test_ranks._rows(judge)
    for figure in ("train_loss", "val_loss"):
        assert row[figure] == pytest.approx(whole[figure], rel=1e-3)
    # A checkpoint knows no ranks: the second epoch is one process's.
    (tmp_path / "alone.toml").write_text("[train]\nepochs = 2\n")
    process = start("train", "--resume", "--out", "ranks", "--config", "alone.toml")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    first, second = test_ranks._rows(tmp_path / "ranks")
    assert (first, second["step"]) == (row, 2 * row["step"])
    last = torch.load(tmp_path / "ranks" / "checkpoints" / "last.pt", weights_only=True)
    parameters = {name for name in last["model"] if name.endswith(("weight", "bias"))}
    assert last["optimizer"].keys() == parameters, "SGD's momentum went along"


def test_plans_say_what_strips_take(
    toy_slides: Path, command: Callable[..., tuple[int, str]]
) -> None:
    sizes = (
        "[tiles]\ntile = 512\n[model]\nwidth = 8\ndepth = 1\n[train]\nbatch = 1\nmicrobatch = 1\n"
    )
    Path("whole.toml").write_text(sizes)
    Path("strips.toml").write_text(sizes + STRIPS)
    plans = {}
    for name, ranks in (("whole", 1), ("strips", 2)):
        common = ("--hardware", "cpu", "--memory", "1GiB", "--out", name)
        code, said = command("plan", "--config", f"{name}.toml", "--ranks", ranks, *common)
        assert code == 0, said
        assert ("cut into 2 strips of rows" in said) == (name == "strips")
        plans[name] = Plan.from_json((Path(name) / "plan.json").read_text())
    assert (plans["strips"].ranks, plans["strips"].input) == (2, plans["whole"].input)
    share = plans["strips"].memory[0] / plans["whole"].memory[0]
    assert 0.5 < share < 0.6, "activations are cut, parameters are not"
    refused = ("--memory", "10MB", "--order", "sequential", "--hardware", "cpu", "--ranks", 2)
    code, said = command("plan", "--config", "strips.toml", *refused)
    assert code == 2
    assert "A rank here stands for 2 ranks that share each tile." in said


@pytest.mark.parametrize(
    ("ranks", "said", "hint"),
    [(1, "there is one rank", "Start 2 ranks"), (3, "there are 3", "a multiple")],
)
def test_strips_that_cannot_be_are_refused(
    train: Callable[..., tuple[int, str]], ranks: int, said: str, hint: str
) -> None:
    test_ranks._configure(1, STRIPS)
    code, output = train("--out", "never", "--ranks", ranks)
    assert code == 2, output
    assert output.count("Error:") == 1, output
    assert said in output
    assert hint in output
    assert not Path("never").exists()
