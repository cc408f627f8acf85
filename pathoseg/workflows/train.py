"""The training of a model from slides and annotations: one page from folder to bundle."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from pathoseg.config import Config
from pathoseg.config_file import (
    UNNUMBERED,
    changed_options,
    load_config,
)
from pathoseg.device import MEAN, STD, device_name, pick_device, tuned_kernels
from pathoseg.errors import MemoryExhaustedError, PathosegError, StoppedError
from pathoseg.inference.infer_options import refuse_unfit, trained_overlap
from pathoseg.interruption import Interruption
from pathoseg.models.build import (
    check_tile,
    declared_inputs,
    edge_reach,
    labelled_input,
    tile_multiple,
)
from pathoseg.models.bundle import Bundle
from pathoseg.models.losses import build_loss
from pathoseg.outputs.run_report import PAGE, Run, write_run_report
from pathoseg.parallel.comm.launcher import find_world, one_process_error, share_of_cores
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.comm.stop_star import StopStar
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.orders import AUTO
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.runtime.rng import WholeModel
from pathoseg.parallel.schedule.event import Event
from pathoseg.platform_support import cores_to_use, processor_name
from pathoseg.progress import say
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.time_spent import TimeSpent, time_told
from pathoseg.training.checkpoint import Progress
from pathoseg.training.distributed import Ranks, say_ranks, stopped_together
from pathoseg.training.earlier_model import (
    EarlierModel,
    warn_of_seen,
)
from pathoseg.training.encoder_training import prepare_encoder
from pathoseg.training.engine import Engine, Loss
from pathoseg.training.first_weights import (
    first_network,
)
from pathoseg.training.labelled_slides import (
    LabelledSlides,
    annotation_digests,
    classes_held,
    find_labelled_slides,
    with_tile,
)
from pathoseg.training.one_device import OneDevice
from pathoseg.training.pipeline_engine import Drawing, PipelineEngine, draw_step
from pathoseg.training.read_network import read_alone
from pathoseg.training.run_folder import (
    CONFIG,
    METRICS,
    TIMELINE,
    clear_run,
    finish_run,
)
from pathoseg.training.slide_facts import (
    SlideFacts,
    class_cells,
    class_lines,
    context_lines,
    facts_of_training,
    rows_by_class,
    slide_cells,
    warnings_of,
)
from pathoseg.training.splits import (
    Member,
    find_table,
    read_rows,
    split_lines,
    split_slides,
)
from pathoseg.training.step_plan import agreed_plan, check_host, teams
from pathoseg.training.tasks import SCORES, Task, make_task
from pathoseg.training.trainer import Trainer
from pathoseg.training.training_tiles import SplitTiles, cut_labelled_slides, training_set
from pathoseg.training.validation import Validation
from pathoseg.version import __version__
from pathoseg.workflows.early_checks import TrainingArguments, parallel_options
from pathoseg.workflows.second_attempt import SecondAttempt, leave_word, start_ranks_twice
from pathoseg.workflows.start_run import StartedRun, begin_run, prolong_run, run_held, start_run


def launch(asked: TrainingArguments, arguments: Sequence[str]) -> int:
    """Train here, or on several ranks of this machine where so many are asked for.

    Args:
        asked: As for `train`.
        arguments: The command line's, for ranks to be started.

    Returns:
        The exit code.
    """
    wanted = parallel_options(asked)
    if find_world().launcher is None:
        teams(wanted, wanted.ranks)
    asked.refuse_overwriting()
    code = start_ranks_twice(wanted.ranks, arguments, wanted.transport)
    if code is None:
        train(replace(asked, ends_process=True))
    return code or 0


def train(asked: TrainingArguments) -> Path:
    """Train until the epochs, the time limit or the patience end; return the run's folder.

    Raises:
        PathosegError: Anything that keeps the run from starting or going on.
        StoppedError: A signal came; `--resume` goes on.
    """
    with Ranks() as ranks:
        try:
            return _attempt(asked, ranks, None)
        except MemoryExhaustedError as error:
            second = SecondAttempt.in_this_process(error)
            if second is None:
                raise
            say(str(error))
        # Outside the handler, whose traceback keeps what the attempt made in memory.
        flags = second.flags(asked.flags)
        asked = replace(asked, flags=flags, out=second.run, resume=True, overwrite=False)
        return _attempt(asked, ranks, second)


def _attempt(asked: TrainingArguments, ranks: Ranks, second: SecondAttempt | None) -> Path:
    """Train as `train` does, but end where memory does; all ranks call it.

    Raises:
        MemoryExhaustedError: A step of this rank found no memory.
    """
    wanted = parallel_options(asked)
    asked.refuse_overwriting()
    world = ranks.world
    teams(wanted, wanted.ranks if world.launcher is None else world.ranks)
    if wanted.ranks > 1 and world.launcher is None:
        raise one_process_error(wanted.ranks, "train")
    say_ranks(wanted.ranks, world)
    # Where memory is limited a plan says what is kept of it, on one rank too.
    alone = wanted.memory is not None
    joined = ranks.joined(wanted.transport, alone, wanted.device)
    with joined as transport, time_told(asked.verbose) as spent, ExitStack() as held:
        if second is not None:
            asked = replace(asked, flags=second.begun(transport).flags(asked.flags))
        return _train(asked, transport, spent, held)


def _train(
    asked: TrainingArguments,
    transport: ProcessTransport | None,
    spent: TimeSpent,
    held: ExitStack,
) -> Path:
    """Train as `_attempt` does; what `held` has is the run's until the end."""
    started = time.monotonic()
    leads = transport is None or transport.rank == 0
    if asked.trace and transport is None:
        raise PathosegError(
            "--trace draws how ranks take turns, and this run has one rank.",
            "Add --ranks N or [parallel] memory, or leave out --trace.",
        )
    run = start_run(asked, transport)
    folder = run.folder
    if transport is None and run.config.parallel.order != AUTO:
        say(f"One process: the order {run.config.parallel.order} is for several ranks (--ranks).")
    if run.is_over:
        say(
            f"{folder} is finished; its model is in {folder / 'model'}. A longer --time-limit or "
            "more --epochs, either of them for the whole run, trains it further."
        )
        return folder
    # A run that goes on or is replaced is held from here on: another trainer is named at once.
    is_held = leads and (folder / CONFIG).exists()
    if is_held:
        held.enter_context(run_held(folder))
    given = _read_input(run)
    run = replace(run, start_from=None)  # the network holds its weights now: free this copy
    given = _plan_step(given, run, transport)
    config, sources, members, model = given.config, given.sources, given.members, given.model
    readers = config.train.readers or share_of_cores(transport)
    card = _card(given)
    overview = split_lines(members, given.table, sources.classes.names)
    warned = [f"Take care: {warning}" for warning in sources.warnings]
    for line in (*overview, *sources.lines(), *warned):
        say(line)
    pool = SlidePool(lambda path: open_slide(path, config.data.assume_mpp))
    advice = "Nothing is trained yet: start the same command again."
    star = StopStar.of(transport) if transport is not None and asked.ends_process else None
    with (
        Interruption(advice, asked.ends_process, star) as interruption,
        stopped_together(interruption, transport),
        closing(pool),
        tuned_kernels(pick_device(config.parallel.device), config.parallel.memory is not None),
    ):
        with spent.on("cutting tiles"):
            tiles, facts = _cut(given, card, pool, interruption)
        if leads:
            if not is_held:
                held.enter_context(run_held(folder))
            if not run.is_resumed and (folder / CONFIG).exists():
                clear_run(folder, asked.overwrite)
            digests = annotation_digests(sources)
            begin_run(folder, config, members, digests, given.plan, model, card)
        interruption.advice = f"Continue with: pathoseg train --resume --out {quote(str(folder))}"
        task = make_task(config.model.task, sources.classes, config.tiles.min_cover)
        drawing = partial(draw_step, folder, given.expected) if asked.trace else None
        engine = _make_engine(given, card, task, transport, interruption, drawing, star)
        loop = Trainer(
            folder,
            config.train,
            engine,
            card,
            given.loss,
            training_set(config, tiles.train, sources.classes, readers),
            Validation(
                tiles.val,
                task,
                sources.classes,
                config.train.microbatch or config.train.batch,
                readers,
            ),
            started,
            spent,
        )
        if run.is_longer:
            # The checkpoint first: killed in between, the run is still finished and can be asked
            # to train longer again.
            loop.prolong()
            if engine.leads:
                prolong_run(folder, config)
        if run.is_resumed and not loop.progress.step:
            say(f"{folder} was stopped ahead of its first checkpoint: it begins again.")

        def report(at: Progress, is_finished: bool) -> None:
            if engine.leads:
                write_run_report(_report(folder, given, facts, at, is_finished=is_finished))

        try:
            progress = _fit(loop, interruption, spent, report)
        except MemoryExhaustedError as error:
            error.run = folder
            if transport is not None:
                leave_word(error, transport.rank)
            raise
    report(progress, is_finished=True)
    if engine.leads:
        finish_run(folder, _summary(progress, sources))
    if asked.trace and not (folder / TIMELINE).exists():
        say("No step is drawn: the run had too few, as the first ones warm up.")
    kept = f"{'Last' if progress.score is None else 'Best'} epoch: {progress.best_epoch}"
    figures = folder / METRICS
    say(f"{kept}. Model: {folder / 'model'}. Figures: {figures}; to read: {folder / PAGE}")
    return folder


