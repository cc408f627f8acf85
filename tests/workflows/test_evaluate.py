"""Comparing a model with whole annotated slides: figures by hand, splits apart, refusals."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn.metrics import confusion_matrix

from pathoseg.config_file import load_config
from pathoseg.errors import PathosegError
from pathoseg.inference.segmenter import Segmenter, SlidePlan
from pathoseg.inference.windows import Windows
from pathoseg.interruption import Interruption
from pathoseg.models.bundle import load_bundle, save_bundle
from pathoseg.models.model_options import ModelConfig
from pathoseg.outputs.stitch import CONFIDENCE_LEVELS
from pathoseg.slides.slide import Slide, open_slide
from pathoseg.workflows.evaluate import _configured

Command = Callable[..., tuple[int, str]]
SaveBundle = Callable[..., Path]


def _rows(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(newline="") as file:
        return {(row["slide"], row["split"]): row for row in csv.DictReader(file)}


def test_figures_are_those_of_the_masks_that_infer_writes(
    toy_slides: Path, command: Command
) -> None:
    train = ("train", "--slides", toy_slides, "--config", "tiny.toml", "--epochs", 3)
    code, said = command(*train, "--out", "run")
    assert code == 0, said
    common = ("--config", "tiny.toml")
    assert command("evaluate", "--slides", toy_slides, *common)[0] == 0
    assert command("infer", toy_slides, *common, "--out", "out")[0] == 0
    rows = _rows(Path("run/evaluation.csv"))
    with Path("run/splits.csv").open(newline="") as file:
        splits = {row["slide"]: row["split"] for row in csv.DictReader(file)}
    assert set(rows) == {*splits.items(), *(("all", split) for split in set(splits.values()))}
    together = {split: np.zeros(3) for split in splits.values()}
    for name, split in splits.items():
        found = tifffile.imread(f"out/{Path(name).stem}/mask.ome.tiff") == 1
        truth = np.asarray(Image.open(toy_slides / f"{Path(name).stem}_mask.png")) == 1
        counts = np.array([(found & truth).sum(), found.sum(), truth.sum()])
        together[split] += counts
        row = rows[name, split]
        assert int(row["pixels"]) == truth.size
        _agrees(row, counts)
    for split, counts in together.items():
        _agrees(rows["all", split], counts)
    _files_agree(Path("run"), rows, splits, toy_slides)


def _files_agree(
    run: Path, rows: dict[tuple[str, str], dict[str, str]], splits: dict[str, str], slides: Path
) -> None:
    """The matrix is scikit-learn's, and the other files say what evaluation.csv says."""
    told = json.loads((run / "evaluation.json").read_text())
    with (run / "confusion.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for split in set(splits.values()):
        names = [Path(name).stem for name, of in splits.items() if of == split]
        masks = [tifffile.imread(f"out/{name}/mask.ome.tiff").ravel() for name in names]
        truths = [np.asarray(Image.open(slides / f"{name}_mask.png")).ravel() for name in names]
        matrix = confusion_matrix(np.concatenate(truths), np.concatenate(masks), labels=[0, 1])
        found = [cell for cell in cells if cell["split"] == split]
        assert [int(cell["pixels"]) for cell in found] == matrix.ravel().tolist()
        shares = matrix / matrix.sum(axis=1, keepdims=True)
        assert [float(cell["share_of_truth"]) for cell in found] == pytest.approx(shares.ravel())
        row, part = rows["all", split], told["splits"][split]
        assert part["confusion"] == matrix.tolist()
        for name, figure in part["figures"].items():
            assert float(row[name]) == pytest.approx(figure["value"])
            if part["patients"] < 3:
                assert (figure["low"], row[f"{name}_low"]) == (None, "nan")
            else:
                low, high = float(row[f"{name}_low"]), float(row[f"{name}_high"])
                assert (low, high) == pytest.approx((figure["low"], figure["high"]))
                assert low <= high
        assert float(row["precision_disc"]) == pytest.approx(matrix[1, 1] / matrix[:, 1].sum())
        assert float(row["recall_disc"]) == pytest.approx(matrix[1, 1] / matrix[1].sum())
    assert {part["patients"] for part in told["splits"].values()} == {1, 3}
    with (run / "evaluation-slides.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["patient"] == row["slide"]
            assert row["dice_disc"] == rows[row["slide"], row["split"]]["dice_disc"]
            truth = np.asarray(Image.open(slides / f"{Path(row['slide']).stem}_mask.png"))
            assert float(row["annotated_mm2_disc"]) == pytest.approx((truth == 1).sum() * 0.25e-6)
    page = (run / "evaluation.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)|url\(|<script", page), "one file"
    assert page.count("data:image/png;base64,") == 3 * (3 + 1), "three slides, and the only one"


def test_slides_of_one_name_are_told_apart_by_their_folders(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """Also from another folder: what the model was trained on is never unseen."""
    for number in range(4):
        place = toy_slides / f"p{number}"
        place.mkdir()
        for end in (".png", "_mask.png"):
            (toy_slides / f"slide{number}{end}").rename(place / f"s{end}")
    assert command("train", "--slides", toy_slides, "--config", "tiny.toml", "--out", "run")[0] == 0
    with Path("run/splits.csv").open(newline="") as file:
        splits = {row["slide"]: row["split"] for row in csv.DictReader(file)}
    assert sorted(splits) == [f"p{number}/s.png" for number in range(4)]
    evaluate = ("evaluate", "--model", "run", "--out", "figures")
    for given, names in (([toy_slides], sorted(splits)), ([toy_slides / "p0"], ["s.png"])):
        code, said = command(*evaluate, *(word for path in given for word in ("--slides", path)))
        assert code == 0, said
        rows = _rows(Path("figures/evaluation.csv"))
        assert sorted(name for name, _ in rows if name != "all") == names
        assert {split for name, split in rows if name == names[0]} == {splits["p0/s.png"]}
        assert len({row["dice_mean"] for (name, _), row in rows.items() if name != "all"}) == len(
            names
        ), "each its own"
    for end in (".png", "_mask.png"):  # another slide, which the run calls like p0's from inside
        (toy_slides / f"s{end}").write_bytes((toy_slides / f"p1/s{end}").read_bytes())
    # Its splits alone are of interest.
    text = Path("tiny.toml").read_text().replace("epochs = 4", "epochs = 1\nsamples_per_epoch = 2")
    Path("few.toml").write_text(text)
    few = ("train", "--slides", toy_slides, "--config", "few.toml")
    assert command(*few, "--out", "more")[0] == 0
    with Path("more/splits.csv").open(newline="") as file:
        splits = {row["slide"]: row["split"] for row in csv.DictReader(file)}
    for place in ("p0", "p1", "p2"):
        code, said = command(*evaluate[:2], "more", *evaluate[3:], "--slides", toy_slides / place)
        assert code == 0, said
        found = {split for name, split in _rows(Path("figures/evaluation.csv")) if name == "s.png"}
        assert found == {splits[f"{place}/s.png"]}
    code, said = command(*evaluate, "--slides", toy_slides / "p0", "--slides", toy_slides / "p1")
    assert (code, "are both called s.png" in said) == (2, True)


def test_a_slide_compared_in_strips_is_a_slide_compared_whole(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = ("evaluate", "--slides", toy_slides, "--model", tiny_bundle(tile=32, overlap=16))
    config = ("--assume-mpp", "0.5")
    assert command(*evaluate, *config, "--out", "whole")[0] == 0
    monkeypatch.setattr("pathoseg.workflows.evaluate._STRIP_PIXELS", 96 * 3)
    assert command(*evaluate, *config, "--out", "strips")[0] == 0
    for name in ("evaluation.csv", "evaluation.json", "evaluation.html"):
        assert (Path("whole") / name).read_bytes() == (Path("strips") / name).read_bytes()


@pytest.mark.parametrize("norm", ["batch", "instance"], ids=["windows", "tiles"])
def test_confidence_is_the_probability_of_the_predicted_class(
    norm: Literal["batch", "instance"], toy_slides: Path, tiny_bundle: SaveBundle
) -> None:
    network = ModelConfig("unet", "segment", 3, width=4, depth=2, norm=norm)
    net, card = load_bundle(tiny_bundle(network=network, tile=32, overlap=16))
    segmenter = Segmenter(net, card, load_config(None, {"data": {"assume_mpp": 0.5}}))
    with open_slide(toy_slides / "slide0.png", assume_mpp=0.5) as slide:
        plan = segmenter.plan(slide)
    assert isinstance(plan.grid, Windows) == (norm == "batch")
    # Without its last row of tiles, as if there were no tissue there; all windows are in one row.
    above = len(plan.grid) if norm == "batch" else plan.grid.first_of(plan.grid.rows - 1)
    plan = replace(plan, indices=[index for index in plan.indices if index < above])
    calm = Interruption("")
    with closing(segmenter.bands_with_confidence(plan, calm)) as bands:
        classes, levels = np.concatenate(list(bands), axis=1)
    with closing(segmenter.rows(plan, calm)) as rows:
        assert np.array_equal(classes, np.concatenate([row.band for row in rows]))
    with closing(segmenter._rows(plan, calm, finish=lambda chances: chances)) as rows:
        chances = np.concatenate([band for _, band, _ in rows], axis=1).max(axis=0)
    confidence = levels / CONFIDENCE_LEVELS
    np.testing.assert_allclose(confidence, chances, rtol=0, atol=1 / CONFIDENCE_LEVELS)
    bottom = plan.grid.box(plan.indices[-1]).bottom
    assert confidence[:bottom].min() >= 1 / 3 - 1 / CONFIDENCE_LEVELS
    assert not confidence[bottom:].any(), "nobody was asked"


def test_what_was_classified_in_tiles_is_compared_in_tiles(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """Tiles have the labels of training: none where nothing is annotated, a class for a corner."""
    labels = dict[str, int]()
    for seed in range(4):
        truth = np.zeros((96, 96), np.uint8)
        truth[:10, : 20 * seed] = 1  # less than a third of some tiles
        Image.fromarray(truth).save(toy_slides / f"slide{seed}_mask.png")
        labels[f"slide{seed}.png"] = int(truth.reshape(3, 32, 3, 32).any(axis=(1, 3)).sum())
    network = ModelConfig("resnet11_v2", "classify", 3, width=2)
    model = tiny_bundle(network=network, tile=32, overlap=0)
    evaluate = ("evaluate", "--slides", toy_slides, "--model", model, "--out", "figures")
    code, said = command(*evaluate, "--assume-mpp", "0.5")
    assert code == 0, said
    rows = _rows(Path("figures/evaluation.csv"))
    of_slides = {name: int(row["pixels"]) for (name, _), row in rows.items() if name != "all"}
    assert (
        of_slides == labels == {f"slide{at}.png": number for at, number in enumerate((0, 1, 2, 2))}
    )
    assert not [name for name in rows["all", "unseen"] if name.startswith("boundary")]
    told = json.loads(Path("figures/evaluation.json").read_text())
    assert told["unit"] == "tiles"
    assert sum(b["pixels"] for b in told["splits"]["unseen"]["calibration"]) == 5
    assert [sum(row) for row in told["splits"]["unseen"]["confusion"]] == [0, 5, 0]
    assert "5 tiles" in Path("figures/evaluation.html").read_text()


def test_what_the_figures_rest_on_is_said(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """A resolution that is new to the model, slides of one patient, names that look like HTML."""
    network, card = load_bundle(tiny_bundle())
    card = replace(card, training={"slide_mpps": (0.2, 0.3)}, class_names=("gland", "<b>&"))
    run = toy_slides.parent / "run"
    save_bundle(run / "model", network.state_dict(), card)
    (run / "splits.csv").write_text(
        "slide,patient,split\nslide0.png,P1,train\nslide1.png,P2,test\n"
    )
    (toy_slides / "slides.csv").write_text("slide,patient\nslide2,P1\nslide3.png,P2\n")
    (toy_slides / "slide1_mask.png").rename(toy_slides / "slide1.txt")
    evaluate = ("evaluate", "--slides", toy_slides, "--model", run, "--assume-mpp", "0.5")
    code, said = command(*evaluate)
    assert code == 0, said
    assert said.count("0.5 µm per pixel, is 1.7 times coarser") == 3
    assert "slide2.png: the model was trained on other slides of its patient, P1" in said
    assert "slide3.png: the model was trained on" not in said
    assert "Left out: slide1.png: it has no annotation" in said
    assert "no 95 % interval: 2 patients" in said
    assert "splits.csv" not in said
    never = re.findall(r"No slide of the split (\w+) shows (\S+), and the model finds", said)
    told = json.loads((run / "evaluation.json").read_text())["splits"]
    found = [split for split, of in told.items() if sum(row[2] for row in of["confusion"])]
    assert found, "the masks name one class, and the model finds the other"
    assert never == [(split, "<b>&") for split in found]
    page = (run / "evaluation.html").read_text()
    assert page.count("1.7 times coarser") == 3
    assert "slide1.png is left out" in page
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
    code, said = command("infer", toy_slides / "slide0.png", "--model", run, "--assume-mpp", "0.5")
    assert code == 0, said
    assert "Take care: its resolution, 0.5 µm per pixel, is 1.7 times coarser" in said
    told, small = json.loads(Path("results/slide0/summary.json").read_text())["warnings"]
    assert "no region reaches 10 µm²" in small
    assert "1.7 times coarser" in told


def _agrees(row: dict[str, str], counts: np.ndarray) -> None:
    both, found, truth = counts
    assert float(row["dice_disc"]) == pytest.approx(2 * both / (found + truth))
    assert float(row["iou_disc"]) == pytest.approx(both / (found + truth - both))
    assert row["dice_mean"] == row["dice_disc"]


def test_a_slide_that_fails_costs_no_figure_of_the_others(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Segmenter.plan

    def failing(self: Segmenter, slide: Slide) -> SlidePlan:
        if slide.path.name in broken:
            raise PathosegError(f"{slide.path} is broken.", "This is a test.")
        return plan(self, slide)

    monkeypatch.setattr(Segmenter, "plan", failing)
    broken = {"slide1.png"}
    Path("m.toml").write_text("[data]\nassume_mpp = 0.5")
    evaluate = ("evaluate", "--slides", toy_slides, "--model", tiny_bundle(), "--config", "m.toml")
    code, said = command(*evaluate, "--out", "figures")
    assert (code, "1 of 4 slides could not be compared: slide1.png." in said) == (2, True), said
    rows = _rows(Path("figures/evaluation.csv"))
    assert sorted({name for name, _ in rows}) == ["all", "slide0.png", "slide2.png", "slide3.png"]
    assert "slide1.png is broken" in Path("figures/evaluation.html").read_text()
    broken |= {f"slide{number}.png" for number in range(4)}
    code, said = command(*evaluate, "--out", "nothing")
    assert (code, "is broken. This is a test" in " ".join(said.split())) == (2, True), said
    assert not list(Path("nothing").glob("*"))


@pytest.mark.parametrize("skip", [False, True])
def test_a_slide_that_cannot_be_read_costs_no_figure_of_the_others(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle, skip: bool
) -> None:
    (toy_slides / "slide1.png").write_bytes(b"")
    (toy_slides / "slide2_mask.png").unlink()
    (toy_slides / "slide2.geojson").write_text("{")
    Path("m.toml").write_text(f"[data]\nassume_mpp = 0.5\nskip_bad_slides = {str(skip).lower()}")
    evaluate = ("evaluate", "--slides", toy_slides, "--model", tiny_bundle(), "--config", "m.toml")
    code, said = command(*evaluate, "--out", "figures")
    assert code == (0 if skip else 2), said
    assert ("2 of 4 slides could not be compared: slide1.png, slide2.png." in said) == (not skip)
    rows = _rows(Path("figures/evaluation.csv"))
    assert sorted({name for name, _ in rows}) == ["all", "slide0.png", "slide3.png"]
    page = Path("figures/evaluation.html").read_text()
    assert "slide1.png" in page
    assert "slide2.png" in page


def _recorded_splits(table: Path) -> dict[str, str]:
    with table.open(newline="", encoding="utf-8") as file:
        return {row["slide"]: row["split"] for row in csv.DictReader(file)}


def test_one_split_alone_and_slides_the_run_never_saw(toy_slides: Path, command: Command) -> None:
    train = ("train", "--slides", toy_slides, "--config", "tiny.toml", "--epochs", 1)
    assert command(*train, "--out", "run")[0] == 0
    evaluate = ("evaluate", "--slides", toy_slides, "--config", "tiny.toml", "--out", "figures")
    assert command(*evaluate, "--split", "val")[0] == 0
    assert {split for _, split in _rows(Path("figures/evaluation-val.csv"))} == {"val"}
    splits = _recorded_splits(Path("run/splits.csv"))
    odd = next(name for name, split in splits.items() if split == "train")
    mask = toy_slides / odd.replace(".png", "_mask.png")
    mask.rename("kept.png")
    assert odd not in command(*evaluate, "--split", "val")[1], "it is of another split"
    Path("kept.png").rename(mask)
    code, said = command(*evaluate, "--split", "test")
    assert code == 2
    assert "of these: train, val; what the model's run never saw is unseen" in said
    code, said = command(*evaluate, "--split", "tset")
    assert (code, "Did you mean test? They are of these: train, val; " in said) == (2, True)
    evaluate_into_a_file = (*evaluate[:-1], "tiny.toml", "--split", "val")
    code, said = command(*evaluate_into_a_file)
    assert (code, "the evaluation's folder" in said.lower(), "slide" in said) == (2, True, False)
    for name in ("slide0.png", "slide0_mask.png"):
        (toy_slides / name).rename(toy_slides / name.replace("0", "9"))
    written = "Written to figures/evaluation-unseen.csv"
    assert f"{written}; to read: " in command(*evaluate, "--split", "unseen")[1]
    code, said = command(*evaluate, "--split", "unseen")
    assert (code, f"{written}, in place of an earlier one; to read: " in said) == (0, True)
    assert set(_rows(Path("figures/evaluation-unseen.csv"))) == {
        ("slide9.png", "unseen"), ("all", "unseen"),
    }  # fmt: skip


def test_slides_are_read_as_the_run_read_them(toy_slides: Path, command: Command) -> None:
    masks = toy_slides.parent / "masks"
    masks.mkdir()
    for mask in toy_slides.glob("*_mask.png"):
        mask.rename(masks / mask.name)
    where = ("--slides", toy_slides, "--annotations", masks)
    train = ("train", *where, "--config", "tiny.toml", "--epochs", 1)
    assert command(*train, "--out", "run")[0] == 0
    # The slides state no mpp: tiny.toml, which is not given again, supplies it.
    code, said = command("evaluate", "--slides", toy_slides)
    assert code == 0, said
    # So it does where a configuration is about something else.
    Path("other.toml").write_text("[infer]\nreaders = 1\n")
    where = ("--slides", toy_slides, "--annotations", masks)
    assert command("evaluate", *where, "--config", "other.toml", "--out", "other")[0] == 0
    assert Path("other/evaluation.csv").read_text() == Path("run/evaluation.csv").read_text()
    others = toy_slides.rename(toy_slides.parent / "others")
    code, said = command("evaluate", "--slides", others)
    assert code == 2
    assert "annotation" in said
    assert command("evaluate", "--slides", others, "--annotations", masks)[0] == 0
    code, said = command("evaluate", "--slides", others, "--config", "tiny.toml")
    assert code == 2


def test_a_configuration_overrules_what_it_states_and_nothing_else(tmp_path: Path) -> None:
    recorded, own = tmp_path / "config.toml", tmp_path / "own.toml"
    recorded.write_text(
        'format = 2\n[annotations]\nrename = {"Tumor" = "tumour"}\nunlabelled = "ignore"\n'
    )
    run = load_config(recorded).annotations
    own.write_text("[annotations]\nroi = []\n")
    assert _configured(recorded, own, {}).annotations == replace(run, roi=())
    own.write_text('[annotations]\nunlabelled = "background"\n')  # the default, yet stated
    assert _configured(recorded, own, {}).annotations == replace(run, unlabelled="background")
    # Names are added to the run's, as the hint about an unknown class has it.
    both = {"Tumor": "tumour", "Fat": "fat*"}
    own.write_text('[annotations]\nrename = {"Fat" = "fat*"}\n')
    assert _configured(recorded, own, {}).annotations == replace(run, rename=both)
    flags = {"annotations": {"rename": {"Fat": "fat*"}}}
    assert _configured(recorded, None, flags).annotations == replace(run, rename=both)


def test_the_table_that_is_given_with_other_slides_counts(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[data]\nslides = "first"\ntable = "first.csv"\n')
    tables = [
        _configured(tmp_path / "config.toml", None, {"data": data}).data.table
        for data in ({"slides": "second"}, {"slides": "second", "table": "second.csv"})
    ]
    assert tables == [None, "second.csv"]


def test_a_class_the_model_does_not_know_is_refused(
    toy_slides: Path, command: Command, tiny_bundle: SaveBundle
) -> None:
    """Refuse the class before slides that come earlier are segmented."""
    for mask in toy_slides.glob("slide[123]_mask.png"):
        mask.unlink()
    (toy_slides / "slide1.geojson").write_text(
        '{"type":"Feature","properties":{"classification":"nerve"},"geometry":'
        '{"type":"Polygon","coordinates":[[[0,0],[9,0],[9,9],[0,9],[0,0]]]}}'
    )
    model = tiny_bundle()
    arguments = (
        "--slides",
        toy_slides,
        "--model",
        model,
        "--assume-mpp",
        "0.5",
        "--out",
        "figures",
    )
    code, said = command("evaluate", *arguments)
    assert code == 2
    assert "slide1.geojson" in said
    assert '"nerve"' in said
    assert "slide0" not in said
    assert not Path("figures").exists()
