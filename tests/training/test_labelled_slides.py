"""From files to a batch of the task `objects`, and annotations that tell no objects apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pathoseg.annotations.annotation import ClassTable
from pathoseg.config import Config
from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError
from pathoseg.geometry import Size
from pathoseg.interruption import Interruption
from pathoseg.slides.slide import open_slide
from pathoseg.tiles.slide_pool import SlidePool
from pathoseg.training.labelled_slides import (
    annotation_digests,
    classes_held,
    find_labelled_slides,
    read_slides,
)
from pathoseg.training.slide_facts import class_lines, facts_of_training, slide_facts
from pathoseg.training.splits import Member
from pathoseg.training.training_tiles import cut, cut_labelled_slides, training_set
from tests.conftest import draw_disc

QUPATH = """{"type": "FeatureCollection", "features": [%s]}"""
BOX = """{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[%d, %d], [%d, %d],
[%d, %d], [%d, %d]]]}, "properties": {"classification": {"name": "class 1", "color": [1, 2, 3]}}}"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Two slides with 16 cells each that touch: a mask numbers them, and outlines."""
    rng = np.random.default_rng(0)
    for name in "ab":
        image = rng.integers(0, 200, (128, 128, 3)).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / f"{name}.png")
    y, x = np.mgrid[:128, :128] // 16
    cells = np.where((y < 4) & (x < 4), 1 + 4 * y + x, 0).astype(np.uint16)
    Image.fromarray(cells).save(tmp_path / "a_mask.png")
    Image.fromarray((cells > 0).astype(np.uint8)).save(tmp_path / "a_classes.png")  # is no slide
    sides = [(16 * x, 16 * y, 16 * x + 16, 16 * y + 16) for y in range(4) for x in range(4)]
    boxes = [BOX % (x0, y0, x1, y0, x1, y1, x0, y1) for x0, y0, x1, y1 in sides]
    (tmp_path / "b.geojson").write_text(QUPATH % ",".join(boxes))
    flags = {
        "data": {"slides": str(tmp_path), "assume_mpp": 0.5},
        "annotations": {"mask": "instances"},
        "model": {"task": "objects"},
        "tiles": {"tile": 128, "mpp": 0.5, "offsets": "grid"},
        "train": {"batch": 2},
        "augment": {"warp": 1.0},
    }
    return load_config(None, flags)


def test_objects_come_from_masks_and_outlines_to_a_batch(config: Config) -> None:
    sources = find_labelled_slides(config)
    assert [one.name for one in sources.usable] == ["a.png", "b.png"]
    assert sources.classes.names == ("class 1",)
    members = {one.name: Member(one.name, one.name, "train") for one in sources.usable}
    pool = SlidePool(lambda path: open_slide(path, 0.5))
    with Interruption("") as interruption:
        tiles = cut_labelled_slides(config, sources, members, pool, interruption).train
    for one in tiles:
        tile = one.read(0)
        assert tile.objects is not None
        cells = tile.objects[:64, :64].reshape(4, 16, 4, 16)
        assert (cells == cells[:, :1, :, :1]).all()
        assert len(np.unique(cells)) == 4, "four meet in a corner"
        assert not tile.objects[64:].any()
        assert not tile.objects[:, 64:].any()
    (batch,) = training_set(config, tiles, sources.classes, 1).batches(0)
    assert batch.objects is not None
    assert batch.objects.shape == batch.masks.shape == (2, 128, 128)
    assert ((batch.objects == 255) == (batch.masks == 255)).all()
    assert ((batch.objects == 0) == (batch.masks == 0)).all()
    pool.close()
    facts = [slide_facts(members[one.slide.name], one, config, one.frame.size) for one in tiles]
    assert "2 tiles, 0.002048 mm², 32 objects" in next(class_lines(facts, sources.classes))