@dataclass(frozen=True)
class _Input:
    """All that a run is made of, once it is read, and the plan of its step.

    Attributes:
        config: The options, with the tile and the microbatch that are taken.
        sources: The slides.
        table: The file of the splits, if there is one.
        members: Name of a slide → place in the split.
        loss: Per-sample losses.
        model: With the weights that the run begins with.
        origin: Where these weights are from.
        plan: The plan of several ranks, or of limited memory; else None.
        expected: What the plan expects each rank of a group to do when; of rank 0.
        traced: The model's graph; None where a run without a plan can have none.
    """

    config: Config
    sources: LabelledSlides
    table: Path | None
    members: Mapping[str, Member]
    loss: Loss
    model: torch.nn.Module
    origin: Mapping[str, Any]
    plan: Plan | None = None
    expected: Sequence[Event] = ()
    traced: Traced | None = None


def _read_input(run: StartedRun) -> _Input:
    """Read slides and annotations, split them, and build the network for their classes."""
    config, recorded = run.config, run.splits
    # A run goes on with the slides and splits that it began with.
    own = None if recorded is None else read_rows(recorded, is_recorded=True).keys()
    sources = find_labelled_slides(config, run.classes, own)
    table = find_table(config.data) if recorded is None else recorded
    loss = build_loss(config.loss, config.model.task, len(sources.classes))
    held = classes_held(sources)
    share, is_recorded = config.data.val_share, recorded is not None
    members = split_slides([*held], table, config.seed, share, held, is_recorded=is_recorded)
    model, origin = first_network(run.folder, config, sources.classes, run.start_from)
    if isinstance(run.start_from, EarlierModel):
        warn_of_seen(run.start_from, members)
    prepare_encoder(model, config.train)
    multiple = tile_multiple(model)
    config = with_tile(config, sources, multiple)
    tiles = config.tiles
    check_tile(model, tiles.side)
    if not run.is_resumed:  # else it is recorded
        reach = edge_reach(model)
        refuse_unfit(config.infer, config.model.task, tiles.mpp, tiles.side, multiple, reach)
    return _Input(config, sources, table, members, loss, model, origin)


