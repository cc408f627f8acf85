"""Tries what torch.distributed.pipelining can do with a U-Net, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from pathoseg.models.unet import UNet

PATIENCE = 30.0  # seconds until a trial counts as hung; those that end take 5
FAREWELL = 2.0  # seconds that ranks have to end after another
COUNT, SIDE = 8, 32
CPU = torch.device("cpu")
MISTAKE = "a mistake of this file, not an answer of torch:"
DISTRIBUTED = Path(dist.__file__).parent
# Where stages begin. A pooling is the first layer of its block: SHARED cuts before it, so that
# another stage reads what the pooling reads; the others cut behind.
TWO = ("decoder.0",)
FOUR = ("encoder.1.conv1", "encoder.2.conv1", "decoder.1")
SHARED = ("encoder.1", "encoder.2", "decoder.1")


class Trial(NamedTuple):
    """A trial of torch's pipelining, run by ranks that are processes.

    Attributes:
        what: Its description, for the table.
        ranks: The number of ranks.
        run: The work of a rank, given its number; it returns the answer in words. The answer that
            the first rank writes is told.
    """

    what: str
    ranks: int
    run: Callable[[int], str]


def step(
    schedule: str, cuts: Sequence[str], ranks: int, samples: int = COUNT
) -> Callable[[int], str]:
    """One step of a U-Net, against the gradients of one process."""

    def run(rank: int) -> str:
        model, images, targets = _example(samples)
        parts = pipeline(model, (images[: samples // COUNT],), split_spec=_split(cuts))
        stages = parts.num_stages
        kind = get_schedule_class(schedule)
        if issubclass(kind, PipelineScheduleSingle):
            numbers = [rank]
        elif schedule in ("ZBVZeroBubble", "DualPipeV"):
            numbers = [rank, stages - 1 - rank]
        else:
            numbers = [*range(rank, stages, ranks)]
        held = [parts.build_stage(number, CPU) for number in numbers]
        given = held[0] if issubclass(kind, PipelineScheduleSingle) else held
        made = kind(given, COUNT, F.cross_entropy)
        inputs = [images] if 0 in numbers else []
        wanted = {"target": targets} if stages - 1 in numbers else {}
        made.step(*inputs, **wanted)
        return _compared([stage.submod for stage in held], images, targets)

    return run


def evaluate(rank: int) -> str:
    """Compare the answers of traced stages in `eval` mode with those of the model in it.

    Returns:
        The largest absolute difference of the logits, in words.
    """
    (model, images, _), (whole, _, _) = _example(COUNT), _example(COUNT)
    parts = pipeline(model, (images,), split_spec=_split(TWO))
    parts.split_gm.eval()
    with torch.no_grad():
        [found], expected = parts(images), whole.eval()(images)
    return f"answers differ by {(found - expected).abs().max():.2g} from the model's"


TRIALS = {
    "gpipe-2": Trial("GPipe, 2 stages", 2, step("GPipe", TWO, 2)),
    "gpipe-4": Trial("GPipe, 4 stages, a skip past two of them", 4, step("GPipe", FOUR, 4)),
    "shared": Trial("GPipe, 4 stages, two of which read one tensor", 4, step("GPipe", SHARED, 4)),
    "uneven": Trial("GPipe, 15 samples in 8 microbatches", 2, step("GPipe", TWO, 2, 2 * COUNT - 1)),
    "two": Trial("GPipe, 2 samples a microbatch", 2, step("GPipe", TWO, 2, 2 * COUNT)),
    "1f1b-2": Trial("1F1B, 2 stages", 2, step("1F1B", TWO, 2)),
    "1f1b-4": Trial("1F1B, 4 stages, a skip past two of them", 4, step("1F1B", FOUR, 4)),
    "looped": Trial("LoopedBFS, 2 ranks of 2 stages", 2, step("LoopedBFS", FOUR, 2)),
    "interleaved": Trial("Interleaved1F1B, 2 ranks of 2", 2, step("Interleaved1F1B", FOUR, 2)),
    "zero": Trial("InterleavedZeroBubble, 2 of 2", 2, step("InterleavedZeroBubble", FOUR, 2)),
    "zbv": Trial("ZBVZeroBubble, 2 ranks of 2", 2, step("ZBVZeroBubble", FOUR, 2)),
    "dualpipe": Trial("DualPipeV, 2 ranks of 2", 2, step("DualPipeV", FOUR, 2)),
    "eval": Trial("`.eval()` of a traced model with batch norm", 1, evaluate),
}


def main() -> None:
    if len(sys.argv) > 1:
        run_rank(TRIALS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
        return
    print(f"torch {torch.__version__}, torch.distributed.pipelining, gloo\n")
    print("| tried | what came of it |\n|---|---|")
    for name, trial in TRIALS.items():
        print(f"| {trial.what} | {attempt(name, trial)} |", flush=True)


def attempt(name: str, trial: Trial) -> str:
    """Runs a trial in processes of its own; what came of it, in words."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, name, folder, str(rank)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(trial.ranks)
        ]
        until = time.monotonic() + PATIENCE
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.05)
            if any(rank.poll() for rank in ranks):  # the others may wait for it for ever
                until = min(until, time.monotonic() + FAREWELL)
        crashed = [rank.returncode for rank in ranks if (rank.returncode or 0) < 0]
        # The first error is the cause of the others.
        found = sorted(Path(folder).glob("*.text"), key=lambda path: path.stat().st_mtime_ns)
        texts = [path.read_text() for path in found]
        for rank in ranks:
            rank.kill()
            rank.wait()
    if crashed:
        return f"a rank crashes ({signal.Signals(-crashed[0]).name})"
    if texts and texts[0].startswith(MISTAKE):
        raise RuntimeError(f"{name}: {texts[0]}")
    return texts[0] if texts else f"hangs (ended after {PATIENCE:.0f} s)"


