"""A folder of toy slides, and what an undisturbed process makes of them."""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY, draw_disc

BIN = Path(sys.executable).parent
PATHOSEG = str(BIN / "pathoseg")

# SGD, no clipping: sums keep their order, so that ranks train what one process trains, to the bit.
_STEADY = """epochs = 6
optimizer = "sgd"
lr = 0.01
batch = 4
microbatch = 1
clip = 0.0
samples_per_epoch = 8
"""


class Lab:
    """Slides, a configuration and runs in one folder, as on a cluster's file server.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = ExitStack()
        (folder / "slides").mkdir()
        for seed in range(4):
            draw_disc(folder / f"slides/slide{seed}.png", seed)
        (folder / "new").mkdir()
        for seed, side in ((5, 768), (6, 768), (7, 96), (8, 96)):
            draw_disc(folder / f"new/slide{seed}.png", seed, side)
            (folder / f"new/slide{seed}_mask.png").unlink()
        text = TINY.replace("epochs = 4\nbatch = 2\nlr = 1e-2\n", _STEADY)
        # At random places the rounding of sums in another order grows to 2 % of a weight within
        # these epochs, through batch norm over few pixels; on the grid it stays at 1e-6.
        text = text.replace("tile = 32\n", 'tile = 32\noffsets = "grid"\n')
        (folder / "lab.toml").write_text(text)
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    @cached_property
    def undisturbed(self) -> Path:
        """A run of one process."""
        self.run(*self.training("undisturbed"))
        return self.folder / "undisturbed"

    @cached_property
    def segmented(self) -> dict[str, str]:
        """The results of one process for the new slides: SHA-256 by relative path, as in `results`.

        The first access segments the slides, with the undisturbed run's model.
        """
        self.run(PATHOSEG, "infer", *self.inference("alone"))
        return self.results("alone")

    def inference(self, out: str) -> list[str]:
        """The arguments of `infer`, for the new slides and the undisturbed run's model."""
        return ["new", "--model", self.undisturbed.name, "--assume-mpp", "0.5", "--out", out]

    def results(self, out: str) -> dict[str, str]:
        """The digest of each file but those that say how long it took and who did it."""
        folder, own = self.folder / out, ("summary.json", "report.html")
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in own and path.parent.name != "states"
        }

    @staticmethod
    def training(run: str, *more: str) -> list[str]:
        common = ["--slides", "slides", "--config", "lab.toml", "--out", run]
        return [PATHOSEG, "train", *common, *more]

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.enter_context(process)
        self._started.callback(process.kill)
        return process

    def run(self, *command: str, **variables: str) -> str:
        """The output of a command that must succeed."""
        process = self.start(list(command), **variables)
        output = process.communicate(timeout=200)[0]
        assert process.returncode == 0, output
        return output

    def wait_for_epochs(self, run: str, epochs: int) -> None:
        """Returns once a run has finished so many epochs."""
        self.wait_for(lambda: self.epochs(run) >= epochs)

    def wait_for(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not met():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.05)

    def _logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()}" for log in self.folder.glob("*.log"))

    def epochs(self, run: str) -> int:
        """Return the number of epochs that a run has finished, 0 where it has no figures yet."""
        return len(metrics(self.folder / run))


def assert_same_run(ours: Path, theirs: Path, share: float = 0.0) -> None:
    """Weights and figures of two runs differ by no more than this share, tensor by tensor."""
    weights, judge = (load_file(run / "model/weights.safetensors") for run in (ours, theirs))
    assert weights.keys() == judge.keys()
    for name, tensor in judge.items():
        difference = torch.linalg.vector_norm((weights[name] - tensor).double())
        size = torch.linalg.vector_norm(tensor.double())
        assert difference <= share * size, f"{name}: {difference / size}"
    for row, judged in zip(metrics(ours), metrics(theirs), strict=True):
        assert row == pytest.approx(judged, rel=max(share, 1e-12) * 10)


def metrics(run: Path) -> list[dict[str, float]]:
    """The rows of `metrics.csv`, but for the speed."""
    path = run / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if k != "tiles_per_s" and v} for row in rows]