def _plan_step(given: _Input, run: StartedRun, transport: ProcessTransport | None) -> _Input:
    """Add the plan of a step on several ranks; of one process make sure that it fits the host."""
    config = given.config
    if transport is None:
        traced = read_alone(given.model, config)
        if traced is not None and pick_device(config.parallel.device).type == "cpu":
            check_host(traced.graph, config)
        return replace(given, traced=traced)
    agreed = agreed_plan(given.model, config, transport, run.plan)
    plan = agreed.plan
    if config.train.microbatch is None and plan.microbatch != config.train.batch:
        say(
            f"Microbatches of {plan.microbatch}: batch norm, if there is one, sees so many tiles, "
            f"not {config.train.batch} as in one process. [train] microbatch sets it."
        )
    config = replace(config, train=replace(config.train, microbatch=plan.microbatch))
    return replace(given, config=config, plan=plan, expected=agreed.expected, traced=agreed.traced)


def _cut(
    given: _Input, card: Bundle, pool: SlidePool, interruption: Interruption
) -> tuple[SplitTiles, Sequence[SlideFacts]]:
    """Cut the slides into tiles, and tell what is known of them then."""
    config, sources, members = given.config, given.sources, given.members
    tiles = cut_labelled_slides(
        config,
        sources,
        members,
        pool,
        interruption,
        context=card.context,
        labelled=labelled_input(given.model, card.inputs),
    )
    facts = facts_of_training(config, sources, members, [*tiles.train, *tiles.val])
    for line in (*class_lines(facts, sources.classes), *context_lines(tiles.train)):
        say(line)
    for warning in warnings_of(facts, sources.classes, config, ()):
        say(f"Take care: {warning}")
    return tiles, facts


def _make_engine(
    given: _Input,
    card: Bundle,
    task: Task,
    transport: ProcessTransport | None,
    interruption: Interruption,
    drawing: Drawing | None,
    star: StopStar | None,
) -> Engine:
    """Return the engine of this process: by the plan, or of one device where there is none."""
    config, model, stop = given.config, given.model, interruption.is_asked
    if transport is None or given.plan is None or given.traced is None:
        device = pick_device(config.parallel.device)
        whole = WholeModel(
            model.to(device), given.traced, config.seed, device, config.train.compile
        )
        return OneDevice(model, whole.forward, given.loss, task, card, config.train, stop)
    return PipelineEngine(
        transport,
        given.plan,
        given.traced,
        given.loss,
        task,
        card,
        config,
        drawing=drawing,
        is_given_up=stop,
        star=star,
    )


