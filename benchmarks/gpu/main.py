"""Runs on an accelerator all that no accelerator has run yet, the most telling first.

python benchmarks/gpu/main.py [--minutes 25] [--out benchmarks/results] [--quick] [--only NAME]…
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "sim"  # tests/simulated_device
_TOLD = 2000  # characters of a failed job's output that are kept
_END = 10  # seconds between SIGINT and SIGKILL


@dataclass(frozen=True)
class Place:
    """The folders for the files of jobs.

    Attributes:
        work: Of runs, results and logs.
        results: Of figures.
        label: The device and the date, in the names of figures.
    """

    work: Path
    results: Path
    label: str

    def figures(self, question: str) -> Path:
        """Return the JSON file of a benchmark's figures."""
        return self.results / f"{question}-{self.label}.json"


@dataclass(frozen=True)
class Job:
    """Something to run.

    Attributes:
        name: Of its log, and for `--only`.
        minutes: It is ended after so long.
        commands: One after the other, of the program's arguments; the first that fails ends it.
        device: The tests' device (`tests/parallel/computing_device.py`), where it runs tests.
        hardware: A file of `calibrate`, given to the commands if it is there when they begin.
    """

    name: str
    minutes: float
    commands: Sequence[Sequence[str]]
    device: str | None = None
    hardware: Path | None = None


def jobs(place: Place, device: str, quick: bool) -> list[Job]:
    """Return all jobs, the most telling first.

    Args:
        place: Where their files go.
        device: The kind of device, such as `cuda`.
        quick: Small networks and tiles: whether all of it runs, not how fast.
    """
    # pytest-benchmark, where a machine brings it along, warns of xdist; here warnings are errors.
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "-n0"]
    if device == SIMULATED:
        pytest += ["-p", "tests.simulated_device.clean_device"]
    small = ["--quick"] if quick else []
    hardware, run = place.figures("hardware"), str(place.work / "run")
    sample = "sample_data/sample_06.svs"
    runtime = [f"tests/parallel/{path}" for path in _RUNTIME]
    if quick:
        runtime += ["-k", "two_stages or (train_as_one and branches and hybrid-gems)"]

    def benchmark(
        name: str, minutes: float, *options: str, planned: bool = False, question: str | None = None
    ) -> Job:
        main = f"benchmarks/{question or name}/main.py"
        command = [main, *options, "--json", str(place.figures(name))]
        return Job(name, minutes, [command], hardware=hardware if planned else None)

    caps = ["--part", "caps", *(small or ["--side", "1024"])]
    study = ["--part", "study", *(small or ["--steps", "4"])]  # of 160, which take 15 minutes
    # One rank at a time has the 16 GiB: eight of them want more than a card has.
    wall = ["--measure", "--network", "unet64"]
    wall += ["--way", "sequential", "--way", "sequential_planned"]
    return [
        Job("cuda-tests", 4, [[*pytest, "-m", "cuda", "tests/parallel"]]),
        Job("runtime", 3, [[*pytest, "-m", "not process", *runtime]], device),
        Job("calibrate", 5, [["-m", "pathoseg", "calibrate", "--out", str(hardware), *small]]),
        Job(
            "commands",
            3,
            [
                [
                    *("-m", "pathoseg", "train", "--slides", "sample_data", "--overwrite"),
                    *("--config", "sample_data/demo.toml", "--out", run),
                    *("--time-limit", "5s" if quick else "60s"),
                ],
                [
                    *("-m", "pathoseg", "infer", sample, "--model", run, "--overwrite"),
                    *("--out", str(place.work / "results")),
                ],
                [
                    *("-m", "pathoseg", "evaluate", "--slides", "sample_data", "--model", run),
                    *("--split", "test"),
                ],
            ],
        ),
        benchmark("train-speed", 4, *(["--side", "32"] if quick else [])),
        benchmark("offload-caps", 4, *caps, planned=True, question="offload"),
        benchmark("memory-wall", 4, *wall, *small, planned=True),
        benchmark("infer-overhead", 3, *small),
        benchmark("offload-study", 4, *study, planned=True, question="offload"),
        benchmark("retention", 3, "--measure", *small),
        benchmark("peers", 3, *small),
    ]


