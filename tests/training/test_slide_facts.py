"""Facts of slides: shares on glass counted by hand, and warnings that come when they are due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pathoseg.annotations.annotation import AnnotationReport, ClassTable
from pathoseg.config import Config
from pathoseg.geometry import Mpp, Size
from pathoseg.tiles.tissue import Tissue
from pathoseg.training.slide_facts import SlideFacts, shares_on_glass, warnings_of
from pathoseg.training.splits import Member

CLASSES = ClassTable(("gland", "tumour"), ((0, 150, 0), (200, 0, 0)))
FACTS = SlideFacts(
    member=Member("a.svs", "a", "train"),
    size=Size(4000, 4000),
    mpp=Mpp(0.5, 0.5),
    annotation=AnnotationReport(Path("a.xml"), {"gland": 3}),
    tile=1024,
    areas_mm2=(3.0, 0.5, 0.5),
    tiles=16,
    class_tiles=(16, 12, 12),
    padding=0.1,
    tissue_mm2=2.0,
)
HELD_OUT = replace(FACTS, member=Member("b.svs", "b", "val"))


@given(
    arrays(np.uint8, (6, 8), elements=st.sampled_from([0, 1, 2, 255])),
    arrays(np.bool_, (6, 8)),
    st.integers(1, 3),
)
def test_shares_on_glass_are_those_of_the_pixels(
    mask: np.ndarray, found: np.ndarray, finer: int
) -> None:
    tissue = Tissue(found.repeat(finer, 0).repeat(finer, 1), Size(80, 60), Mpp(1, 1))
    shares = shares_on_glass(mask, tissue, CLASSES)
    expected = {
        name: (~found)[mask == index].mean()
        for index, name in enumerate(CLASSES.names, start=1)
        if (mask == index).any()
    }
    assert shares == expected


@given(st.floats(0.1, 4.0), st.integers(0, 20), st.integers(0, 20))
def test_a_warning_comes_when_it_is_due(mpp: float, trained: int, validated: int) -> None:
    odd = replace(FACTS, member=Member("c.svs", "c", "test"), mpp=Mpp(mpp, mpp))
    facts = [
        replace(FACTS, class_tiles=(16, 12, trained)),
        replace(HELD_OUT, class_tiles=(16, 12, validated)),
        odd,
    ]
    said = " ".join(warnings_of(facts, CLASSES, Config(), ()))
    assert ("per pixel: c.svs (" in said) == (max(mpp / 0.5, 0.5 / mpp) > 1.2)
    assert ("enlarged" in said) == (mpp > 0.6)
    assert ("tumour is only on slides that are held out" in said) == (trained == 0)
    assert ("fewer than 10" in said) == (0 < trained < 10)
    assert ("tumour is on no validation slide" in said) == (trained > 0 and validated == 0)


def test_slides_like_these_need_no_warning() -> None:
    assert warnings_of([FACTS, HELD_OUT], CLASSES, Config(), ()) == []


@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        ([f"{patient:02}_{slide}.png" for patient in range(3) for slide in range(2)], True),
        ([f"p{patient}/{slide}.svs" for patient in range(3) for slide in "ab"], True),
        (
            [f"{kind}_{slide:03}.tif" for kind in ("normal", "tumor", "x") for slide in (1, 2)],
            False,
        ),
        ([f"TCGA-{n}-55{n}-01Z-00-DX1.svs" for n in range(8)], False),
        ([f"{n}_1.png" for n in range(2)] * 2, False),
    ],
)
def test_names_of_slides_of_one_patient(names: list[str], is_told: bool) -> None:
    facts = [
        replace(FACTS, member=Member(name, name, "val" if at else "train"))
        for at, name in enumerate(names)
    ]
    told = any("patient of its own" in text for text in warnings_of(facts, CLASSES, Config(), ()))
    assert told == is_told
    one = [replace(each, member=Member(each.member.slide, "P", "val")) for each in facts]
    assert not any("of its own" in text for text in warnings_of(one, CLASSES, Config(), ()))
