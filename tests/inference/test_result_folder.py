"""The folder of a batch: what the end of a process clears away, and what it leaves to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pathoseg.errors import PathosegError
from pathoseg.geometry import Mpp
from pathoseg.inference.result_folder import (
    MASK,
    SUMMARY,
    State,
    put_back,
    refuse_strangers,
    result_folder,
    result_folders,
    results,
    state_file,
    stored_bytes,
    sweep,
    write_state,
)
from pathoseg.outputs import atomic
from pathoseg.outputs.report import Summary, TileCounts, write_summary


def test_a_sweep_takes_empty_folders_and_leaves_those_of_slides_in_use(tmp_path: Path) -> None:
    work = tmp_path / ".work"
    for name in ("a/b/done", "m/used/key", "m/used/new-1", "m/stopped/key", "m/none", "z/none"):
        (work / name).mkdir(parents=True)
    (work / "m" / "used" / "claim").touch()
    (work / "m" / "stopped" / "key" / "0.row").touch()
    sweep(tmp_path)
    left = {folder.relative_to(work).as_posix() for folder in work.glob("**/")}
    used, stopped = {"m/used", "m/used/key", "m/used/new-1"}, {"m/stopped", "m/stopped/key"}
    assert left == {".", "m"} | used | stopped
    (work / "m" / "used" / "claim").unlink()
    (work / "m" / "stopped" / "key" / "0.row").unlink()
    sweep(tmp_path)
    assert not work.exists()
    sweep(tmp_path)


EMPTY = Summary("s", "m", Mpp(0.5, 0.5), 0.0, (), TileCounts(0, 0, 0), 0, {}, {})


def test_the_bytes_of_a_folder_are_those_of_all_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "m" / "c" / "0").mkdir(parents=True)
    (tmp_path / "m" / "c" / "0" / "0").write_bytes(b"123")
    (tmp_path / "m" / ".hidden").write_bytes(b"4567")
    state = State("s", "done", "", 1, "", outputs={"m": 7})
    assert state.is_whole(tmp_path)
    (tmp_path / "m" / "c" / "0" / "0").unlink()
    assert not state.is_whole(tmp_path)
    with pytest.raises(FileNotFoundError):
        stored_bytes(tmp_path / "none")
    assert not State("s", "done", "", 1, "", outputs={"none": 0}).is_whole(tmp_path)


def _begin(out: Path, folder: str, slide: str) -> None:
    write_state(state_file(out, out / folder), State(slide, "failed", "", 1, ""))


def test_a_slide_keeps_the_name_that_it_has_from_an_earlier_batch(tmp_path: Path) -> None:
    """Segment `a.svs` and `a.tif` together, then each alone, and another slide of their stem."""
    both = {Path("s", name): f"d/{name}" for name in ("a.svs", "a.tif")}
    folders = result_folders(tmp_path, both)
    assert [*folders.values()] == [tmp_path / "d/a.svs", tmp_path / "d/a.tif"]
    for slide, folder in folders.items():
        _begin(tmp_path, folder.relative_to(tmp_path).as_posix(), str(slide))
    for slide, name in both.items():
        assert result_folders(tmp_path, {slide: name}) == {slide: folders[slide]}
    third = Path("s", "a.ndpi")
    assert result_folders(tmp_path, {third: "d/a.ndpi"}) == {third: tmp_path / "d/a"}
    _begin(tmp_path, "d/a", "s/a.svs")  # of a version that segmented it twice
    [slide] = [slide for slide in both if slide.suffix == ".svs"]
    assert result_folders(tmp_path, {slide: "d/a.svs"}) == {slide: tmp_path / "d/a"}


def test_the_name_of_the_folder_of_states_hides_no_result(tmp_path: Path) -> None:
    """A slide in a folder is called `states.svs`, and its result was in earlier versions."""
    slides = {Path(name): name for name in ("states.svs", "x/states.svs", "x/a.svs")}
    folders = result_folders(tmp_path, slides)
    names = [folder.relative_to(tmp_path).as_posix() for folder in folders.values()]
    assert names == ["states.svs", "x/states.svs", "x/a"]
    _begin(tmp_path, "y/states", "y/states.svs")
    earlier = Path("y/states.svs")
    assert result_folders(tmp_path, {earlier: "y/states.svs"}) == {earlier: tmp_path / "y/states"}
    for name in (*names, "y/states", "y/a", "another/a", "another/states/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / MASK).touch()
        write_summary(tmp_path / name / SUMMARY, EMPTY)
    found = [folder.relative_to(tmp_path).as_posix() for folder in results(tmp_path)]
    assert found == sorted([*names, "y/states", "y/a"]), "another batch lies in `another`"


def test_a_summary_of_something_else_hides_no_result_and_is_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "notes"):
        place.mkdir(exist_ok=True)
        (place / SUMMARY).write_text('{"tool": "another"}')
    for name in ("a", "notes/b"):
        (tmp_path / name).mkdir()
        write_summary(tmp_path / name / SUMMARY, EMPTY)
    told = list[str]()
    found = results(tmp_path, lambda error: told.append(error.problem))
    assert [*found] == [tmp_path / "a", tmp_path / "notes" / "b"]
    strangers = [tmp_path / SUMMARY, tmp_path / "notes" / SUMMARY]
    assert [one.partition(" is no summary of a result")[0] for one in told] == [
        *map(str, strangers)
    ]
    with pytest.raises(PathosegError, match="notes is no result"):
        refuse_strangers(tmp_path, {Path("notes.svs"): tmp_path / "notes"})
    refuse_strangers(tmp_path, {Path("a.svs"): tmp_path / "a"})


def test_a_result_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = tmp_path / "a", set[str]()

    def sync(path: Path) -> None:
        assert not folder.exists()
        synced.add(path.name)

    monkeypatch.setattr(atomic, "sync_file", sync)
    with result_folder(folder, tmp_path / "work", ()) as partial:
        (partial / "mask.ome.zarr").mkdir()
        for name in ("regions.geojson", "objects.csv", "mask.ome.zarr/zarr.json"):
            (partial / name).touch()
    assert synced == {"regions.geojson", "objects.csv", "zarr.json"}
    assert folder.is_dir()


def test_a_result_that_cannot_be_put_back_at_once_is_kept_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, work = tmp_path / "a", tmp_path / "work"
    folder.mkdir()
    (folder / "mask").write_text("former")
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target == folder:
            raise OSError("the disk is gone")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with (
            pytest.raises(PathosegError, match="the disk is gone"),
            result_folder(folder, work, ()),
        ):
            pass
    assert not folder.exists()
    put_back(folder, work)
    assert (folder / "mask").read_text() == "former"


@pytest.mark.parametrize("name", ["states/a.svs", "x/states/a.svs", "x/states/y/a.svs", "x/states"])
def test_no_result_lies_where_none_is_looked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathosegError, match="Folders called states are for the states"):
        result_folders(tmp_path, {Path(name): name})
