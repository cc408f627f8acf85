"""Segments many slides with however many processes: each takes what no other is at.

What is refused is refused before torch is imported: the modules that import it are imported where
the work begins.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathoseg.annotations.reading import annotation_of
from pathoseg.config import Config
from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError, StoppedError, first_names
from pathoseg.host_memory import share_one_heap
from pathoseg.inference.leases import Leases
from pathoseg.inference.provenance import provenance_of, refuse_other_results
from pathoseg.inference.result_folder import (
    OVERLAY,
    STATES,
    SUMMARY,
    Provenance,
    State,
    failures,
    read_state,
    refuse_namesakes,
    refuse_strangers,
    result_folders,
    results,
    state_file,
    states,
    sweep,
)
from pathoseg.interruption import Interruption
from pathoseg.outputs.atomic import write_text
from pathoseg.outputs.batch_report import (
    PAGE,
    BatchResults,
    BatchSlide,
    overlay_picture,
    write_batch_report,
)
from pathoseg.outputs.report import (
    Summary,
    damage_warning,
    read_summary,
    write_failures,
    write_summary_table,
)
from pathoseg.parallel.comm.launcher import (
    World,
    find_host_share,
    find_world,
    one_process_error,
    use_host_share,
)
from pathoseg.parallel.comm.local_ranks import start_workers
from pathoseg.platform_support import cores_to_use, parent_lives, process_age
from pathoseg.progress import say
from pathoseg.slides.folder import find_slides, with_a_name
from pathoseg.slides.slide import model_frame, open_slide
from pathoseg.slides.zarr_folder import is_zarr
from pathoseg.time_spent import TimeSpent, time_told
from pathoseg.training.distributed import errors_left_to_rank_0, say_ranks, silent
from pathoseg.training.run_folder import bundle_of
from pathoseg.version import __version__
from pathoseg.workflows.early_checks import check_device

if TYPE_CHECKING:
    from pathoseg.inference.slide_job import SlideJob, WorkerContext

TABLE = "summary.csv"
FAILURES = "failures.csv"
_NAP = 0.5  # seconds
_PATIENCE = 10.0  # seconds without work, after which it is said what is waited for
_HEAD_START = 2.0  # seconds
_STOPPED_WAIT = 1.0  # seconds, for who writes the tables
_WITHOUT_INTEREST = {
    "done": "Without regions of interest in their annotations",
    "skipped": "Kept as they were, without regions of interest",
}
_calls = count()  # of `infer` in this process, under a launcher


@dataclass(frozen=True)
class InferArguments:
    """The arguments of a segmentation.

    Attributes:
        inputs: Slides and folders of slides.
        model: Run or bundle; None is the newest finished run.
        out: Folder of the results.
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        annotations: Folder of annotations, whose regions of interest get figures of their own.
        resume: Keep what earlier batches have done, and go on where they stopped.
        overwrite: Use `out` also where it holds results of another model or of other options.
        factory: The user's own network that may be imported.
        verbose: Tell in the end where the time went, of ranks that of rank 0.
        command_line: Its arguments, for ranks to be started; None starts none. With them a stop
            ends the process where a layer under way takes longer than two seconds; without, that
            layer is waited for.
    """

    inputs: Sequence[Path]
    model: Path | None
    out: Path
    config_file: Path | None = None
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    annotations: Path | None = None
    resume: bool = False
    overwrite: bool = False
    factory: str | None = None
    verbose: bool = False
    command_line: Sequence[str] | None = None

    @property
    def is_command(self) -> bool:
        """True if this is all that its process does."""
        return self.command_line is not None


def infer(asked: InferArguments) -> int:
    """Segment every slide of the inputs (slides, or folders of slides).

    All processes that do so at the same time share the work: the ranks of one job, and jobs that
    know nothing of each other. They send each other nothing, and meet in the folder of the results
    alone.

    Returns:
        The exit code: 0, 1 where slides of several failed (each stands in `failures.csv`), or 2 on
        other ranks than 0 of a command whose only slide failed.

    Raises:
        PathosegError: The model, the only slide or an option cannot be used, or an input is
            missing, or two slides would have one annotation, or the folder holds results of another
            model, of other options or of other slides with the same names.
        StoppedError: A signal came; what is finished is kept.
    """
    entered = time.monotonic()
    share_one_heap()
    config = load_config(asked.config_file, asked.flags)
    _refuse_without_library(config)
    world, out = find_world(), asked.out
    if config.parallel.ranks > 1 and world.launcher is None:
        return _start_ranks(asked, config)
    advice = f"What is done is in {out}. Go on with the same command and --resume."
    leads = world.rank == 0
    with (
        time_told(asked.verbose and leads) as spent,
        Interruption(advice, asked.is_command) as interruption,
        _stopped_with_launcher(interruption, world),
    ):
        with _one_voice(world) as cores:
            say_ranks(config.parallel.ranks, world)
            readers = config.infer.readers or cores
            config = replace(config, infer=replace(config.infer, readers=readers))
            request = _find_request(asked, config)
            check_device(config.parallel.device)  # refused a second before the rest is imported
            from pathoseg.inference.segmenter import load_segmenter
            from pathoseg.inference.slide_job import SlideJob, WorkerContext

            segmenter = load_segmenter(request.bundle, config, asked.factory, spent, leads)
            if request.only is not None:  # refused before anything is written
                with open_slide(request.only, config.data.assume_mpp) as opened:
                    model_frame(opened, segmenter.card.mpp)
            interruption.raise_if_asked()
            leases = Leases(out / STATES)
            since = leases.now()
            if world.launcher is not None:  # ranks begin together, and load at their own pace
                # The first call counts from the start of the process; a later one from its own,
                # as results of earlier calls are not part of it.
                is_first = next(_calls) == 0
                since -= process_age() if is_first else time.monotonic() - entered
        with leases:
            context = WorkerContext(
                segmenter,
                config,
                out,
                leases,
                interruption,
                resume=asked.resume,
                since=since,
                provenance=request.provenance,
                overwrite=asked.overwrite,
            )
            batch = [
                SlideJob(request.names[slide], slide, folder, context, request.annotated.get(slide))
                for slide, folder in request.folders.items()
            ]
            try:
                _segment(context, batch, request.bundle, spent)
            except StoppedError as stop:
                if world.rank and asked.is_command:  # rank 0 tells it for all
                    raise SystemExit(stop.exit_code) from None
                raise
    if asked.annotations is not None and leads:
        _tell_without_interest(batch)
    return _verdict(batch, out, leads=leads, is_command=asked.is_command)


def _start_ranks(asked: InferArguments, config: Config) -> int:
    """Start the ranks that are asked for, of a command; return their exit code.

    Raises:
        PathosegError: As `infer`, or it is called by a program of the user's.
    """
    ranks = config.parallel.ranks
    if asked.command_line is None:
        raise one_process_error(ranks, "infer")
    with silent():  # rank 0 tells it
        _find_request(asked, config)
    check_device(config.parallel.device)
    return start_workers(ranks, [sys.executable, "-m", "pathoseg", *asked.command_line])


def _segment(
    context: WorkerContext, batch: Sequence[SlideJob], bundle: Path, spent: TimeSpent
) -> None:
    """Segment the slides of a batch and write its tables, also where it is stopped.

    Args:
        context: This process, which holds its leases.
        batch: The slides.
        bundle: The model's folder.
        spent: Told where the process is ended.

    Raises:
        PathosegError: As `infer`.
        StoppedError: A signal came.
    """

    def report_stop() -> None:
        with suppress(OSError):  # the stop is what is to be told
            _write_tables(context, batch, bundle, is_stopped=True)

    def leave() -> None:
        report_stop()
        context.leases.close()
        spent.tell()

    context.interruption.leave = leave
    try:
        _work(batch, context.out, context.interruption)
        _write_tables(context, batch, bundle, is_stopped=False)
    except (PathosegError, StoppedError):
        report_stop()
        raise
    sweep(context.out)


@dataclass(frozen=True)
class _Request:
    """A call's slides and model, and where the results go.

    Attributes:
        names: The slides, by file.
        annotated: The annotation of each slide that has one.
        folders: The folder of each slide's result.
        bundle: The model's folder.
        provenance: Of all results.
    """

    names: Mapping[Path, str]
    annotated: Mapping[Path, Path]
    folders: Mapping[Path, Path]
    bundle: Path
    provenance: Provenance

    @property
    def only(self) -> Path | None:
        """The slide, where it is the only one."""
        return next(iter(self.folders)) if len(self.folders) == 1 else None


def _find_request(asked: InferArguments, config: Config) -> _Request:
    """Find the slides and the model, and refuse what can be refused before the model is loaded.

    Raises:
        PathosegError: As `infer`.
    """
    out, names = asked.out, _slides(asked.inputs, asked.annotations)
    annotated = _annotations(names, asked.annotations)
    folders = result_folders(out, names)
    if len(folders) == 1 and not (slide := next(iter(folders))).exists():
        raise PathosegError(f"{slide} does not exist.", "Check the path.")
    refuse_strangers(out, folders)
    _refuse_strange_tables(out)
    bundle = bundle_of(asked.model)
    request = _Request(names, annotated, folders, bundle, provenance_of(bundle, config))
    if not asked.overwrite:
        refuse_other_results(out, request.provenance, folders.values())
        refuse_namesakes(out, folders)
    if request.only is not None:
        open_slide(request.only, config.data.assume_mpp).close()
    return request


def _refuse_strange_tables(out: Path) -> None:
    """Refuse to replace tables and pages of the user's, which lie where nothing was segmented."""
    if (out / STATES).is_dir():
        return
    for path in (out / TABLE, out / FAILURES, out / PAGE):
        if path.exists():
            raise PathosegError(
                f"{path} is of no batch of pathoseg, and this one would replace it.",
                "Give --out another folder, or move it away.",
            )