def _fit(
    loop: Trainer, interruption: Interruption, spent: TimeSpent, report: Callable[..., None]
) -> Progress:
    """Train to the end as `Trainer.fit`; a run that is stopped is reported as well.

    Args:
        loop: The training.
        interruption: Gives a step under way up where it may.
        spent: Told where the process is ended.
        report: Writes the page of the run from its progress and `is_finished`.
    """

    def report_stop(at: Progress) -> None:
        with suppress(OSError):  # the stop is what is to be told
            report(at, is_finished=False)

    def leave() -> None:
        report_stop(loop.leave())
        spent.tell()

    interruption.leave = leave
    try:
        return loop.fit(interruption)
    except StoppedError:
        report_stop(loop.progress)
        raise


def _summary(progress: Progress, sources: LabelledSlides) -> dict[str, Any]:
    return {
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "best_epoch": progress.best_epoch,
        "best_score": progress.score,
        "skipped_steps": progress.skipped_steps,
        "left_out": sources.left_out,
    }


def _report(
    run: Path, given: _Input, facts: Sequence[SlideFacts], progress: Progress, *, is_finished: bool
) -> Run:
    """Return what the page of the run tells beside what is in the run's folder."""
    config, sources, plan = given.config, given.sources, given.plan
    classes, by_name = sources.classes, {one.member.slide: one for one in facts}
    class_columns, class_rows = rows_by_class(facts, classes)
    titles = ["Slide", "Split", "Patient", "µm/px", "Pixels", "Of interest", "Tiles"]
    slide_rows = []
    for name, member in sorted(given.members.items(), key=lambda item: (item[1].split, item[0])):
        own = by_name.get(name)
        cells = {"Slide": name, "Split": member.split, "Patient": member.patient}
        if own is not None:
            cells |= slide_cells(own)
        fixed = [cells.get(title, "") for title in titles]
        slide_rows.append([*fixed, *class_cells(own, classes.names)])
    device, ranks = pick_device(config.parallel.device), 1 if plan is None else plan.ranks
    name = processor_name() if device.type == "cpu" else device_name(device)
    order = "" if plan is None or ranks == 1 else f": {plan.order}, {plan.stages} stages"
    if plan is not None and plan.shards > 1:
        order += f", {plan.shards} strips of each tile"
    going_on = f"It goes on with: pathoseg train --resume --out {quote(str(run))}"
    return Run(
        folder=run,
        classes=classes,
        unit="tiles" if config.model.task == "classify" else "pixels",
        state="It is finished." if is_finished else f"It was stopped before its end. {going_on}",
        best_epoch=progress.best_epoch,
        best_score=progress.score,
        score=SCORES[config.model.task],
        epochs=progress.epoch,
        steps=progress.step,
        skipped_steps=progress.skipped_steps,
        seconds=progress.seconds,
        class_columns=class_columns,
        class_rows=class_rows,
        slide_columns=[(title, at > 2) for at, title in enumerate((*titles, *classes.names))],
        slide_rows=slide_rows,
        warnings=[*sources.warnings, *warnings_of(facts, classes, config, ())],
        left_out=sources.left_out,
        options=changed_options(load_config(run / CONFIG, unnumbered=UNNUMBERED)),
        made=[
            ("Machine", socket.gethostname()),
            ("Device", f"{name}; {cores_to_use()} processor cores"),
            ("Ranks", f"{ranks}{order}"),
            ("pathoseg", __version__),
            ("PyTorch", str(torch.__version__)),
            ("Python", platform.python_version()),
            ("Model", str(run / "model")),
        ],
        version=__version__,
    )


def _card(given: _Input) -> Bundle:
    config, sources, model = given.config, given.sources, given.model
    multiple = tile_multiple(model)
    trained_on = [s for s in sources.usable if given.members[s.name].split == "train"]
    # Three digits: scans of one scanner differ in the fourth.
    mpps = {float(f"{source.frame.level0_mpp.mean:.3g}") for source in trained_on}
    return Bundle(
        model=config.model.with_classes(len(sources.classes)),
        class_names=sources.classes.names,
        class_colours=sources.classes.colours,
        mpp=config.tiles.mpp,
        tile=config.tiles.side,
        overlap=trained_overlap(config.infer, config.tiles.side, multiple, edge_reach(model)),
        mean=config.model.mean or MEAN,
        std=config.model.std or STD,
        multiple=multiple,
        context=declared_inputs(model, config.tiles.mpp, config.tiles.side)[1:],
        stain=None if config.tiles.stain == "none" else {"method": config.tiles.stain},
        training={
            **given.origin,
            "slides": config.data.told_folders,
            "seed": config.seed,
            "slide_mpps": tuple(sorted(mpps)),
        },
    )
