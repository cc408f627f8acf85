"""The start of a training run: its folder and its options, of a new one or one that goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.config_file import UNNUMBERED, given_options, load_config, write_config
from pathoseg.errors import PathosegError, first_names
from pathoseg.inference.leases import BEAT, LEASE, LeaseFile, Leases, read_lease
from pathoseg.inference.segmenter import class_table_of
from pathoseg.memory_size import memory_text
from pathoseg.models.bundle import Bundle, load_card, save_bundle
from pathoseg.models.bundle_identity import CARD
from pathoseg.models.encoder_weights import EncoderWeights
from pathoseg.outputs.atomic import replaced, write_text
from pathoseg.parallel.comm.process_transport import ProcessTransport
from pathoseg.parallel.planning.plan import Plan
from pathoseg.progress import say
from pathoseg.training.distributed import agree_on
from pathoseg.training.earlier_model import EarlierModel, read_earlier, take_options
from pathoseg.training.encoder_training import with_low_rank
from pathoseg.training.first_weights import factory_of, take_encoder, takes_weights
from pathoseg.training.run_folder import (
    CONFIG,
    PLAN,
    SPLITS,
    START,
    is_finished,
    make_run,
    moved_options,
    named_run,
    new_run,
    refuse_changes,
    reopen_run,
    with_limits,
)
from pathoseg.training.splits import Member, changed_annotations, write_splits
from pathoseg.training.trainer import check_limits, limits_text
from pathoseg.workflows.early_checks import TrainingArguments, resumed_run

_LEASE = ".lease"  # of the process that trains, in the run's folder
_LOOK = 0.2  # seconds between two looks at it


@dataclass(frozen=True)
class StartedRun:
    """A run that is to begin or to go on.

    Attributes:
        folder: Its folder, which a new run has not made yet.
        config: The options.
        start_from: The weights that a new run starts from; None where they are drawn, and where a
            run goes on.
        is_resumed: Whether it goes on.
        is_longer: Whether it goes on with other limits.
    """

    folder: Path
    config: Config
    start_from: EarlierModel | EncoderWeights | None = None
    is_resumed: bool = False
    is_longer: bool = False

    @property
    def is_over(self) -> bool:
        """True if nothing is left to train."""
        return self.is_resumed and is_finished(self.folder) and not self.is_longer

    @property
    def splits(self) -> Path | None:
        """The table of the slides and splits that a run began with; None where there is none."""
        table = self.folder / SPLITS
        return table if self.is_resumed and table.is_file() else None

    @property
    def classes(self) -> ClassTable | None:
        """The classes that a run has learnt so far; None before its first model."""
        bundle = self.folder / "model"
        is_there = self.is_resumed and (bundle / CARD).is_file()
        return class_table_of(load_card(bundle)) if is_there else None

    @property
    def plan(self) -> Plan | None:
        """The plan by which a run began; None where it had none, or one of another version."""
        if not self.is_resumed:
            return None
        try:
            return Plan.from_json((self.folder / PLAN).read_text(encoding="utf-8"))
        except (OSError, PathosegError):
            return None


def start_run(asked: TrainingArguments, transport: ProcessTransport | None) -> StartedRun:
    """Find the folder of a new run, not made yet, or of the run to go on with; rank 0 does.

    A run that never began is begun by `--resume` too.

    Raises:
        PathosegError: The folder, an option, or the weights to start from cannot be used.
    """
    is_resumed, folder = False, asked.out
    if transport is None or transport.rank == 0:
        folder = named_run(asked.out) if asked.out else None
        if asked.resume:
            folder = folder or resumed_run(asked.flags)
        is_resumed = asked.resume and folder is not None and (folder / CONFIG).is_file()
        if not is_resumed:
            folder = new_run(folder, asked.overwrite)
    if transport is not None:
        told = json.loads(transport.gather(json.dumps([is_resumed, str(folder)]))[0])
        is_resumed, folder = told[0], Path(told[1])
    assert folder is not None
    return _resumed(folder, asked) if is_resumed else _new(folder, asked, transport)


def _new(folder: Path, asked: TrainingArguments, transport: ProcessTransport | None) -> StartedRun:
    config = load_config(asked.config_file, asked.flags)
    if folder.resolve() in [slides.resolve() for slides in config.data.slide_folders]:
        raise PathosegError(
            f"{folder} is the folder of the slides: the run's pictures would be taken for slides.",
            "Give --out another folder; one inside of that of the slides will do.",
        )
    name = config.train.start_from
    if name is None:  # else the earlier model names the network
        config = with_low_rank(config)
    if config.model.encoder_weights is not None:
        encoder, config = take_encoder(config)
        agree_on(encoder.path, encoder.digest, transport)
        return StartedRun(folder, config, encoder)
    if name is None:
        return StartedRun(folder, config)
    earlier = read_earlier(name, factory_of(config))
    earlier = replace(earlier, renamed=_renamed(earlier.place.parent / CONFIG))
    agree_on(earlier.place, earlier.identity, transport)
    given = given_options(asked.config_file, asked.flags)
    return StartedRun(folder, with_low_rank(take_options(config, given, earlier)), earlier)


def _renamed(record: Path) -> Mapping[str, str]:
    """Return `[annotations] rename` of a run's config.toml; empty where none can be read."""
    if not record.is_file():
        return {}
    with suppress(PathosegError):  # a newer version's
        return load_config(record, unnumbered=UNNUMBERED).annotations.rename
    return {}


