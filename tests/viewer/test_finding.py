"""Finding slides with their results and annotations."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pathoseg.errors import PathosegError
from pathoseg.inference.result_folder import State, state_file, write_state
from pathoseg.viewer.finding import find_entries
from pathoseg.workflows import infer
from tests.viewer.conftest import Place, Served


def test_a_slide_and_its_result_are_one(place: Place) -> None:
    results, slides = place.folder / "results", place.folder / "slides"
    entries = find_entries([results, slides])
    assert [entry.name for entry in entries] == ["a.svs", "b.svs", "c.svs"]
    assert [entry.result is not None for entry in entries] == [True, True, False]
    assert [entry.annotation is not None for entry in entries] == [False, True, False]
    assert [entry.status for entry in entries] == ["done", "done", ""]
    only = find_entries([results / "b"])  # one result
    assert [(entry.name, entry.slide) for entry in only] == [("b.svs", slides / "b.svs")]
    alone = find_entries([slides / "a.svs", results / "b"])
    assert {entry.name for entry in alone} == {"a.svs", "b.svs"}


def _entry(path: Path) -> dict[Path | None, str]:
    return {entry.slide: entry.name for entry in find_entries([path])}


@pytest.mark.parametrize("find", [_entry, lambda path: infer._slides([path], None)])
def test_a_slide_may_be_the_folder_one_is_in(
    find: Callable[[Path], dict[Path | None, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `view` and for `infer`."""
    slide = tmp_path / "a.ome.zarr"
    (slide / "0").mkdir(parents=True)
    (slide / "zarr.json").write_text('{"attributes": {"ome": {"multiscales": []}}}')
    for here, given in ((slide, Path()), (slide / "0", Path(".."))):
        monkeypatch.chdir(here)
        assert find(given) == {slide: "a.ome.zarr"}


def test_a_batch_that_is_under_way(own_place: Place) -> None:
    out, slides = own_place.folder / "results", own_place.folder / "slides"
    begun = State(str(slides / "c.svs"), "begun", "key", 1, "host")
    failed = State("gone.svs", "failed", "key", 1, "host", problem="It is bad.", hint="Mend it.")
    write_state(state_file(out, out / "c"), begun)
    write_state(state_file(out, out / "gone"), failed)
    with (out / "a" / "mask.ome.tiff").open("ab") as file:
        file.write(b"x")  # not as long as its state says
    (out / "b" / "mask.ome.tiff").unlink()
    entries = {entry.name: entry for entry in find_entries([out])}
    assert {name: entry.status for name, entry in entries.items()} == {
        "a.svs": "cut short", "b.svs": "cut short", "c.svs": "begun", "gone.svs": "failed",
    }  # fmt: skip
    assert entries["c.svs"].slide == slides / "c.svs"
    assert entries["gone.svs"].problem == "It is bad. Mend it."
    assert "--resume" in entries["a.svs"].problem


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("a/summary.json", {"tissue_mm2": math.nan}),
        ("a/summary.json", {"unread_pixels": "x"}),
        ("a/summary.json", {"slide": 5}),
        ("a/summary.json", {"classes": {}}),
        ("a/summary.json", {"mpp": {"x": 1.0, "y": -1.0}}),
        ("a/summary.json", {"warnings": [1]}),
        ("states/a.json", {"slide": 5}),
        ("states/a.json", {"outputs": []}),
        ("states/a.json", {"outputs": {"mask.ome.tiff": None}}),
        ("states/a.json", {"seconds": 5}),
    ],
)
def test_a_file_of_other_types_harms_its_slide_alone(
    own_place: Place, served: Served, file: str, wrong: dict[str, object]
) -> None:
    out = own_place.folder / "results"
    written = json.loads((out / file).read_text())
    (out / file).write_text(json.dumps({**written, **wrong}))
    answer = served(out)[0].get("/api/slides")
    assert answer.status_code == 200
    first, second = answer.json()
    assert (first["name"] in ("a", "a.svs"), second["name"]) == (True, "b.svs")
    assert second["status"] == "done"
    if "summary" in file:
        assert first["status"] == "cut short"
        assert str(out / file) in first["problem"]


def test_slides_that_moved_are_found_by_name(own_place: Place) -> None:
    moved = own_place.folder / "new" / "deeper"
    shutil.move(own_place.folder / "slides", moved)
    lost = find_entries([own_place.folder / "results"])
    assert [entry.slide for entry in lost] == [None, None]
    assert all("--slides DIR" in entry.problem for entry in lost)
    found = find_entries([own_place.folder / "results"], [own_place.folder / "new"])
    assert [entry.slide for entry in found] == [moved / "a.svs", moved / "b.svs"]
    assert not any(entry.problem for entry in found)
    assert found[1].annotation == moved / "b.geojson"