def test_no_stain_is_fitted_on_a_slide_of_which_no_tile_is_cut(tmp_path: Path) -> None:
    Image.new("RGB", (65, 63), (255, 255, 255)).save(tmp_path / "blank.png")
    (tmp_path / "blank.geojson").write_text(QUPATH % "")
    draw_disc(tmp_path / "a.png", 0)
    flags = {
        "data": {"slides": str(tmp_path), "assume_mpp": 0.25},
        "tiles": {"tile": 32, "mpp": 0.5, "stain": "macenko"},
    }
    config = load_config(None, flags)
    sources = find_labelled_slides(config)
    [blank] = [one for one in sources.usable if one.name == "blank.png"]
    tiles = cut(config, blank, sources, SlidePool(lambda path: open_slide(path, 0.25)), 0)
    assert len(tiles) == 0
    assert tiles.stain is None
    members = {"blank.png": Member("blank.png", "blank.png", "train")}
    [facts] = facts_of_training(config, sources, members, [tiles])
    assert facts.size == Size(65, 63), "not that of the frame, times two"


def test_masks_of_classes_are_bad_slides_of_the_task(config: Config, tmp_path: Path) -> None:
    flags = {
        "data": {"slides": str(tmp_path), "assume_mpp": 0.5},
        "annotations": {"mask": "binary"},
        "model": {"task": "objects"},
    }
    with pytest.raises(PathosegError, match=r"a_mask\.png is read as .*which object") as refused:
        read_slides(load_config(None, flags), skip_bad=False)
    assert 'mask = "instances"' in refused.value.hint
    read = read_slides(load_config(None, flags))
    assert list(read.bad) == ["a.png"]
    assert [one.name for one in read.usable] == ["b.png"]
    flags["model"]["task"] = "segment"
    assert len(read_slides(load_config(None, flags)).usable) == 2


def test_a_slide_holds_the_classes_of_its_regions_of_interest(tmp_path: Path) -> None:
    draw_disc(tmp_path / "a.png", 0)  # with a mask, of which all counts
    Image.new("RGB", (96, 96)).save(tmp_path / "b.png")
    inside, outside = ((x, 0, x + 8, 0, x + 8, 8, x, 8) for x in (0, 64))
    roi = (BOX % (0, 0, 32, 0, 32, 32, 0, 32)).replace("class 1", "ROI")
    features = [BOX % inside, (BOX % outside).replace("class 1", "far"), roi]
    (tmp_path / "b.geojson").write_text(QUPATH % ",".join(features))
    flags = {"data": {"slides": str(tmp_path), "assume_mpp": 0.5}}
    sources = find_labelled_slides(load_config(None, flags))
    assert classes_held(sources) == {"a.png": ["class 1"], "b.png": ["class 1"]}
    before = annotation_digests(sources)
    (tmp_path / "b.geojson").write_text(QUPATH % features[0])
    after = annotation_digests(sources)
    assert [before[name] == after[name] for name in ("a.png", "b.png")] == [True, False]


def test_a_recorded_class_called_background_is_kept(config: Config) -> None:
    """The classes of a model from before such a name was refused in `[data] classes`."""
    old = ClassTable(("Background", "class 1"), ((1, 0, 0), (2, 0, 0)))
    config = replace(config, data=replace(config.data, classes=old.names))
    assert find_labelled_slides(config, old).classes == old
    with pytest.raises(PathosegError, match='class "Background"; background is index 0'):
        find_labelled_slides(config)


@pytest.mark.parametrize("name", ["mean", "all"])
def test_a_new_class_named_as_figures_of_all_is_refused(config: Config, name: str) -> None:
    rename = {"class 1": name}
    config = replace(config, annotations=replace(config.annotations, rename=rename))
    with pytest.raises(PathosegError, match=f'called "{name}", as figures of all') as refused:
        find_labelled_slides(config)
    assert f'rename = {{ "{name}" = ' in refused.value.hint
    old = ClassTable((name,), ((1, 0, 0),))
    assert find_labelled_slides(config, old).classes == old
