"""Microns per pixel: what counts as stated, and what is said where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.geometry import Mpp
from pathoseg.slides.resolution import positive, slide_mpp, stated_mpp, tagged_mpp

PATH = Path("some/slide.svs")


def test_the_file_goes_first_and_then_the_user() -> None:
    stated = Mpp(0.25, 0.26)
    assert slide_mpp(PATH, stated, 20.0, 0.5) == stated
    assert slide_mpp(PATH, None, 20.0, 0.3) == Mpp(0.3, 0.3)


@pytest.mark.parametrize(("magnification", "proposal"), [(20, "0.5"), (40, "0.25"), (5, "2")])
def test_a_magnification_alone_is_refused_with_what_it_means(
    magnification: float, proposal: str
) -> None:
    with pytest.raises(PathosegError) as refusal:
        slide_mpp(PATH, None, magnification, None)
    assert str(PATH) in refusal.value.problem
    assert f"{magnification}×" in refusal.value.problem
    assert f"--assume-mpp {proposal} " in refusal.value.hint


def test_nothing_stated_is_refused() -> None:
    with pytest.raises(PathosegError, match="--assume-mpp"):
        slide_mpp(PATH, None, None, None)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_the_user_must_say_something_possible(nonsense: float) -> None:
    with pytest.raises(PathosegError, match="impossible"):
        slide_mpp(PATH, None, None, nonsense)


@pytest.mark.parametrize("x", [None, "", "many", "nan", "inf", "-0.5", 0, "0"])
def test_what_is_no_positive_number_states_nothing(x: object) -> None:
    assert positive(x) is None
    assert stated_mpp(x, 0.5) is None
    assert stated_mpp(0.5, x) is None
    assert tagged_mpp(x, 300, 25_400) is None


def test_stated_numbers_and_texts() -> None:
    assert stated_mpp("0.25", 0.5) == Mpp(0.25, 0.5)


@pytest.mark.parametrize("dpi", [1, 72, 96, 150, 300, 600, 1200, 2400])
def test_a_density_for_printing_is_no_microscope(dpi: float) -> None:
    assert tagged_mpp(dpi, dpi, 25_400) is None


@given(st.floats(0.011, 9.9), st.floats(0.011, 9.9))
def test_a_microscope_density_counts(x: float, y: float) -> None:
    mpp = tagged_mpp(10_000 / x, 10_000 / y, 10_000)
    assert mpp is not None
    assert (mpp.x, mpp.y) == (pytest.approx(x), pytest.approx(y))