def test_slides_of_one_name_are_told_apart(own_place: Place) -> None:
    other = own_place.folder / "other"
    shutil.copytree(own_place.folder / "slides", other)
    shutil.copytree(own_place.folder / "results", own_place.folder / "again")
    entries = find_entries([own_place.folder / "results", own_place.folder / "again"])
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names) == 4


def test_slides_of_one_name_in_two_folders_are_both_shown(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "HE.png")
    entries = find_entries([tmp_path / "a", tmp_path / "b"])
    assert {entry.slide for entry in entries} == {*tmp_path.glob("*/HE.png")}
    assert len({entry.name for entry in entries}) == 2


def test_slides_are_shown_beside_results_and_whatever_is_called_summary(own_place: Place) -> None:
    folder = own_place.folder
    project = folder / "data" / "1"  # of QuPath
    project.mkdir(parents=True)
    for name in ("summary.json", "server.json"):
        (project / name).write_text("{}")
    Image.new("RGB", (8, 8)).save(project / "thumbnail.jpg")
    (folder / "slides" / "summary.json").write_text('{"slides": 3}')
    entries = find_entries([folder])
    assert [(entry.name, entry.result is not None) for entry in entries] == [
        ("a.svs", True), ("b.svs", True), ("slides/c.svs", False),
    ]  # fmt: skip
    shutil.rmtree(folder / "results")
    assert len(find_entries([folder])) == 3
    (folder / "cut" / "states").mkdir(parents=True)
    write_state(folder / "cut/states/x.json", State("x.svs", "done", "key", 1, "host"))
    (folder / "cut" / "x").mkdir()
    (folder / "cut" / "x" / "summary.json").write_text("{")  # a result by its state alone
    assert [entry.status for entry in find_entries([folder])] == ["cut short", "", "", ""]


def test_a_slide_is_that_of_its_result_before_one_of_its_name(
    own_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = own_place.folder / "results", Path("slides/a.svs")
    elsewhere = own_place.folder / "elsewhere"  # another project, from which results are viewed
    shutil.copytree(own_place.folder / "slides", elsewhere / "slides")
    monkeypatch.chdir(elsewhere)
    place = state_file(out, out / "a")
    for absolute in (str(own_place.folder / file), ""):  # states of earlier versions have none
        state = State(str(file), "done", "key", 1, "host", place=absolute)
        write_state(place, state)
        assert find_entries([out / "a"])[0].slide == own_place.folder / file
    (own_place.folder / file).unlink()
    assert find_entries([out / "a"])[0].slide == file


def test_a_file_is_the_slide_of_one_result_alone(own_place: Place) -> None:
    out, moved = own_place.folder / "results", own_place.folder / "new" / "deeper"
    shutil.move(own_place.folder / "slides", moved)
    gone = State("/gone/x/a.svs", "failed", "key", 1, "host", place="/gone/x/a.svs")
    write_state(state_file(out, out / "x" / "a"), gone)
    found = find_entries([out], [own_place.folder / "new"])
    assert {entry.name: entry.slide for entry in found} == {
        "a.svs": None, "b.svs": moved / "b.svs", "x/a.svs": None,
    }  # fmt: skip


def test_annotations_of_the_folder_that_was_given(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    for folder in ("a", "b"):
        for where in (tmp_path / folder / "x", drawn / "x"):
            where.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "x" / "HE.png")
        (tmp_path / folder / "x" / "HE.geojson").write_text("{}")
    (drawn / "x" / "HE.geojson").write_text("{}")
    first, second = find_entries([tmp_path / "a", tmp_path / "b"], annotations=drawn)
    assert first.annotation == drawn / "x" / "HE.geojson"  # though slides go by their paths
    assert second.annotation is None  # it is of another slide
    assert "annotation of both" in second.problem
    beside = find_entries([tmp_path / "a", tmp_path / "b"])
    assert [entry.annotation for entry in beside] == [
        tmp_path / folder / "x" / "HE.geojson" for folder in "ab"
    ]


def test_masks_of_the_annotations_folder_are_no_slides(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    for folder in (tmp_path, drawn):
        Image.new("L", (8, 8)).save(folder / "a.png")
    [entry] = find_entries([tmp_path], annotations=drawn)
    assert entry.slide == tmp_path / "a.png"


def test_slides_that_two_batches_lost_are_told_apart(tmp_path: Path) -> None:
    for batch in "ab":
        out = tmp_path / batch
        failed = State("gone.svs", "failed", "key", 1, "host", problem="It is bad.")
        write_state(state_file(out, out / "gone"), failed)
    entries = find_entries([tmp_path / "a", tmp_path / "b"])
    assert [entry.name for entry in entries] == [str(tmp_path / name / "gone.svs") for name in "ab"]


def test_what_holds_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(PathosegError) as refused:
            find_entries([path])
        assert str(path) in refused.value.problem