def _refuse_without_library(config: Config) -> None:
    """Refuse what every slide would fail at. All other libraries are there on every Python."""
    if config.outputs.dicom_seg and find_spec("highdicom") is None:
        raise PathosegError(
            "[outputs] dicom_seg needs the library highdicom, which is not installed.",
            "Install it (pip install highdicom; on Python 3.14 that takes a C++ compiler), or set "
            "dicom_seg to false.",
        )


@contextmanager
def _one_voice(world: World) -> Iterator[int]:
    """Have the ranks of a launcher begin as one program: each with its part of its host.

    Rank 0 alone prints. An error is told by one rank of each host, whose files may differ.

    Yields:
        The number of cores that this process may keep busy.
    """
    if world.launcher is None:
        yield cores_to_use()
        return
    share = find_host_share(world)
    cores = use_host_share(share)
    with ExitStack() as stack:
        if world.rank:
            stack.enter_context(silent())
        if share.rank:
            stack.enter_context(errors_left_to_rank_0(_HEAD_START))
        yield cores


@contextmanager
def _stopped_with_launcher(interruption: Interruption, world: World) -> Iterator[None]:
    """Make a context in which the end of the launcher counts as a SIGTERM, which it may not
    send.
    """
    if world.launcher is None:
        yield
        return
    launcher, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if not parent_lives(launcher):
                interruption.ask(signal.SIGTERM)
                return

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _slides(inputs: Sequence[Path], annotations: Path | None) -> dict[Path, str]:
    """The slides that the arguments name, each once, with their names.

    Raises:
        PathosegError: There is no argument, or a folder has no slides.
    """
    if not inputs:
        raise PathosegError("There is nothing to segment.", "Name a slide, or a folder of slides.")
    slides, passed_over = dict[Path, str](), () if annotations is None else (annotations,)
    seen = set[Path]()  # of earlier arguments, wherever they begin
    for path in inputs:
        if path.is_dir() and not is_zarr(path):
            found = find_slides([path], passed_over)
        else:
            slide = with_a_name(path)
            found = {slide.name: slide}
        new = {slide: name for name, slide in found.items() if slide.resolve() not in seen}
        slides |= new
        seen.update(slide.resolve() for slide in new)
    return slides


