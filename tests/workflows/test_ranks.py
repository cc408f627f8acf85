"""Training on several ranks: the run that one process makes, through every stop and death."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from pathoseg.models.bundle import load_bundle
from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.planning.plan import Plan

Start = Callable[..., "subprocess.Popen[str]"]

# SGD, no clipping, few steps: what is reordered stays small (DESIGN.md, Judge).
STEADY = """
optimizer = "sgd"
lr = 0.01
batch = 4
microbatch = 1
clip = 0.0
samples_per_epoch = 8
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def train(toy_slides: Path, start: Start) -> Callable[..., tuple[int, str]]:
    """Runs `pathoseg train` on the toy slides; gives its exit code and all that it printed."""
    _configure(epochs=2)

    def run(*arguments: object) -> tuple[int, str]:
        process = _begin(start, *arguments)
        output, _ = process.communicate()
        return process.returncode, output

    return run


def _configure(epochs: int, more: str = "") -> None:
    text = Path("tiny.toml").read_text()
    text = text.replace("epochs = 4\nbatch = 2\nlr = 1e-2\n", f"epochs = {epochs}{STEADY}")
    Path("steady.toml").write_text(text + more)


def _begin(start: Start, *arguments: object) -> subprocess.Popen[str]:
    common = ["train", "--slides", "slides", "--config", "steady.toml"]
    return start(*common, *map(str, arguments))


def _rows(run: str) -> list[dict[str, float]]:
    with (Path(run) / "metrics.csv").open() as file:
        return [
            {k: float(v) for k, v in row.items() if k != "tiles_per_s" and v}
            for row in csv.DictReader(file)
        ]


def _assert_same(run: str, judge: str, share: float) -> None:
    """Weights and figures differ by no more than this share, tensor by tensor."""
    ours, theirs = (load_bundle(Path(r) / "model")[0].state_dict() for r in (run, judge))
    for name, tensor in theirs.items():
        difference = torch.linalg.vector_norm((ours[name] - tensor).double())
        size = torch.linalg.vector_norm(tensor.double())
        assert difference <= share * size, f"{name}: {difference / size}"
    for row, judged in zip(_rows(run), _rows(judge), strict=True):
        assert row == pytest.approx(judged, rel=max(share, 1e-12) * 10)


@pytest.mark.parametrize(
    ("ranks", "order", "transport", "share"),
    [(2, "gpipe", "mpi", 0.0), (3, "1f1b", "gloo", 0.0), (2, "gems-mast", "mpi", 1e-5)],
)
def test_ranks_train_what_one_process_trains(
    train: Callable[..., tuple[int, str]], ranks: int, order: str, transport: str, share: float
) -> None:
    assert train("--out", "judge")[0] == 0
    _configure(2, f'[parallel]\ntransport = "{transport}"\n')
    code, output = train("--out", "ranks", "--ranks", ranks, "--order", order, "--trace")
    assert code == 0, output
    plan = Plan.from_json(Path("ranks/plan.json").read_text())
    assert (plan.ranks, plan.order, plan.microbatch) == (ranks, order, 1)
    _assert_same("ranks", "judge", share)
    trace = json.loads(Path("ranks/trace.json").read_text())
    assert {"planned", "measured"} <= set(json.dumps(trace).replace('"', " ").split())
    assert output.count("epoch 2 ") == 1, "only rank 0 speaks"


@pytest.mark.slow
def test_what_does_not_fit_one_rank_is_trained_all_the_same(
    train: Callable[..., tuple[int, str]],
) -> None:
    # Below 64 KiB nothing is offloaded.
    larger = Path("tiny.toml").read_text().replace("tile = 32", "tile = 64")
    Path("tiny.toml").write_text(larger.replace("width = 4", "width = 16"))
    _configure(2)
    assert train("--out", "judge")[0] == 0
    parked = 'parked = ["parameters", "gradients", "optimizer"]'
    _configure(2, f'[parallel]\nmemory = "1GiB"\n{parked}\n')
    assert train("--out", "roomy", "--trace")[0] == 0
    trace = Path("roomy/trace.json").read_text()
    assert all(each in trace for each in ("[parameters]", "[gradients]", "[optimizer]"))
    whole = Plan.from_json(Path("roomy/plan.json").read_text())
    assert (whole.ranks, whole.retention, whole.host_memory) == (1, (ActivationPolicy(),), (0,))
    _assert_same("roomy", "judge", 0.0)
    for run, ways in (("recomputed", 'offload = "none"'), ("offloaded", "recompute = false")):
        cap = f"{0.85 * whole.memory[0] / 1000:.0f}KB"
        _configure(2, f'[parallel]\nmemory = "{cap}"\n{ways}\n')
        code, output = train("--out", run)
        assert code == 0, output
        plan = Plan.from_json((Path(run) / "plan.json").read_text())
        assert plan.memory[0] < 0.851 * whole.memory[0]
        assert bool(plan.retention[0].recomputed) == (run == "recomputed")
        assert (
            bool(plan.retention[0].offloaded) == (run == "offloaded") == (plan.host_memory[0] > 0)
        )
        _assert_same(run, "judge", 0.0)


