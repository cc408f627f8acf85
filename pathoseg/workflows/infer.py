"""Segments slides, one result folder each; a slide that fails stops no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pathoseg.errors import PathosegError
from pathoseg.outputs.report import (
    Summary,
    read_failures,
    read_summary,
    write_failures,
    write_summary_table,
)
from pathoseg.slides.folder import slides_in
from pathoseg.workflows.config import load_config
from pathoseg.workflows.interruption import Interruption
from pathoseg.workflows.progress import say
from pathoseg.workflows.publish import publish
from pathoseg.workflows.results import SUMMARY, result_folder, result_folders
from pathoseg.workflows.runs import bundle_of
from pathoseg.workflows.segment import load_segmenter

TABLE = "summary.csv"
FAILURES = "failures.csv"


def infer(
    inputs: Sequence[Path],
    model: Path | None,
    out: Path,
    config_file: Path | None,
    flags: Mapping[str, Mapping[str, Any]],
    resume: bool,
    factory: str | None,
) -> int:
    """Segments every slide of `inputs` (slides, or folders of slides) into `out`.

    Returns:
        How many slides of several failed; each stands in `out/failures.csv`.

    Raises:
        PathosegError: The model or the only slide cannot be used, or an input is missing.
        StoppedError: A signal came; finished slides are kept.
    """
    config = load_config(config_file, flags)
    slides = _slides(inputs)
    folders = result_folders(out, slides)
    segmenter = load_segmenter(bundle_of(model), config, factory)
    summaries, failures = _earlier(out)
    failed = 0
    advice = f"What is done is in {out}. Go on with the same command and --resume."
    with Interruption(advice) as interruption:
        for slide, folder in folders.items():
            before = summaries.get(folder)
            if resume and before is not None and before.model == segmenter.model_id:
                say(f"{slide.name}: already done, in {folder}")
                continue
            try:
                with result_folder(folder) as partial:
                    publish(slide, partial, segmenter, config, interruption)
            except PathosegError as error:
                if len(slides) == 1:
                    raise
                failures[slide.name] = error
                failed += 1
                say(f"{slide.name}: failed. {error.problem} {error.mend}")
            else:
                summaries[folder] = read_summary(folder / SUMMARY)
                failures.pop(slide.name, None)
                say(f"{slide.name}: done, in {folder}")
            _write_tables(out, summaries, failures)
            interruption.raise_if_asked()
    _write_tables(out, summaries, failures)
    say(f"{len(slides) - failed} of {len(slides)} slides done. Areas: {out / TABLE}")
    return failed


def _earlier(out: Path) -> tuple[dict[Path, Summary], dict[str, PathosegError]]:
    """Results and failures of earlier calls, which stay in the tables."""
    summaries = {}
    for path in sorted(out.glob(f"[!.]*/{SUMMARY}")):
        with suppress(PathosegError):  # a folder of something else
            summaries[path.parent] = read_summary(path)
    return summaries, read_failures(out / FAILURES)


def _slides(inputs: Sequence[Path]) -> list[Path]:
    """The slides that the arguments name, each once."""
    slides = dict[Path, None]()
    for path in inputs:
        for slide in slides_in(path) if path.is_dir() else [path]:
            slides[slide] = None
    return list(slides)


def _write_tables(
    out: Path, summaries: Mapping[Path, Summary], failures: Mapping[str, PathosegError]
) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_summary_table(out / TABLE, summaries.values())
        write_failures(out / FAILURES, failures)
    except OSError as error:
        raise PathosegError(
            f"The tables in {out} cannot be written ({error.strerror}).",
            "Free space there or give --out another disk, then run again with --resume.",
        ) from error