_RUNTIME = (
    "runtime/test_serial_judge.py",
    "activations/test_retention.py",
    "activations/test_stage_offload.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25, help="for all of it (default: 25)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="small: whether all of it runs")
    parser.add_argument("--only", action="append", metavar="NAME", help="this job; repeatable")
    options = parser.parse_args()
    from pathoseg.device import device_name, pick_device

    device = pick_device()
    if device.type == "cpu":
        sys.exit("There is no accelerator here; each benchmark runs on a CPU by itself.")
    label = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    label = f"{label}-{date.today()}" + "-quick" * options.quick
    place = Place(options.out / "gpu-work", options.out, label)
    known = jobs(place, device.type, options.quick)
    names = [each.name for each in known]
    if unknown := set(options.only or ()) - {*names}:
        parser.error(f"There is no {', '.join(unknown)}; there are {', '.join(names)}.")
    wanted = [each for each in known if options.only is None or each.name in options.only]
    report = place.results / f"gpu-{place.label}.json"
    failed = run_all(wanted, place.work, report, options.minutes * 60, device_name(device))
    print(f"\nWhat ran: {report}; figures beside it, logs in {place.work}. Commit the JSON files.")
    sys.exit(1 if failed else 0)


def run_all(
    wanted: Sequence[Job],
    work: Path,
    report: Path,
    seconds: float,
    device: str,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run jobs until the time is over; one that failed stops no other.

    After each job the report is written. A job that it records as passed, of an earlier call that
    was cut off, is not run again.

    Args:
        wanted: The jobs.
        work: Folder of their logs.
        report: A JSON object: `device`, and for each job its state, seconds and, where it failed,
            the end of its output.
        seconds: For all jobs.
        device: Its name.
        clock: Seconds since any moment.

    Returns:
        Names of the jobs that failed, were cut off, or had no time left.
    """
    end = clock() + seconds
    work.mkdir(parents=True, exist_ok=True)
    told: dict[str, object] = json.loads(report.read_text()) if report.is_file() else {}
    told["device"] = device
    passed = [name for name, each in told.items() if isinstance(each, dict) and each["ok"]]
    failed = []
    for job in wanted:
        if job.name in passed:
            print(f"{job.name:16} passed before", flush=True)
            continue
        left, begun = min(job.minutes * 60, end - clock()), clock()
        state, said = ("no time left", "") if left <= 0 else _run(job, work, left)
        row = {"ok": state == "passed", "state": state, "seconds": clock() - begun}
        if state != "passed":
            failed.append(job.name)
            row["said"] = said[-_TOLD:]
        told[job.name] = row
        print(f"{job.name:16} {state}, {clock() - begun:.0f} s", flush=True)
        report.write_text(json.dumps(told, indent=2) + "\n")
    return failed


def _run(job: Job, work: Path, seconds: float) -> tuple[str, str]:
    """Run one job; return its state and what it said."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_MODULE_LOADING": "EAGER"}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if job.device is not None:
        environment["PATHOSEG_TEST_DEVICE"] = job.device
    measured = job.hardware is not None and job.hardware.is_file()  # else each takes its default
    prices = ["--hardware", str(job.hardware)] if measured else []
    end, log = time.monotonic() + seconds, work / f"{job.name}.log"
    with log.open("w") as output:
        for command in job.commands:
            running = subprocess.Popen(
                [sys.executable, *command, *prices],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with its ranks it is ended as one
            )
            try:
                code = running.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(running)
                return f"cut off after {seconds:.0f} s", log.read_text()
            if code:
                return f"failed ({code})", log.read_text()
    return "passed", ""


def _end(running: subprocess.Popen[bytes]) -> None:
    """Stop a job as Ctrl-C does: pytest then tells the failures that it has seen."""
    os.killpg(running.pid, signal.SIGINT)
    try:
        running.wait(_END)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


if __name__ == "__main__":
    main()
