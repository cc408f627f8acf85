"""Fills the tile cache ahead of training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pathoseg.config import load_config
from pathoseg.interruption import Interruption
from pathoseg.progress import progress_bar, say
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.training.labelled_slides import cut, find_labelled_slides

DEFAULT = "tiles"


def fill_cache(config_file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> Path:
    """Cuts all annotated slides of a folder into the tiles that `train` will read.

    Returns:
        The cache's folder; name it as `[tiles] cache` of the training run.

    Raises:
        PathosegError: A slide or annotation cannot be read, or the disk is full.
        StoppedError: A signal came; what is there stays, and the same command goes on.
    """
    config = load_config(config_file, flags)
    folder = config.tiles.cache or DEFAULT
    config = replace(config, tiles=replace(config.tiles, cache=folder, stain="none"))
    sources = find_labelled_slides(config)
    for name, reason in sources.left_out.items():
        say(f"Left out: {name}: {reason}")
    for note in sources.notes:
        say(note)
    pool = SlidePool(lambda path: open_slide(path, config.data.assume_mpp))
    with Interruption("Run the same command again to go on.") as interruption, closing(pool):
        for source in sources.usable:
            tiles = cut(config, source, sources, pool, config.tiles.overlap)
            with (
                progress_bar(source.slide.name, len(tiles), "tiles") as bar,
                closing(tiles.fill(config.train.readers)) as filled,
            ):
                for count in filled:
                    bar.advance(count)
                    interruption.raise_if_asked()
            say(f"{source.slide.name}: {len(tiles)} tiles")
    say(
        f'The cache is in {folder}. Train from it with `cache = "{folder}"` under [tiles], '
        f"--mpp {config.tiles.mpp:g} and --tile {config.tiles.tile}: for others tiles are cut anew."
    )
    return Path(folder)
