"""The folder of a batch: what the end of a process clears away, and what it leaves to others."""

from __future__ import annotations

from pathlib import Path

from pathoseg.inference.result_folder import sweep


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
