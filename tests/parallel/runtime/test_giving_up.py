"""A step that some ranks give up, each at a moment of its own: all do, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pathoseg.giving_up import GivenUpError
from pathoseg.parallel.activations import saved_tensor_hooks as keeping
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.runtime.runner import Runner
from pathoseg.parallel.runtime.state import packed
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.runtime.cases import Case, microbatches, prepare, start

# Batch norm and skips; all visits recomputed; sums over copies; saved tensors in host memory.
CASES = [
    Case("unet", "1f1b", 3),
    Case("unet", "gpipe-folded", 2),
    Case("unet", "1f1b-recomputed", 2),
    Case("unet", "gems-master", 2),
    Case("branches", "data-parallel", 2),
    Case("unet", "1f1b", 2, offload={0: ["encoder.0.conv1"], 1: ["decoder.0.convolve.conv2"]}),
]


class _Signal:
    """Answers True from its n-th question on; what a rank has begun with never changes."""

    def __init__(self, when: int, runner: Runner) -> None:
        self._left, self._runner = when, runner
        self._begun = packed(runner.begun())

    def __call__(self) -> bool:
        self._left -= 1
        if self._left <= 0:
            self.look()
        return self._left <= 0

    def look(self) -> None:
        assert packed(self._runner.begun()) == self._begun


_NEVER = 10**6


@pytest.fixture(scope="module", autouse=True)
def _small_tensors_are_offloaded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "SMALL", 1)
        yield


def _state(runner: Runner) -> dict[str, Any]:
    return deepcopy(runner.state())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}{'-offload' * bool(case.offload)}")
@settings(max_examples=8)
@given(st.data())
def test_all_ranks_give_up_and_have_the_state_of_before(case: Case, data: st.DataObject) -> None:
    done = data.draw(st.integers(0, 1), "steps before")
    moment = st.integers(1, 60) | st.just(_NEVER)
    moments = data.draw(st.tuples(*[moment] * case.ranks), "questions")
    predicts = data.draw(st.booleans(), "a prediction")

    def body(transport: Transport) -> tuple[bool, dict[str, Any], dict[str, Any]]:
        runner = start(case, transport)
        for step in range(done):
            runner.step(step, microbatches(case, step))
        before, batch = _state(runner), microbatches(case, done)
        signal = _Signal(moments[transport.rank], runner)
        try:
            if predicts:
                runner.predict(batch, signal)
            else:
                runner.step(done, batch, is_given_up=signal, commit=signal.look)
        except GivenUpError:
            return True, before, _state(runner)
        return False, before, _state(runner)

    prepare(case)
    found = run_ranks(case.ranks, body)
    given_up = {each[0] for each in found}
    assert len(given_up) == 1, "all ranks, or none"
    if min(moments) == 1:
        assert given_up == {True}
    if min(moments) == _NEVER:
        assert given_up == {False}
    _, before, after = found[0]
    same = given_up == {True} or predicts
    assert _equal(before["model"], after["model"]) == same
    assert _equal(before["optimizer"], after["optimizer"]) == same


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    except AssertionError:
        return False
    return True
