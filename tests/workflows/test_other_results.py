"""A folder that holds results of another model or of other options is refused, and kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pathoseg
from pathoseg.errors import PathosegError
from pathoseg.inference.slide_job import SlideJob
from pathoseg.models.bundle_identity import bundle_id
from tests.workflows.test_infer import MPP, _draw, _table

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]


def _other(model: Path, place: Path) -> Path:
    """Return a copy of a bundle whose card says something else."""
    shutil.copytree(model, place)
    card = json.loads((model / "model.json").read_text())
    card["training"] = {"note": "another run"}
    (place / "model.json").write_text(json.dumps(card))
    return place


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_results_of_another_model_or_of_other_options_are_kept(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b, model = _draw(Path("a.png")), _draw(Path("b.png"), seed=1), tiny_bundle()
    other = _other(model, Path("other"))
    call = ("infer", a, "--out", "out", *MPP, "--model")
    assert command(*call, model)[0] == 0
    assert command(*call, model)[0] == 0, "the same model and options go on"
    assert "already done" in command(*call, model, "--resume")[1]
    before = _files(Path("out"))
    for arguments in (
        (*call, other),
        (*call, other, "--resume"),
        ("infer", b, "--out", "out", *MPP, "--model", other),
        (*call, other, "--ranks", 2),  # by the process that would start them
    ):
        code, said = command(*arguments)
        assert code == 2, said
        assert "results of another model" in said
        assert "out/a" in said or "states/a.json" in said
        assert "--overwrite" in said
        assert "Model: " not in said, "it is loaded"
    code, said = command(*call, model, "--batch", 2)
    assert code == 2
    assert "infer.batch = 1, which is 2" in " ".join(said.split())
    with pytest.raises(PathosegError, match="another model"):
        pathoseg.infer(b, other, out="out", options={"data": {"assume_mpp": 0.5}})
    assert _files(Path("out")) == before

    pathoseg.infer(b, other, out="out", options={"data": {"assume_mpp": 0.5}}, overwrite=True)
    rows = _table(Path("out/summary.csv"))
    assert len({row["model"] for row in rows if row["slide"] == "a.png"}) == 1
    assert len({row["model"] for row in rows}) == 2
    assert _files(Path("out/a")) == {
        name.removeprefix("a/"): data for name, data in before.items() if name.startswith("a/")
    }
    code, said = command(*call, other, "--overwrite", "--resume")
    assert code == 0, said
    assert "already done" not in said
    assert len({row["model"] for row in _table(Path("out/summary.csv"))}) == 1
    assert command(*call, other)[0] == 0


def test_a_call_that_begins_beside_another_models_does_not_replace_its_result(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, model = _draw(Path("a.png")), tiny_bundle()
    other = _other(model, Path("other"))
    lead, given = SlideJob.lead, {"data": {"assume_mpp": 0.5}}

    def late(job: SlideJob) -> bool:
        """Lead a slide that a call beside this one has just made."""
        monkeypatch.setattr(SlideJob, "lead", lead)
        pathoseg.infer(a, other, out="out", options=given)
        return lead(job)

    for overwrite in ((), ("--overwrite",)):
        monkeypatch.setattr(SlideJob, "lead", late)
        code, said = command("infer", a, "--out", "out", *MPP, "--model", model, *overwrite)
        models = {row["model"] for row in _table(Path("out/summary.csv"))}
        if overwrite:
            assert code == 0, said
            assert models == {bundle_id(model)}
        else:
            assert code == 2
            assert "results of another model" in said
            assert models == {bundle_id(other)}


_REFUSED = """
import json, sys
from pathoseg.cli import main

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["pathoseg", "infer", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code, [name for name in ("torch", "scipy", "sklearn") if name in sys.modules])
        print("-" * 9, file=sys.stderr)
"""


@pytest.mark.process
def test_a_refusal_does_not_wait_for_torch(
    tmp_path: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, model = _draw(Path("a.png")), tiny_bundle()
    assert command("infer", a, "--out", "out", *MPP, "--model", model)[0] == 0
    refused = {
        ("a.png", "--model", "model", "--out", "out", *MPP, "--batch", "2"): "other options",
        ("a.png", "--model", "nothing", "--out", "new"): "names nothing, which does not exist",
        ("nothing.svs",): "nothing.svs",  # there is no finished run, either
        ("a.png", "--model", "model", "--batch", "0"): "--batch 0 does not fit",
    }
    told = subprocess.run(
        [sys.executable, "-c", _REFUSED, json.dumps([*refused])], capture_output=True, text=True
    )
    assert told.stdout.splitlines() == ["2 []"] * len(refused), told.stderr
    for words, said in zip(refused.values(), told.stderr.split("-" * 9 + "\n"), strict=False):
        assert words in said