def test_a_plan_that_changes_what_batch_norm_sees_says_so(
    train: Callable[..., tuple[int, str]],
) -> None:
    _configure(1, '[parallel]\nmemory = "8GiB"\n')
    text = Path("steady.toml").read_text()
    assert "Microbatches of" not in train("--out", "chosen")[1]
    Path("steady.toml").write_text(text.replace("microbatch = 1\n", ""))
    code, output = train("--out", "planned")
    assert code == 0, output
    assert "Microbatches of 1: batch norm, if there is one, sees" in output
    _assert_same("planned", "chosen", 0.0)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_other_ranks(
    train: Callable[..., tuple[int, str]], start: Start
) -> None:
    _configure(12)
    assert train("--out", "judge")[0] == 0
    process = _begin(start, "--out", "moved", "--ranks", 2, "--order", "1f1b")
    with _until_metrics("moved", process):
        process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == 143, output
    assert "--resume --out moved" in output
    # An order of one copy of each stage: sums keep their order, so nothing grows over the epochs.
    goes_on = ("--resume", "--ranks", 3, "--order", "1f1b", "--epochs", 12)
    code, output = train("--out", "moved", *goes_on)
    assert code == 0, output
    _assert_same("moved", "judge", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_killed_rank_ends_all_and_loses_nothing(
    train: Callable[..., tuple[int, str]], start: Start, transport: str
) -> None:
    _configure(12)
    assert train("--out", "judge")[0] == 0
    _configure(12, f'[parallel]\ntransport = "{transport}"\nranks = 2\norder = "gpipe"\n')
    process = _begin(start, "--out", "killed")
    with _until_metrics("killed", process):
        _rank_1(process).kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode not in (0, None), output
    assert "Traceback" not in output
    assert "ank 1" in output, "the lost rank is named"
    code, output = train("--out", "killed", "--resume")
    assert code == 0, output
    _assert_same("killed", "judge", 0.0)


def test_where_nothing_fits_one_error_says_what_would(
    train: Callable[..., tuple[int, str]],
) -> None:
    _configure(2, '[parallel]\nmemory = "100KB"\n')
    code, output = train("--out", "never", "--ranks", 2)
    assert code == 2
    assert output.count("Error:") == 1, output
    assert "What would fit" in output
    assert not Path("never").exists()


def test_more_ranks_than_a_batch_can_feed_are_refused(
    train: Callable[..., tuple[int, str]],
) -> None:
    code, output = train("--out", "never", "--ranks", 3, "--order", "data-parallel")
    assert code == 2
    assert "gives all 3 ranks work" in output
    assert "Start 2 ranks" in output


def test_a_trace_needs_ranks(train: Callable[..., tuple[int, str]]) -> None:
    code, output = train("--trace")
    assert code == 2
    assert "--ranks" in output


@contextmanager
def _until_metrics(run: str, process: subprocess.Popen[str]) -> Iterator[None]:
    """Enters once the run has finished an epoch."""
    while not (Path(run) / "metrics.csv").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    yield


def _rank_1(process: subprocess.Popen[str]) -> psutil.Process:
    """The Python process of rank 1, wherever the launcher put it."""
    for child in psutil.Process(process.pid).children(recursive=True):
        environment = child.environ()
        rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("RANK"))
        if rank == "1" and Path(child.exe()).name.startswith("python"):
            return child
    raise AssertionError("rank 1 is not running")
