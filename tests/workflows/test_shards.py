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


def test_a_run_goes_on_with_strips_and_without(train: Callable[..., tuple[int, str]]) -> None:
    """One epoch on two ranks, the second in one process: a checkpoint knows no ranks."""
    test_ranks._configure(1, STRIPS)
    code, output = train("--out", "moved", "--ranks", 2)
    assert code == 0, output
    test_ranks._configure(2)
    code, output = train("--out", "moved", "--resume", "--epochs", 2, "--ranks", 1)
    assert code == 0, output
    first, second = test_ranks._rows("moved")
    assert second["step"] == 2 * first["step"]
    last = torch.load(Path("moved") / "checkpoints" / "last.pt", weights_only=True)
    parameters = {name for name in last["model"] if name.endswith(("weight", "bias"))}
    assert last["optimizer"].keys() == parameters, "SGD's momentum went along"


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
