"""Splits by patient: stable, seeded, and refusing tables that would leak."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.config import Config
from pathoseg.errors import PathosegError
from pathoseg.training.splits import (
    Member,
    changed_annotations,
    patients_in,
    read_rows,
    split_slides,
    write_splits,
)
from pathoseg.workflows.recorded_splits import RecordedSplits


def _table(folder: Path, text: str) -> Path:
    path = folder / "slides.csv"
    path.write_text(text)
    return path


def test_a_table_is_obeyed_and_round_trips(tmp_path: Path) -> None:
    table = _table(tmp_path, "slide,patient,split\na.svs,p1,train\nb.svs,p1,train\nc.svs,p2,test\n")
    members = split_slides(["a.svs", "b.svs", "c.svs"], table, 0, 0.2)
    assert [members[name].split for name in members] == ["train", "train", "test"]
    write_splits(tmp_path / "splits.csv", members.values(), {})
    assert split_slides(list(members), tmp_path / "splits.csv", 9, 0.9, is_recorded=True) == members


def test_names_that_are_no_utf_8_round_trip(tmp_path: Path) -> None:
    members = split_slides(["Dr\udcfcse.svs", "Drüse.svs", "c.svs"], None, 0, 0.4)
    write_splits(tmp_path / "splits.csv", members.values(), {})
    assert "Drüse.svs".encode() in (tmp_path / "splits.csv").read_bytes()
    assert b"Dr\xfcse.svs" in (tmp_path / "splits.csv").read_bytes()
    assert split_slides(list(members), tmp_path / "splits.csv", 9, 0.9, is_recorded=True) == members


def test_names_that_end_in_blanks_round_trip(tmp_path: Path) -> None:
    members = split_slides([" a.svs", "b /c.svs", "d.svs ", "e\\f.svs"], None, 0, 0.5)
    write_splits(tmp_path / "splits.csv", members.values(), {})
    assert read_rows(tmp_path / "splits.csv", is_recorded=True).keys() == members.keys()
    assert split_slides(list(members), tmp_path / "splits.csv", 9, 0.9, is_recorded=True) == members


def test_a_table_of_the_user_is_none_of_a_run_s_by_its_name(tmp_path: Path) -> None:
    table = tmp_path / "splits.csv"
    table.write_text("slide, patient ,split\na\\b.svs, p1,train \n")
    assert split_slides(["a/b.svs"], table, 0, 0.2) == {"a/b.svs": Member("a/b.svs", "p1", "train")}


def test_names_are_the_same_however_their_letters_are_composed(tmp_path: Path) -> None:
    names = ["Mu\u0308ller.svs", "Bl\xf6d.svs"]
    table = _table(tmp_path, "slide,patient\nM\xfcller.svs,p1\nBlo\u0308d,p2\n")
    assert patients_in(table, names) == dict(zip(names, ("p1", "p2"), strict=True))
    names = ["Mu\u0308ller.svs", "M\xfcller.svs"]
    table = _table(tmp_path, "slide,patient\nM\xfcller.svs,p1\nMu\u0308ller.svs,p2\n")
    assert patients_in(table, names) == {names[0]: "p2", names[1]: "p1"}, "they are two files"


@pytest.mark.parametrize("columns", ["slide,split", "slide,patient", "slide,patient,split"])
def test_a_model_s_folder_may_have_a_table_of_the_user_s(tmp_path: Path, columns: str) -> None:
    row = dict(zip(columns.split(","), ("Mu\u0308ller.svs", "train", "train"), strict=False))
    (tmp_path / "splits.csv").write_text(f"{columns}\n{','.join(row.values())}\n")
    files = {"M\xfcller.svs": tmp_path / "M\xfcller.svs"}
    records = RecordedSplits.of(tmp_path, Config(), files)
    assert records.split_of("M\xfcller.svs") == row.get("split", "unseen")
    assert records.patients["M\xfcller.svs"] == row.get("patient", "Mu\u0308ller.svs")


def test_annotations_that_have_changed_are_found(tmp_path: Path) -> None:
    names = ["a.svs", "b.svs", "c.svs"]
    table = tmp_path / "splits.csv"
    write_splits(table, split_slides(names, None, 0, 0.5).values(), {"a.svs": "1", "b.svs": "2"})
    now = {"a.svs": "1", "b.svs": "3", "c.svs": "4", "later.svs": "5"}
    assert changed_annotations(table, now) == ["b.svs"], "of the others nothing was known"
    table.write_text("slide,patient,split\na.svs,a,train\n")  # an older version's
    assert changed_annotations(table, now) == []


@given(st.integers(0, 1000), st.integers(2, 40), st.floats(0.05, 0.6))
def test_a_patient_is_on_one_side_and_a_new_one_moves_few(
    seed: int, patients: int, share: float
) -> None:
    names = [f"p{i}.svs" for i in range(patients)]
    members = split_slides(names, None, seed, share)
    held_out = sum(m.split == "val" for m in members.values())
    assert held_out == max(1, round(share * patients))
    more = split_slides([*names, "late.svs"], None, seed, share)
    moved = [n for n in names if members[n].split != more[n].split]
    assert len(moved) <= 1


def test_a_class_is_validated_also_where_the_table_names_another_patient(tmp_path: Path) -> None:
    table = _table(tmp_path, "slide,patient,split\na.svs,a,val\nb.svs,b,\nc.svs,c,\n")
    classes = {"a.svs": {"gland"}, "b.svs": {"gland", "tumour"}, "c.svs": {"gland", "tumour"}}
    members = split_slides([*classes], table, 0, 0.2, classes)
    assert sorted(members[name].split for name in ("b.svs", "c.svs")) == ["train", "val"]


def test_a_stem_that_two_slides_have_is_refused(tmp_path: Path) -> None:
    table = _table(tmp_path, "slide,patient\nx,p\n")
    with pytest.raises(PathosegError, match="x could be any of 2 slides"):
        split_slides(["a/x.svs", "b/x.tif"], table, 0, 0.2)


def test_slides_of_one_patient_stay_together(tmp_path: Path) -> None:
    rows = "".join(f"s{i}.svs,p{i // 3}\n" for i in range(12))
    table = _table(tmp_path, f"slide,patient\n{rows}")
    members = split_slides([f"s{i}.svs" for i in range(12)], table, 3, 0.25)
    for patient in range(4):
        splits = {members[f"s{i}.svs"].split for i in range(patient * 3, patient * 3 + 3)}
        assert len(splits) == 1


@given(
    held=st.lists(st.frozensets(st.sampled_from("abcde")), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    share=st.floats(0.05, 0.9),
)
def test_classes_are_learnt_and_validated_where_patients_allow_it(
    held: list[frozenset[str]], seed: int, share: float
) -> None:
    classes = {f"p{number}.svs": names for number, names in enumerate(held)}
    members = split_slides([*classes], None, seed, share, classes)
    sides: dict[str, list[frozenset[str]]] = {"train": [], "val": []}
    for name, member in members.items():
        sides[member.split].append(classes[name])
    assert frozenset().union(*held) == frozenset().union(*sides["train"])
    for name in frozenset().union(*held) - frozenset().union(*sides["val"]):
        for own in sides["train"]:
            alone = [each for each in own if sum(each in o for o in sides["train"]) == 1]
            assert name not in own or alone, "it could have validated"


def test_a_rare_class_is_given_to_both_sides() -> None:
    classes = {f"p{number}.svs": {"common"} for number in range(10)}
    for rare in ("p3.svs", "p8.svs"):
        classes[rare] = {"common", "rare"}
    for seed in range(20):
        members = split_slides([*classes], None, seed, 0.2, classes)
        assert {members[name].split for name in ("p3.svs", "p8.svs")} == {"train", "val"}
        assert sum(member.split == "val" for member in members.values()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slide,patient,split\nb.svs,p,train\n", "no row for a.svs"),
        ("slide,patient,split\na.svs,p,training\n", "split 'training'"),
        ("name,split\na.svs,train\n", "no column `slide`"),
        ("slide,patient,split\na.svs,p,train\nb.svs,p,val\n", "more than one split"),
        ("slide,patient,split\na.svs,p,train\na.svs,q,test\n", "two rows of a.svs that differ"),
        ("", "no column `slide`"),
    ],
)
def test_tables_that_cannot_be_right_are_refused(tmp_path: Path, text: str, message: str) -> None:
    names = ["a.svs", "b.svs"] if "b.svs,p,val" in text else ["a.svs"]
    with pytest.raises(PathosegError, match=message):
        split_slides(names, _table(tmp_path, text), 0, 0.2)


def test_slides_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    names = ["a/s.svs", "b/s.svs", "s.svs", "c/t.svs", "u.x.svs"]
    rows = "a/s.svs,p1\nb\\s,p2\ns.svs,p3\nt,p4\nu.x,p5\n"
    table = _table(tmp_path, f"slide,patient\n{rows}")
    patients = [f"p{number}" for number in range(1, 6)]
    assert list(patients_in(table, names).values()) == patients
    assert [member.patient for member in split_slides(names, table, 0, 0.2).values()] == patients
    # The root's own row is no other's.
    assert patients_in(table, [*names, "d/s.svs"])["d/s.svs"] == "d/s.svs"
    with pytest.raises(PathosegError, match="t could be any of 2 slides"):
        patients_in(table, [*names, "d/t.svs"])
