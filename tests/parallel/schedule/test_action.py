"""Tests that actions and edges read back as they were written, and what must precede them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathoseg.errors import PathosegError
from pathoseg.parallel.schedule.action import Action, Edge, Kind, chain, predecessors
from pathoseg.parallel.schedule.gems import gems
from pathoseg.parallel.schedule.lowering import lower

numbers = st.integers(0, 10**6)


@st.composite
def edges(draw: st.DrawFn) -> Edge:
    source = draw(numbers)
    return Edge(source, source + draw(st.integers(1, 10**6)), draw(numbers))


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    replica, stage, microbatch = draw(numbers), draw(numbers), draw(numbers)
    if kind in (Kind.REDUCE, Kind.WAIT_REDUCE):
        return Action(kind, replica, stage, bucket=draw(numbers))
    if kind is Kind.STEP:
        return Action(kind, replica, stage)
    if kind in (Kind.SEND, Kind.RECV):
        edge = draw(edges())
        return Action(kind, replica, draw(st.sampled_from(edge[:2])), microbatch, edge)
    if kind in (Kind.OFFLOAD, Kind.PREFETCH):
        name = draw(st.from_regex(r"[A-Za-z0-9_.:/#()-]+", fullmatch=True))
        return Action(kind, replica, stage, microbatch, tensor=name)
    return Action(kind, replica, stage, microbatch)


@given(actions())
def test_an_action_reads_back_as_it_was_written(action: Action) -> None:
    assert action.misfit() is None
    assert Action.parse(str(action)) == action


@given(edges())
def test_an_edge_reads_back_as_it_was_written(edge: Edge) -> None:
    assert Edge.parse(str(edge)) == edge


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0:2F5", Action(Kind.FORWARD, 0, 2, 5)),
        ("1:0B12", Action(Kind.BACKWARD, 1, 0, 12)),
        ("0:2SEND5(2>3)", Action(Kind.SEND, 0, 2, 5, Edge(2, 3))),
        ("0:3RECV5(0>3.1)", Action(Kind.RECV, 0, 3, 5, Edge(0, 3, 1))),
        ("0:2OFFLOAD5[down.conv1]", Action(Kind.OFFLOAD, 0, 2, 5, tensor="down.conv1")),
        ("0:2REDUCE#1", Action(Kind.REDUCE, 0, 2, bucket=1)),
        ("3:2STEP", Action(Kind.STEP, 3, 2)),
    ],
)
def test_the_text_form(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F5",
        "0:2F",
        "0:2F5 ",
        "0:2G5",
        "0:-2F5",
        "0:2SEND5",
        "0:1SEND5(2>3)",
        "0:2F5(2>3)",
        "0:2STEP4",
        "0:2OFFLOAD5[a b]",
        "0:2REDUCE",
        "0:٢F5",
    ],
)
def test_what_is_no_action_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(PathosegError, match="is no action"):
        Action.parse(text)


def test_what_is_no_edge_is_refused_by_its_text() -> None:
    with pytest.raises(PathosegError, match="'0-1' is no edge"):
        Edge.parse("0-1")


def _before(text: str, edges: tuple[Edge, ...] = (*chain(3), Edge(0, 2))) -> set[str]:
    setting = lower(gems(3), edges, recompute=[0], buckets=2).setting
    return {str(each) for each in predecessors(Action.parse(text), setting)}


def test_what_must_precede_each_kind() -> None:
    assert _before("0:0F0") == set()
    assert _before("0:2F0") == {"0:2RECV0(1>2)", "0:2RECV0(0>2)"}
    assert _before("0:2RECV0(0>2)") == {"0:0SEND0(0>2)"}
    assert _before("0:0SEND0(0>2)") == {"0:0F0"}
    assert _before("0:2SEND0(0>2)") == {"0:2B0"}
    assert _before("0:0RECV0(0>2)") == {"0:2SEND0(0>2)"}
    assert _before("0:0B0") == {"0:0RECV0(0>1)", "0:0RECV0(0>2)", "0:0F0"}
    assert _before("0:0REDUCE#1") == {"0:0B0"}
    assert _before("0:0WAIT_REDUCE#1") == {"0:0REDUCE#1", "1:0REDUCE#1"}
    assert _before("1:0STEP") == {"1:0WAIT_REDUCE#0", "1:0WAIT_REDUCE#1"}
