"""The tile cache, filled ahead of training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pathoseg.config import Config
from pathoseg.config_file import load_config
from pathoseg.geometry import IMAGE, ModelInput
from pathoseg.interruption import Interruption
from pathoseg.models.model_options import HOOKNET
from pathoseg.platform_support import cores_to_use
from pathoseg.progress import progress_bar, say
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.cache import SHARD
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.time_spent import TimeSpent, time_told
from pathoseg.training.labelled_slides import LabelledSlides, find_labelled_slides, with_tile
from pathoseg.training.training_tiles import cut

DEFAULT = "tiles"


def fill_cache(
    config_file: Path | None, flags: Mapping[str, Mapping[str, Any]], verbose: bool = False
) -> Path:
    """Keep the pixels of all annotated slides of a folder that tiles of `train` can show.

    Args:
        config_file: TOML file, or None.
        flags: What overrules it, by table and key.
        verbose: Tell in the end where the time went.

    Returns:
        The cache's folder; name it as `[tiles] cache` of the training run.

    Raises:
        PathosegError: A slide or annotation cannot be read, or the disk is full.
        StoppedError: A signal came; what is there stays, and the same command goes on.
    """
    with time_told(verbose) as spent:
        return _fill(load_config(config_file, flags), spent)


def _fill(config: Config, spent: TimeSpent) -> Path:
    folder = config.tiles.cache or DEFAULT
    config = replace(config, tiles=replace(config.tiles, cache=folder, stain="none"))
    sources = find_labelled_slides(config)
    for line in sources.lines():
        say(line)
    config, context = _with_context(config, sources)
    pool = SlidePool(lambda path: open_slide(path, config.data.assume_mpp))
    with Interruption("Run the same command again to go on.") as interruption, closing(pool):
        for source in sources.usable:
            with spent.on("cutting tiles"):
                tiles = cut(config, source, sources, pool, config.tiles.overlap, context)
            names = (IMAGE, *tiles.ratios)
            count = sum(len(tiles.shards(name)) for name in names)
            with progress_bar(source.name, count, "shards") as bar:
                for name in names:
                    threads = config.train.readers or cores_to_use()
                    with closing(tiles.fill(threads, name=name)) as filled:
                        for _ in spent.waiting(filled, "reading slides and writing shards"):
                            bar.advance()
                            interruption.raise_if_asked()
            pixels = count * SHARD**2 / 1e6
            say(f"{source.name}: {len(tiles)} tiles, in shards of {pixels:.1f} megapixels")
            if damaged := tiles.count_damaged():
                say(
                    f"Take care: {source.name} is damaged: {damaged} of its tiles have pixels that "
                    "cannot be read, and are not learnt from."
                )
    for each in context:
        say(f"With the input `{each.name}` of {config.model.name}, at {each.mpp:g} µm per pixel.")
    say(
        f'The cache is in {folder}. Train from it with `cache = "{folder}"` under [tiles] and '
        f"--mpp {config.tiles.mpp:g}, with tiles of any size: what other tiles need beside it is "
        "added then."
    )
    return Path(folder)


def _with_context(config: Config, sources: LabelledSlides) -> tuple[Config, tuple[ModelInput, ...]]:
    """The configuration with a tile, and what the network sees beside it."""
    name = config.model.name
    if name != HOOKNET and not config.model.with_classes(2).is_factory:
        return with_tile(config, sources, multiple=1), ()
    from pathoseg.models.build import build_model, check_tile, declared_inputs, tile_multiple

    network = config.model.with_classes(max(2, len(sources.classes)))
    model = build_model(network, name if network.is_factory else None)
    config = with_tile(config, sources, tile_multiple(model))
    check_tile(model, config.tiles.side)
    return config, declared_inputs(model, config.tiles.mpp, config.tiles.side)[1:]