def _annotations(names: Mapping[Path, str], folder: Path | None) -> dict[Path, Path]:
    """The annotation of each slide that has one, where a folder of them was given."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise PathosegError(f"{folder} is not a folder.", "Check --annotations.")
    used = dict[Path, Path]()
    found = {slide: annotation_of(name, slide, folder, used) for slide, name in names.items()}
    return {slide: path for slide, path in found.items() if path is not None}


def _work(batch: Sequence[SlideJob], out: Path, interruption: Interruption) -> None:
    """Lead each slide that nobody is at, then help with those that are left, until none is."""

    def lead(slide: SlideJob) -> None:
        interruption.raise_if_asked()
        if slide.lead():
            if slide.outcome() == "done":
                summary = read_summary(slide.folder / SUMMARY)
                _picture(out, slide.folder, summary)  # so that a stopped batch ends at once
                say(f"{slide.name}: done, in {slide.folder}{_warnings(summary)}")
            elif len(batch) > 1 and (state := slide.state):
                say(f"{slide.name}: failed. {state.problem} {state.hint}")

    for slide in batch:
        lead(slide)
    idle, is_told = time.monotonic(), False
    while left := [slide for slide in batch if slide.outcome() is None]:
        for slide in left:
            lead(slide)  # where its process has died
        if any(slide.help() for slide in left):
            idle, is_told = time.monotonic(), False
            continue
        if not is_told and time.monotonic() - idle > _PATIENCE:
            hosts = sorted({state.host for slide in left if (state := slide.state)})
            where = f" on {first_names(hosts)}" if hosts else ""
            names = first_names([slide.name for slide in left])
            say(
                f"Waiting for {names}, which other processes have begun{where}. "
                "What a dead one has begun is free within a minute."
            )
            is_told = True
        interruption.raise_if_asked()
        time.sleep(_NAP)


def _warnings(summary: Summary) -> str:
    """Return warnings about a result: an unseen resolution, a damaged slide."""
    damage = damage_warning(summary)
    told = "".join(f". Take care: {each}" for each in summary.warnings if each != damage)
    if damage is None:
        return told
    missing = "What is missing is 255 in the mask and hatched in the overlay."
    if not summary.unread_pixels:
        missing = "What is missing lies around what is predicted; the model saw white there."
    return f"{told}. {damage[0].upper()}{damage[1:]}. {missing}"


def _tell_without_interest(batch: Sequence[SlideJob]) -> None:
    """Say which results have no region of interest: nobody drew one, or it was not asked for."""
    for outcome, told in _WITHOUT_INTEREST.items():
        names = [
            slide.name
            for slide in batch
            if slide.outcome() == outcome
            and not read_summary(slide.folder / SUMMARY).regions_of_interest
        ]
        if names:
            say(f"{told}: {first_names(names)}.")


def _write_tables(
    context: WorkerContext, batch: Sequence[SlideJob], bundle: Path, *, is_stopped: bool
) -> None:
    """Write tables and a page of all that lies in the folder.

    One process at a time, so that the last one sees all results. One that finds no change since the
    last tables writes none; one that is stopped waits `_STOPPED_WAIT` at most.
    """
    out, leases = context.out, context.leases
    claim, stamp = out / STATES / ".tables", out / STATES / ".reported"
    asked = time.monotonic()
    while not leases.take(claim):
        if is_stopped and time.monotonic() - asked > _STOPPED_WAIT:
            return
        if not is_stopped:
            context.interruption.raise_if_asked()
        time.sleep(0.1)
    try:
        now, known = leases.now(), states(out)
        changed = max((state.written for state in known.values()), default=0.0)
        if not is_stopped and _stamped(stamp) > max(changed, context.since):
            return
        stamp.unlink(missing_ok=True)
        found = results(out, lambda error: say(f"Passed over: {error.problem}"))
        failed = _failures(known, out, found)
        write_summary_table(out / TABLE, found.values())
        write_failures(out / FAILURES, failed)
        classes = context.segmenter.classes
        report = BatchResults(
            folder=str(out),
            model=str(bundle),
            colours=dict(zip(classes.names, classes.colours, strict=True)),
            slides=[_reported(out, folder, summary) for folder, summary in found.items()],
            failures=failed,
            begun=[name for name, state in known.items() if state.status == "begun"],
            waiting=[slide.name for slide in batch if slide.state is None],
            is_stopped=is_stopped,
            version=__version__,
        )
        write_batch_report(out / PAGE, report)
        if not is_stopped:
            write_text(stamp, repr(now))
    finally:
        leases.release(claim)


def _failures(
    known: Mapping[str, State], out: Path, found: Mapping[Path, Summary]
) -> dict[str, PathosegError]:
    """Return why slides failed, and of which of them the result of an earlier call is kept.

    Args:
        known: The states, by the slides' names.
        out: The folder of the batch.
        found: The results in it, by their folders.
    """
    kept = {summary.slide: folder.relative_to(out).as_posix() for folder, summary in found.items()}
    failed = failures(known)
    for name in failed.keys() & kept.keys():
        told = f"The result of an earlier call is kept in {kept[name]}, its rows in {TABLE}."
        failed[name] = PathosegError(f"{failed[name].problem} {told}", failed[name].hint)
    return failed


def _stamped(stamp: Path) -> float:
    """Return the file system's time at which tables of an ended batch were begun; 0.0 if none."""
    with suppress(OSError, ValueError):
        return float(stamp.read_text(encoding="ascii"))
    return 0.0


