"""The model and options of results: hashed in a slide's key, and compared before a folder is used.

`key_options` says which options a result depends on. `--resume` compares them by the hash in the
slide's key (slide_job.py); a call that would replace results of another model or of other options,
or stand beside them in one table, is refused by name (`refuse_other_results`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pathoseg.config import Config, TrainConfig
from pathoseg.errors import PathosegError
from pathoseg.inference.result_folder import (
    SUMMARY,
    Provenance,
    read_state,
    results,
    state_file,
)
from pathoseg.models.bundle_identity import bundle_id

# Options of [infer] and [tissue] that have been in a slide's key from the first.
_FIRST = {
    *("overlap", "margin", "batch", "simplify", "min_region_um2", "compress_regions"),
    *("region_type", "method", "threshold"),
}
_CHANGES_NOTHING = {"readers"}
_OF_SLIDE = "data.assume_mpp"  # says what a slide is, and nothing of other slides


def key_options(config: Config) -> dict[str, object]:
    """Return the options that a result depends on, as a slide's key has them.

    An option that came later is left out at its default, so that rows and results of the time
    before it are still found.
    """
    told: dict[str, object] = {
        "assume_mpp": config.data.assume_mpp,
        "tissue": _of_key(config.tissue),
        "infer": _of_key(config.infer),
    }
    if outputs := _of_key(config.outputs):
        told["outputs"] = outputs
    if config.train.amp != TrainConfig().amp:
        told["amp"] = config.train.amp
    return told


def _of_key(options: Any) -> dict[str, object]:
    return {
        option.name: value
        for option in fields(options)
        if option.name not in _CHANGES_NOTHING
        and ((value := getattr(options, option.name)) != option.default or option.name in _FIRST)
    }


def provenance_of(bundle: Path, config: Config) -> Provenance:
    """Return what results of a bundle with these options are made with.

    Raises:
        PathosegError: The bundle has no card.
    """
    return Provenance(bundle_id(bundle), str(bundle), _options(config))


def _options(config: Config) -> dict[str, str]:
    """Return the options of `key_options` under the names of the configuration, none left out."""
    tables: dict[str, Any] = {
        "tissue": config.tissue,
        "infer": config.infer,
        "outputs": config.outputs,
    }
    values: dict[str, object] = {_OF_SLIDE: config.data.assume_mpp, "train.amp": config.train.amp}
    for table, options in tables.items():
        for option in fields(options):
            if option.name not in _CHANGES_NOTHING:
                values[f"{table}.{option.name}"] = getattr(options, option.name)
    return {name: json.dumps(value) for name, value in values.items()}


def refuse_other_results(out: Path, ours: Provenance, folders: Collection[Path]) -> None:
    """Refuse a folder that holds results of another model or of other options.

    That is so for slides of other calls, too: `summary.csv` and the report list all of them. Of
    results of earlier versions, which did not write their options down, the model is compared.

    Args:
        out: The folder of the batch.
        ours: What this call makes results with.
        folders: Those of the results of this call's slides.

    Raises:
        PathosegError: It names the first result that differs, its file, and what differs.
    """
    for folder, summary in results(out).items():
        state = read_state(state_file(out, folder))
        theirs = None if state is None or state.status != "done" else state.provenance
        if theirs is None or theirs.model != summary.model:  # a later attempt's, which failed
            theirs = Provenance(summary.model, "", {})
            place = folder / SUMMARY
        else:
            place = state_file(out, folder)
        refuse_difference(out, place, theirs, ours, is_ours=folder in folders)


def refuse_difference(
    out: Path, place: Path, theirs: Provenance, ours: Provenance, *, is_ours: bool = True
) -> None:
    """Refuse if a result has another provenance than this call's.

    Args:
        out: The folder of the batch.
        place: The file that states `theirs`.
        theirs: Of the result that is there.
        ours: Of this call.
        is_ours: True if the result is of a slide of this call.

    Raises:
        PathosegError: As `refuse_other_results`.
    """
    hint = "Give another --out, or add --overwrite: a result is then replaced by its new one when "
    hint += "that is whole" + ("." if is_ours else ", and those of other slides stay beside it.")
    if theirs.model != ours.model:
        before = f"{theirs.bundle}, {theirs.model}" if theirs.bundle else theirs.model
        raise PathosegError(
            f"{out} holds results of another model: {place} is by {before}, and this call is by "
            f"{ours.bundle}, {ours.model}.",
            hint,
        )
    if changed := list(_changed(theirs.options, ours.options, is_ours=is_ours)):
        raise PathosegError(
            f"{out} holds results of other options: {place} has {'; '.join(changed)} in this call.",
            hint,
        )


def _changed(before: Mapping[str, str], now: Mapping[str, str], *, is_ours: bool) -> Iterator[str]:
    """Yield each option that differs, as `table.key = OLD, which is NEW`.

    An option that the result did not record counts as its default; where it recorded none at all,
    nothing differs.
    """
    defaults = _options(Config())
    for name, value in now.items():
        old = before.get(name, defaults[name]) if before else value
        if old != value and (is_ours or name != _OF_SLIDE):
            yield f"{name} = {_shown(old)}, which is {_shown(value)}"


def _shown(value: str) -> str:
    return "none" if value == "null" else value