def run_rank(trial: Trial, folder: Path, rank: int) -> None:
    """One rank of a trial; leaves its answer, or its error, in the folder."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=trial.ranks)
    told = folder / f"{rank}.text"
    try:
        answer = trial.run(rank)
        dist.barrier()  # what one rank has done is no answer while another still waits
    except Exception as error:  # whatever torch refuses with is the answer
        files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
        if not any(file.is_relative_to(DISTRIBUTED) for file in files):
            told.write_text(f"{MISTAKE} {error!r}")
            raise
        first = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0])
        told.write_text(f"refused: {first.split(', but ')[0].split(' (')[0]}")
        raise
    told.write_text(answer)


def _example(samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = UNet(2, width=4, depth=2)
    return model, torch.randn(samples, 3, SIDE, SIDE), torch.randint(0, 2, (samples, SIDE, SIDE))


def _split(cuts: Sequence[str]) -> dict[str, SplitPoint]:
    return dict.fromkeys(cuts, SplitPoint.BEGINNING)


def _compared(parts: Sequence[nn.Module], images: Tensor, targets: Tensor) -> str:
    """Compare the gradients of this rank's stages with those of one process.

    Args:
        parts: The rank's stages, after a step.
        images: All samples of the step, shape (samples, 3, SIDE, SIDE).
        targets: Their classes, shape (samples, SIDE, SIDE).

    Returns:
        The largest relative difference of a parameter's gradient, by norm, in words, or which one
        has none.
    """
    whole, _, _ = _example(len(images))
    for own, wanted in zip(images.chunk(COUNT), targets.chunk(COUNT), strict=True):
        torch.autograd.backward(F.cross_entropy(whole(own), wanted) / COUNT)
    expected = dict(whole.named_parameters())
    worst = 0.0
    for part in parts:
        for name, parameter in part.named_parameters():
            found, true = parameter.grad, expected[name].grad
            assert true is not None
            if found is None:  # an answer, and none that torch refused with
                return f"leaves {name} without a gradient"
            worst = max(worst, float((found - true).norm() / true.norm()))
    return f"works, gradients within {worst:.0e}"


if __name__ == "__main__":
    main()