def _resumed(folder: Path, asked: TrainingArguments) -> StartedRun:
    given = given_options(asked.config_file, asked.flags)
    recorded = load_config(folder / CONFIG, unnumbered=UNNUMBERED)
    # What is left out goes on as it was, also where the earlier model had decided it.
    wanted = load_config(folder / CONFIG, given, UNNUMBERED)
    recorded = moved_options(recorded, wanted)
    if wanted.model.name == recorded.model.name:
        # Options that the encoder's weights had decided.
        options = {**recorded.model.options, **wanted.model.options}
        wanted = replace(wanted, model=replace(wanted.model, options=options))
    train = with_limits(recorded, wanted).train
    refuse_changes(folder, replace(recorded, train=train), wanted)
    if longer := train != recorded.train:
        check_limits(folder, recorded.train, train)
        say(f"{folder} goes on to {limits_text(train)} (before: {limits_text(recorded.train)}).")
    # A batch that was one microbatch stays one, on however many ranks, unless another is asked for.
    microbatch = wanted.train.microbatch or recorded.train.microbatch or recorded.train.batch
    train = replace(train, microbatch=microbatch)
    file = asked.config_file or folder / CONFIG
    parallel = load_config(file, asked.flags, recorded.format).parallel
    config = replace(recorded, train=train, parallel=parallel)
    return StartedRun(folder, config, is_resumed=True, is_longer=longer)


@contextmanager
def run_held(folder: Path) -> Iterator[None]:
    """Make a context in which no other process trains into a run's folder; rank 0 does.

    A process of another machine that has just ended, or was killed, is waited for until its lease
    is over; one that lives gives a sign of life meanwhile.

    Args:
        folder: Made where it is missing.

    Raises:
        PathosegError: A living process trains into it, on this machine or on another.
        OSError: The folder cannot be made or written.
    """
    with Leases(folder) as leases:
        lease = folder / _LEASE
        first, began, is_told = read_lease(lease), time.monotonic(), False
        while not leases.take(lease):
            found = read_lease(lease)
            if first and found and found != first:
                raise PathosegError(
                    f"{folder} is in training already, by {_owner(found)}.",
                    "Wait for its end or stop it, or give this run an --out of its own.",
                )
            first = first or found
            if first and not is_told and time.monotonic() - began > BEAT:  # it would have beaten
                say(
                    f"{folder} was in training by {_owner(first)}, which gives no sign of life: "
                    f"waiting {LEASE:.0f} s until its lease is over."
                )
                is_told = True
            time.sleep(_LOOK)
        yield


def _owner(lease: LeaseFile) -> str:
    with suppress(ValueError, LookupError, TypeError):  # it is being written
        told = json.loads(lease.text)
        return f"process {told['pid']} of {told['host']}"
    return "another process"


def begin_run(
    run: Path,
    config: Config,
    members: Mapping[str, Member],
    annotations: Mapping[str, str],
    plan: Plan | None,
    model: torch.nn.Module,
    card: Bundle,
) -> None:
    """Make the run's folder, not before all input is read: what is refused leaves nothing.

    Args:
        run: The folder; of a run that goes on, what has changed is recorded.
        config: The options.
        members: The splits.
        annotations: Slide name → hash of its annotation.
        plan: The plan of the ranks, if there is one.
        model: With the weights that the run begins with.
        card: The bundle's.
    """
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
    if before != now:  # new limits are recorded once the checkpoint has them
        kept = replace(kept, train=replace(kept.train, microbatch=config.train.microbatch))
    if kept != recorded:
        with replaced(run / CONFIG) as draft:
            write_config(kept, draft)
    if not (run / SPLITS).exists():  # a slide that is away for once keeps its place
        write_splits(run / SPLITS, members.values(), annotations)
    elif changed := changed_annotations(run / SPLITS, annotations):
        say(
            "Take care: annotations have changed since the run began, which goes on with them as "
            f"they are now: those of {first_names(changed)}."
        )
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


def prolong_run(run: Path, config: Config) -> None:
    """Mark the run as unfinished, and record its new limits."""
    recorded = load_config(run / CONFIG, unnumbered=UNNUMBERED)
    reopen_run(run)
    with replaced(run / CONFIG) as draft:
        write_config(with_limits(recorded, config), draft)
