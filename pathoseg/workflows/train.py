"""The training of a model from slides and annotations: one page from folder to bundle."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.config_file import (
    UNNUMBERED,
    changed_options,
    given_options,
    load_config,
    write_config,
)
from pathoseg.device import MEAN, STD, device_name, pick_device, tuned_kernels
from pathoseg.errors import MemoryExhaustedError, PathosegError, StoppedError
from pathoseg.inference.segmenter import class_table_of, default_overlap
from pathoseg.interruption import Interruption
from pathoseg.memory_size import memory_text
from pathoseg.models.build import (
    check_tile,
    declared_inputs,
    edge_reach,
    labelled_input,
    tile_multiple,
)
from pathoseg.models.bundle import Bundle, load_card, save_bundle
from pathoseg.models.bundle_identity import CARD
from pathoseg.models.encoder_weights import EncoderWeights
from pathoseg.models.losses import build_loss
from pathoseg.outputs.atomic import replaced, write_text
from pathoseg.outputs.run_report import PAGE, Run, write_run_report
from pathoseg.parallel.comm.launcher import find_world, share_of_cores
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
from pathoseg.training.distributed import Ranks, agree_on, stopped_together
from pathoseg.training.earlier_model import (
    EarlierModel,
    read_earlier,
    take_options,
    warn_of_seen,
)
from pathoseg.training.encoder_training import prepare_encoder, with_low_rank
from pathoseg.training.engine import Engine
from pathoseg.training.first_weights import (
    factory_of,
    first_network,
    take_encoder,
    takes_weights,
)
from pathoseg.training.labelled_slides import (
    LabelledSlides,
    classes_held,
    find_labelled_slides,
    with_tile,
)
from pathoseg.training.one_device import OneDevice
from pathoseg.training.pipeline_engine import TIMELINE, PipelineEngine, draw_step
from pathoseg.training.run_folder import (
    CONFIG,
    SPLITS,
    START,
    clear_run,
    finish_run,
    is_finished,
    make_run,
    moved_options,
    named_run,
    new_run,
    refuse_changes,
    refuse_overwriting,
    reopen_run,
    with_limits,
)
from pathoseg.training.slide_facts import (
    SlideFacts,
    class_lines,
    class_table,
    context_lines,
    facts_of_training,
    slide_cells,
    warnings_of,
)
from pathoseg.training.splits import (
    Member,
    find_table,
    read_rows,
    split_lines,
    split_slides,
    write_splits,
)
from pathoseg.training.step_plan import agreed_plan, check_host, read_model, teams
from pathoseg.training.tasks import make_task
from pathoseg.training.trainer import Trainer, check_limits, limits_text
from pathoseg.training.training_tiles import cut_labelled_slides, training_set
from pathoseg.training.validation import Validation
from pathoseg.version import __version__
from pathoseg.workflows.early_checks import parallel_options, resumed_run
from pathoseg.workflows.plan import PLAN
from pathoseg.workflows.second_attempt import SecondAttempt, leave_word, start_ranks_twice


@dataclass(frozen=True)
class _Asked:
    """The arguments of one attempt, as `train` was given them."""

    config_file: Path | None
    flags: Mapping[str, Mapping[str, Any]]
    out: Path | None
    resume: bool
    trace: bool
    overwrite: bool
    ends_process: bool


def launch(
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    resume: bool,
    trace: bool,
    arguments: Sequence[str],
    overwrite: bool = False,
    verbose: bool = False,
) -> int:
    """Train here, or on several ranks of this machine where so many are asked for.

    Args:
        config_file, flags, out, resume, trace, overwrite, verbose: As for `train`.
        arguments: The command line's, for ranks to be started.

    Returns:
        The exit code.
    """
    wanted = parallel_options(config_file, flags, out, resume)
    if find_world().launcher is None:
        teams(wanted, wanted.ranks)
    refuse_overwriting(out, resume, overwrite)
    code = start_ranks_twice(wanted.ranks, arguments, wanted.transport)
    if code is None:
        train(config_file, flags, out, resume, trace, overwrite, verbose, ends_process=True)
    return code or 0


def train(
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    out: Path | None,
    resume: bool,
    trace: bool = False,
    overwrite: bool = False,
    verbose: bool = False,
    *,
    ends_process: bool = False,
) -> Path:
    """Train until the epochs, the time limit or the patience end; return the run's folder.

    Args:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        out: The run's folder; None takes a new one, or the newest unfinished one.
        resume: Go on with a run.
        trace: On several ranks, draw what they do in one step.
        overwrite: Replace the run that `out` holds, once all input is read.
        verbose: Tell in the end where the time went.
        ends_process: After a signal, once the run is saved, end the process where a layer under way
            takes longer than two seconds; else that layer is waited for.

    Raises:
        PathosegError: Anything that keeps the run from starting or going on.
        StoppedError: A signal came; `--resume` goes on.
    """
    asked = _Asked(config_file, flags, out, resume, trace, overwrite, ends_process)
    with Ranks() as ranks:
        try:
            return _attempt(asked, ranks, verbose, None)
        except MemoryExhaustedError as error:
            second = SecondAttempt.in_this_process(error)
            if second is None:
                raise
            say(str(error))
        # Out of the handler, which holds what the attempt has made.
        flags = second.flags(flags)
        asked = replace(asked, flags=flags, out=second.run, resume=True, overwrite=False)
        return _attempt(asked, ranks, verbose, second)


def _attempt(asked: _Asked, ranks: Ranks, verbose: bool, second: SecondAttempt | None) -> Path:
    """Train as `train` does, but end where memory does; all ranks call it.

    Raises:
        MemoryExhaustedError: A step of this rank found no memory.
    """
    wanted = parallel_options(asked.config_file, asked.flags, asked.out, asked.resume)
    refuse_overwriting(asked.out, asked.resume, asked.overwrite)
    world = ranks.world
    teams(wanted, wanted.ranks if world.launcher is None else world.ranks)
    if wanted.ranks > 1 and world.launcher is None:
        raise PathosegError(
            f"[parallel] ranks = {wanted.ranks} asks for ranks, and this program is one process.",
            "Use the command `pathoseg train`, or start the program by mpirun, srun or torchrun.",
        )
    # Where memory is limited a plan says what is kept of it, on one rank too.
    alone = wanted.memory is not None
    joined = ranks.joined(wanted.transport, alone, wanted.device)
    with joined as transport, time_told(verbose) as spent:
        if second is not None:
            asked = replace(asked, flags=second.begun(transport).flags(asked.flags))
        return _train(asked, transport, spent)


def _train(asked: _Asked, transport: ProcessTransport | None, spent: TimeSpent) -> Path:
    started = time.monotonic()
    if asked.trace and transport is None:
        raise PathosegError(
            "--trace draws how ranks take turns, and this run has one rank.",
            "Add --ranks N or [parallel] memory, or leave out --trace.",
        )
    run, config, earlier, going_on, longer = _start(asked, transport)
    if transport is None and config.parallel.order != AUTO:
        say(f"One process: the order {config.parallel.order} is for several ranks (--ranks).")
    if going_on and is_finished(run) and not longer:
        say(
            f"{run} is finished; its model is in {run / 'model'}. A longer --time-limit or more "
            "--epochs, either of them for the whole run, trains it further."
        )
        return run
    # A run goes on with the slides and splits that it began with.
    recorded = run / SPLITS if going_on and (run / SPLITS).is_file() else None
    own = None if recorded is None else read_rows(recorded).keys()
    sources = find_labelled_slides(config, _recorded_classes(run) if going_on else None, own)
    table = find_table(config.data) if recorded is None else recorded
    loss = build_loss(config.loss, config.model.task, len(sources.classes))
    held = classes_held(sources)
    members = split_slides([*held], table, config.seed, config.data.val_share, held)
    model, origin = first_network(run, config, sources.classes, earlier)
    if isinstance(earlier, EarlierModel):
        warn_of_seen(earlier, members)
    prepare_encoder(model, config.train)
    del earlier  # its weights are in the network, and need no memory twice
    config = with_tile(config, sources, tile_multiple(model))
    check_tile(model, config.tiles.side)
    plan: Plan | None = None
    traced: Traced | None = None
    planned: Sequence[Event] = ()
    if transport is not None:
        before = _recorded_plan(run) if going_on else None
        plan, planned = agreed_plan(model, config, transport, before)
        if config.train.microbatch is None and plan.microbatch != config.train.batch:
            say(
                f"Microbatches of {plan.microbatch}: batch norm, if there is one, sees so many "
                f"tiles, not {config.train.batch} as in one process. [train] microbatch sets it."
            )
        config = replace(config, train=replace(config.train, microbatch=plan.microbatch))
    else:
        traced = read_model(model, config)
        if traced is not None and pick_device(config.parallel.device).type == "cpu":
            check_host(traced.graph, config)
    readers = config.train.readers or share_of_cores(transport)
    card = _card(config, sources, members, model, origin)
    left_out = [f"Left out: {name}: {reason}" for name, reason in sources.left_out.items()]
    overview = split_lines(members, table, sources.classes.names)
    warned = [f"Take care: {warning}" for warning in sources.warnings]
    for line in (*overview, *left_out, *sources.remarks, *sources.notes, *warned):
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
            tiles = cut_labelled_slides(
                *(config, sources, members, pool, interruption, card.context),
                labelled_input(model, card.inputs),
            )
            facts = facts_of_training(config, sources, members, [*tiles.train, *tiles.val])
        for line in (*class_lines(facts, sources.classes), *context_lines(tiles.train)):
            say(line)
        for warning in warnings_of(facts, sources.classes, config, ()):
            say(f"Take care: {warning}")
        if transport is None or transport.rank == 0:
            if not going_on and (run / CONFIG).exists():
                clear_run(run, asked.overwrite)
            _begin(run, config, members, plan, model, card)
        interruption.advice = f"Continue with: pathoseg train --resume --out {run}"
        task = make_task(config.model.task, sources.classes, config.tiles.min_cover)
        batch = config.train.microbatch or config.train.batch
        engine: Engine
        stop = interruption.is_asked
        if transport is None or plan is None:
            device = pick_device(config.parallel.device)
            whole = WholeModel(model.to(device), traced, config.seed, device, config.train.compile)
            engine = OneDevice(model, whole.forward, loss, task, card, config.train, stop)
        else:
            drawing = partial(draw_step, run, planned) if asked.trace else None
            engine = PipelineEngine(
                *(transport, plan, model, loss, task, card, config, drawing, stop, star)
            )
        loop = Trainer(
            run,
            config.train,
            engine,
            card,
            loss,
            training_set(config, tiles.train, sources.classes, readers),
            Validation(tiles.val, task, sources.classes, batch, readers),
            started,
            spent,
        )
        if longer:
            # The checkpoint first: killed in between, the run is finished still, and asked again.
            loop.prolong()
            if engine.leads:
                _prolong(run, config)
        if going_on and not loop.progress.step:
            say(f"{run} was stopped ahead of its first checkpoint: it begins again.")
        report = partial(_report, run, config, sources, members, facts, plan)

        def report_stop(at: Progress) -> None:
            if engine.leads:
                with suppress(OSError):  # the stop is what is to be told
                    write_run_report(report(at, is_finished=False))

        def leave() -> None:
            report_stop(loop.leave())
            spent.tell()

        interruption.leave = leave
        try:
            progress = loop.fit(interruption)
        except StoppedError:
            report_stop(loop.progress)
            raise
        except MemoryExhaustedError as error:
            error.run = run
            if transport is not None:
                leave_word(error, transport.rank)
            raise
    summary = {
        "epochs": progress.epoch,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "best_epoch": progress.best_epoch,
        "best_score": progress.score,
        "skipped_steps": progress.skipped_steps,
        "left_out": sources.left_out,
    }
    if engine.leads:
        write_run_report(report(progress, is_finished=True))
        finish_run(run, summary)
    if asked.trace and not (run / TIMELINE).exists():
        say("No step is drawn: the run had too few, as the first ones warm up.")
    kept = f"{'Last' if progress.score is None else 'Best'} epoch: {progress.best_epoch}"
    say(f"{kept}. Model: {run / 'model'}. Figures: {run / 'metrics.csv'}; to read: {run / PAGE}")
    return run


def _report(
    run: Path,
    config: Config,
    sources: LabelledSlides,
    members: Mapping[str, Member],
    facts: Sequence[SlideFacts],
    plan: Plan | None,
    progress: Progress,
    *,
    is_finished: bool,
) -> Run:
    """Return what the page of the run tells beside what is in the run's folder."""
    classes, by_name = sources.classes, {one.member.slide: one for one in facts}
    class_columns, class_rows = class_table(facts, classes)
    titles = ["Slide", "Split", "Patient", "µm/px", "Pixels", "Of interest", "Tiles"]
    slide_rows = []
    for name, member in sorted(members.items(), key=lambda item: (item[1].split, item[0])):
        cells = {"Slide": name, "Split": member.split}
        if name in by_name:
            cells = slide_cells(by_name[name], classes.names)
        cells["Patient"] = member.patient
        slide_rows.append([cells.get(title, "") for title in (*titles, *classes.names)])
    device, ranks = pick_device(config.parallel.device), 1 if plan is None else plan.ranks
    name = processor_name() if device.type == "cpu" else device_name(device)
    order = "" if plan is None or ranks == 1 else f": {plan.order}, {plan.stages} stages"
    if plan is not None and plan.shards > 1:
        order += f", {plan.shards} strips of each tile"
    going_on = f"It goes on with: pathoseg train --resume --out {run}"
    return Run(
        folder=run,
        classes=classes,
        unit="tiles" if config.model.task == "classify" else "pixels",
        state="It is finished." if is_finished else f"It was stopped before its end. {going_on}",
        best_epoch=progress.best_epoch,
        best_score=progress.score,
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


def _start(
    asked: _Asked, transport: ProcessTransport | None
) -> tuple[Path, Config, EarlierModel | EncoderWeights | None, bool, bool]:
    """Find the folder of a new run, not made yet, or of the run to go on with; rank 0 does.

    A run that never began is begun by `--resume` too.

    Returns:
        The folder; the options; what a new run starts from, if anything; whether a run goes on,
        and whether one that does is given other limits.
    """
    going_on, out = False, asked.out
    if transport is None or transport.rank == 0:
        out = named_run(asked.out) if asked.out else None
        if asked.resume:
            out = out or resumed_run(asked.flags)
        going_on = asked.resume and out is not None and (out / CONFIG).is_file()
        if not going_on:
            out = new_run(out, asked.overwrite)
    if transport is not None:
        told = json.loads(transport.gather(json.dumps([going_on, str(out)]))[0])
        going_on, out = told[0], Path(told[1])
    assert out is not None
    given = given_options(asked.config_file, asked.flags)
    if not going_on:
        config, earlier = load_config(asked.config_file, asked.flags), None
        if config.train.start_from is None:  # else the earlier model names the network
            config = with_low_rank(config)
        if config.model.encoder_weights is not None:
            encoder, config = take_encoder(config)
            agree_on(encoder.path, encoder.digest, transport)
            return out, config, encoder, False, False
        if config.train.start_from is not None:
            earlier = read_earlier(config.train.start_from, factory_of(config))
            agree_on(earlier.place, earlier.identity, transport)
            config = with_low_rank(take_options(config, given, earlier))
        return out, config, earlier, False, False
    recorded = load_config(out / CONFIG, unnumbered=UNNUMBERED)
    # What is left out goes on as it was, also where the earlier model had decided it.
    wanted = load_config(out / CONFIG, given, UNNUMBERED)
    recorded = moved_options(recorded, wanted)
    if wanted.model.name == recorded.model.name:
        # Options that the encoder's weights had decided.
        options = {**recorded.model.options, **wanted.model.options}
        wanted = replace(wanted, model=replace(wanted.model, options=options))
    train = with_limits(recorded, wanted).train
    refuse_changes(out, replace(recorded, train=train), wanted)
    if longer := train != recorded.train:
        check_limits(out, recorded.train, train)
        say(f"{out} goes on to {limits_text(train)} (before: {limits_text(recorded.train)}).")
    # A batch that was one microbatch stays one, on however many ranks, unless another is asked for.
    microbatch = wanted.train.microbatch or recorded.train.microbatch or recorded.train.batch
    train = replace(train, microbatch=microbatch)
    parallel = load_config(asked.config_file or out / CONFIG, asked.flags, recorded.format).parallel
    return out, replace(recorded, train=train, parallel=parallel), None, True, longer


def _begin(
    run: Path,
    config: Config,
    members: Mapping[str, Member],
    plan: Plan | None,
    model: torch.nn.Module,
    card: Bundle,
) -> None:
    """Make the run's folder, not before all input is read: what is refused leaves nothing."""
    exists = (run / CONFIG).exists()
    recorded = load_config(run / CONFIG, unnumbered=UNNUMBERED) if exists else None
    before, now = (
        each and (each.train.microbatch or each.train.batch) for each in (recorded, config)
    )
    if recorded is None:
        make_run(run)
        if takes_weights(config):
            save_bundle(run / START, model.state_dict(), card)
    elif before != now:
        say(
            f"Microbatches of {now}, not {before} as before: random layers draw other numbers, and "
            "batch norm, if there is one, sees so many tiles."
        )
    kept = moved_options(recorded, config) if recorded else config
    kept = kept if before == now else replace(kept, train=config.train)
    if kept != recorded:
        with replaced(run / CONFIG) as draft:
            write_config(kept, draft)
    if not (run / SPLITS).exists():  # a slide that is away for once keeps its place
        write_splits(run / SPLITS, members.values())
    if plan is not None:
        write_text(run / PLAN, plan.to_json())
        if plan.ranks == 1:
            say(f"One rank, by a plan: {run / PLAN}")
        else:
            stages = f"{plan.stages} stages" if plan.stages > 1 else "the whole model on each"
            groups = f"{plan.groups} groups" if plan.groups > 1 else "one group"
            cut = f", {plan.shards} strips of rows of each tile" if plan.shards > 1 else ""
            say(f"{plan.ranks} ranks: {plan.order}, {stages}, {groups}{cut}. {run / PLAN}")
        away = max(plan.host_memory)
        if away:
            say(f"A rank has up to {memory_text(away)} of activations in host memory.")
    say(f"Run: {run}")


def _recorded_classes(run: Path) -> ClassTable | None:
    """The classes that a run to go on with has learnt so far; None before its first model."""
    return class_table_of(load_card(run / "model")) if (run / "model" / CARD).is_file() else None


def _recorded_plan(run: Path) -> Plan | None:
    """The plan by which a run began; None where it had none, or one of another version."""
    try:
        return Plan.from_json((run / PLAN).read_text(encoding="utf-8"))
    except (OSError, PathosegError):
        return None


def _prolong(run: Path, config: Config) -> None:
    """Mark the run as unfinished, and record its new limits."""
    recorded = load_config(run / CONFIG, unnumbered=UNNUMBERED)
    reopen_run(run)
    with replaced(run / CONFIG) as draft:
        write_config(with_limits(recorded, config), draft)


def _card(
    config: Config,
    sources: LabelledSlides,
    members: Mapping[str, Member],
    model: torch.nn.Module,
    origin: Mapping[str, Any],
) -> Bundle:
    multiple = tile_multiple(model)
    overlap = config.infer.overlap
    if overlap is None:
        overlap = default_overlap(config.tiles.side, multiple, edge_reach(model))
    trained_on = [s for s in sources.usable if members[s.name].split == "train"]
    # Three digits: scans of one scanner differ in the fourth.
    mpps = {float(f"{source.frame.level0_mpp.mean:.3g}") for source in trained_on}
    return Bundle(
        model=config.model.with_classes(len(sources.classes)),
        class_names=sources.classes.names,
        class_colours=sources.classes.colours,
        mpp=config.tiles.mpp,
        tile=config.tiles.side,
        overlap=overlap,
        mean=config.model.mean or MEAN,
        std=config.model.std or STD,
        multiple=multiple,
        context=declared_inputs(model, config.tiles.mpp, config.tiles.side)[1:],
        stain=None if config.tiles.stain == "none" else {"method": config.tiles.stain},
        training={
            **origin,
            "slides": config.data.told_folders,
            "seed": config.seed,
            "slide_mpps": tuple(sorted(mpps)),
        },
    )
