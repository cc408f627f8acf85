"""Training on several ranks: the run that one process makes, through every stop and death."""

from __future__ import annotations

import csv
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pathoseg.parallel.graph.activation_policy import ActivationPolicy
from pathoseg.parallel.planning.plan import Plan
from tests.conftest import draw_toy_slides
from tests.forked import Forked

Start = Callable[..., Forked]

SAMPLES = Path(__file__).resolve().parents[2] / "sample_data"

# SGD, few steps: what is reordered stays small (DESIGN.md, Judge). Clipping is as by default.
STEADY = """
optimizer = "sgd"
lr = 0.01
batch = 4
microbatch = 1
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


def _begin(start: Start, *arguments: object) -> Forked:
    common = ["train", "--slides", "slides", "--config", "steady.toml"]
    return start(*common, *map(str, arguments))


def _rows(run: Path | str) -> list[dict[str, float]]:
    with (Path(run) / "metrics.csv").open() as file:
        return [
            {k: float(v) for k, v in row.items() if k != "tiles_per_s" and v}
            for row in csv.DictReader(file)
        ]


def _assert_same(run: Path | str, judge: Path | str, share: float = 0.0) -> None:
    """Weights and figures differ by no more than this share, tensor by tensor."""
    ours, theirs = (load_file(Path(r) / "model" / "weights.safetensors") for r in (run, judge))
    for name, tensor in theirs.items():
        difference = torch.linalg.vector_norm((ours[name] - tensor).double())
        size = torch.linalg.vector_norm(tensor.double())
        assert difference <= share * size, f"{name}: {difference / size}"
    _assert_close_rows(run, judge, share * 10)


def _assert_close_rows(run: Path | str, judge: Path | str, share: float) -> None:
    for row, judged in zip(_rows(run), _rows(judge), strict=True):
        assert row == pytest.approx(judged, rel=share, abs=0.0)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Trains a network on the sample slides in one process; gives the run of so many epochs."""

    @cache
    def run(network: str, epochs: int) -> Path:
        place = tmp_path_factory.mktemp("samples")
        _sample_config(place / "judge.toml", network, epochs)
        return _alone(place, str(SAMPLES), "judge.toml")

    return run


def _alone(place: Path, slides: str, config: str) -> Path:
    """Trains in one process, with one thread as ranks that share a host have; gives the run."""
    command = ["train", "--slides", slides, "--config", config, "--out", "judge"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with Forked(command, place) as process:
            said, _ = process.communicate()
    assert process.returncode == 0, said
    return place / "judge"


NETWORKS = {"unet": "width = 8\ndepth = 3", "dropping": 'name = "dropping:Net"'}
DROPPING = """
import torch
from pathoseg.models.unet import UNet

class Net(torch.nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.drop, self.body = torch.nn.Dropout2d(0.2), UNet(classes, width=8, depth=3)

    def forward(self, images):
        logits = self.body(self.drop(images))
        return torch.nn.functional.dropout(logits, 0.1, self.training)
"""


def _sample_config(path: Path, network: str, epochs: int, more: str = "") -> None:
    """Write the configuration of `make demo`, cut down to epochs of three steps of SGD.

    Args:
        path: Where to; `dropping.py`, a network with dropout, is written beside it.
        network: One of `NETWORKS`.
        epochs: Number of epochs.
        more: TOML to be appended.
    """
    path.with_name("dropping.py").write_text(DROPPING)
    text = (SAMPLES / "demo.toml").read_text()
    for old, new in (
        ("width = 16", NETWORKS[network]),
        ("batch = 8", f"batch = 4\nmicrobatch = 2\nsamples_per_epoch = 12\nepochs = {epochs}"),
        ("lr = 4e-3", 'optimizer = "sgd"\nlr = 0.02'),
        ("validate_every = 2", "validate_every = 1"),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text + more)


@pytest.mark.parametrize(
    ("network", "order", "transport", "epochs", "share"),
    [
        ("unet", "gpipe", "mpi", 2, 0.0),
        ("dropping", "1f1b", "gloo", 2, 0.0),
        ("unet", "gems-mast", "mpi", 1, 1e-6),
        pytest.param("unet", "data-parallel", "gloo", 1, 1e-6, marks=pytest.mark.slow),
        pytest.param("unet", "data-parallel", "gloo", 2, None, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_digits_of_one_process(
    judged: Callable[[str, int], Path],
    tmp_path: Path,
    start: Start,
    network: str,
    order: str,
    transport: str,
    epochs: int,
    share: float | None,
) -> None:
    """On the sample slides: all of them in one order of sums, tensors to rounding after three
    steps in another, and figures to 1e-3 after two epochs."""
    judge = judged(network, epochs)
    _sample_config(
        tmp_path / "ranks.toml", network, epochs, f'[parallel]\ntransport = "{transport}"\n'
    )
    command = ["train", "--slides", str(SAMPLES), "--config", "ranks.toml", "--out", "ranks"]
    trace = ["--trace"] * (epochs > 1)  # of the fourth step
    process = start(*command, "--ranks", "2", "--order", order, *trace)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    run = tmp_path / "ranks"
    plan = Plan.from_json((run / "plan.json").read_text())
    assert (plan.ranks, plan.order, plan.microbatch) == (2, order, 2)
    if share is None:
        _assert_close_rows(run, judge, 1e-3)
    else:
        _assert_same(run, judge, share)
    if trace:
        drawn = (run / "trace.json").read_text().replace('"', " ").split()
        assert {"planned", "measured"} <= set(drawn)
    assert output.count("epoch 1 ") == 1, "only rank 0 speaks"


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
    _assert_same("roomy", "judge")
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
        _assert_same(run, "judge")


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
    _assert_same("planned", "chosen")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve epochs on the toy slides in one process, undisturbed."""
    place = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        draw_toy_slides(place)
        _configure(12)
    return _alone(place, "slides", "steady.toml")


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_other_ranks(
    train: Callable[..., tuple[int, str]], start: Start, calm: Path
) -> None:
    _configure(12)
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
    _assert_same("moved", calm)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_killed_rank_ends_all_and_loses_nothing(
    train: Callable[..., tuple[int, str]], start: Start, calm: Path, transport: str
) -> None:
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
    _assert_same("killed", calm)


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
def _until_metrics(run: str, process: Forked) -> Iterator[None]:
    """Enters once the run has finished an epoch."""
    while not (Path(run) / "metrics.csv").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    yield


def _rank_1(process: Forked) -> psutil.Process:
    """The Python process of rank 1, wherever the launcher put it."""
    for child in psutil.Process(process.pid).children(recursive=True):
        environment = child.environ()
        rank = environment.get("OMPI_COMM_WORLD_RANK", environment.get("RANK"))
        if rank == "1" and Path(child.exe()).name.startswith("python"):
            return child
    raise AssertionError("rank 1 is not running")