def _reported(out: Path, folder: Path, summary: Summary) -> BatchSlide:
    state = read_state(state_file(out, folder))
    seconds = None
    if state is not None and state.seconds and state.status != "failed":
        seconds = state.seconds[-1]
    name = folder.relative_to(out).as_posix()
    return BatchSlide(summary, name, seconds, _picture(out, folder, summary))


def _picture(out: Path, folder: Path, summary: Summary) -> bytes | None:
    """The small overlay of a result, kept beside the slide's state."""
    kept = state_file(out, folder)
    return overlay_picture(folder / OVERLAY, kept.with_name(f".{kept.stem}.jpg"), summary)


def _verdict(batch: Sequence[SlideJob], out: Path, *, leads: bool, is_command: bool) -> int:
    """Return the exit code; the rank that leads says what the batch came to.

    Raises:
        PathosegError: The only slide failed; of commands on the rank that leads alone.
    """
    counts = Counter(slide.outcome() for slide in batch)
    failed = {
        slide.name: state
        for slide in batch
        if slide.outcome() == "failed" and (state := slide.state) is not None
    }
    if len(batch) == 1 and failed:
        if leads or not is_command:
            [state] = failed.values()
            raise PathosegError(state.problem, state.hint)
        return 2
    if leads:
        for slide in batch:
            if slide.outcome() == "skipped":
                say(f"{slide.name}: already done, in {slide.folder}")
        say(
            f"{counts['done']} of {len(batch)} slides done, {counts['skipped']} skipped as done "
            f"before, {counts['failed']} failed. Areas: {out / TABLE}; to read: {out / PAGE}"
        )
        for name, state in failed.items():
            say(f"Failed: {name}: {state.problem}")
    return 1 if failed else 0
