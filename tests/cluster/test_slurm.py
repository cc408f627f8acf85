"""pipelines/slurm on a real Slurm of two nodes: what is stopped and put back loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.lab import Lab, assert_same_run
from tests.cluster.slurm import Slurm

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).resolve().parents[2] / "pipelines/slurm"
SMALL = ["--cpus-per-task=1"]


def test_training_that_is_stopped_and_put_back_ends_as_if_it_had_not_been(
    slurm: Slurm, lab: Lab
) -> None:
    train = [*SMALL, "--output=train.log", str(SCRIPTS / "train.sbatch")]
    options = [*lab.training("queued")[2:], "--order", "gems-mast"]
    job = slurm.submit(lab.folder, *train, *options)
    lab.wait_for_epochs("queued", 1)
    slurm.signal(job, "TERM")  # as ahead of the time limit: the job puts itself back
    slurm.wait_for_requeue(job)
    stopped = lab.epochs("queued")
    lab.wait_for_epochs("queued", stopped + 1)
    slurm.cancel(job)
    slurm.wait(job, "CANCELLED")
    assert lab.epochs("queued") < lab.epochs(lab.undisturbed.name)
    again = slurm.submit(lab.folder, *train, *options)
    slurm.wait(again, "COMPLETED", "FAILED")
    log = (lab.folder / "train.log").read_text()
    assert slurm.state(again) == "COMPLETED", log
    assert log.count("2 ranks: gems-mast") == 3
    assert log.count("Going on at epoch") == 2
    assert_same_run(lab.folder / "queued", lab.undisturbed, 1e-4)  # sums in another order


def test_an_array_whose_task_is_put_back_segments_what_one_process_does(
    slurm: Slurm, lab: Lab
) -> None:
    alone = lab.segmented
    infer = [*SMALL, "--array=1-2", "--output=infer-%a.log", str(SCRIPTS / "infer.sbatch")]
    job = slurm.submit(lab.folder, *infer, *lab.inference("shared"))
    lab.wait_for(lambda: len(list((lab.folder / "shared/states").glob("slide*.json"))) >= 2)
    slurm.requeue(f"{job}_1")
    slurm.wait_for_requeue(f"{job}_1")
    for task in (f"{job}_1", f"{job}_2"):
        slurm.wait(task, "COMPLETED", "FAILED")
        log = (lab.folder / f"infer-{task[-1]}.log").read_text()
        assert slurm.state(task) == "COMPLETED", log
    assert (lab.folder / "infer-1.log").read_text().count("Stopped.") == 1
    assert len(alone) == 4 * 3 + 2
    assert lab.results("shared") == alone
