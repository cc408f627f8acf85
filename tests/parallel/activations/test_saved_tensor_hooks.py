"""Random mixtures of kept, offloaded and recomputed layers against one process, in every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathoseg.parallel.activations import saved_tensor_hooks as keeping
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.runtime.memory_check import Memory
from tests.parallel.comm.thread_ranks import run_ranks
from tests.parallel.computing_device import equal_to_the_bit
from tests.parallel.networks.runtime_models import MODELS
from tests.parallel.runtime.cases import Case, compare, prepare, run_case

PLANS = {
    "data-parallel": 1,
    "gpipe": 2,
    "1f1b": 3,
    "gems-master": 2,
    "1f1b-recomputed": 3,
    "gpipe-folded": 2,
}
SAME = equal_to_the_bit(MODELS)
MODES = [*OffloadMode]


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's models are tiny."""
    monkeypatch.setattr(keeping, "SMALL", 1)


@st.composite
def mixtures(draw: st.DrawFn, model: str, plan: str) -> tuple[Case, Memory]:
    """A case with some of each stage's layers offloaded and some recomputed, once or twice."""
    case = Case(model, plan, PLANS[plan])
    _, partition = case.schedule()
    layers = case.graph().layers
    offloaded, recomputed, twice = {}, {}, {}
    for stage in range(partition.stages):
        share = draw(st.sampled_from([(1, 0), (0, 1), (1, 1), (1, 2), (2, 1)]))
        again = ["recompute"] * share[1] + ["twice"] * draw(st.integers(0, 2 * share[1]))
        fates = st.sampled_from(["keep", *["offload"] * share[0], *again])
        names = [layers[position].name for position in partition.layers(stage)]
        drawn = dict(zip(names, draw(st.lists(fates, min_size=len(names))), strict=False))
        offloaded[stage] = tuple(name for name, fate in drawn.items() if fate == "offload")
        recomputed[stage] = tuple(name for name, fate in drawn.items() if fate == "recompute")
        twice[stage] = tuple(name for name, fate in drawn.items() if fate == "twice")
    mode = draw(st.sampled_from([*OffloadMode]))
    window = draw(st.sampled_from([0, 2_000, 20_000, 10**9]))
    host_bytes = (draw(st.sampled_from([0, 10**5])),) * 4
    memory = Memory(recomputed, twice, window, mode, host_bytes=host_bytes)
    return replace(case, offload=offloaded), memory


def _trains_as_one_process(case: Case, memory: Memory) -> None:
    prepare(case)
    verdicts = run_ranks(case.ranks, lambda transport: run_case(case, transport, memory))
    for rank, verdict in enumerate(verdicts):
        compare(case, rank, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=4, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_a_mixture_trains_as_one_process(plan: str, data: st.DataObject) -> None:
    _trains_as_one_process(*data.draw(mixtures(data.draw(st.sampled_from(SAME)), plan)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mode"),
    [(model, MODES[(at + i) % len(MODES)]) for at, model in enumerate(SAME) for i in (0, 1)],
)
def test_all_layers_of_all_models_are_offloaded_and_recomputed(
    model: str, mode: OffloadMode
) -> None:
    """Every other layer leaves, and those between are made again; the reverse in the next mode.

    All microbatches of a stage are under way at once, and one process adds up as the ranks do.
    """
    first = MODES.index(mode) % 2
    case = Case(model, "gpipe", 2)
    _, partition = case.schedule()
    names = [
        [case.graph().layers[at].name for at in partition.layers(stage)]
        for stage in range(partition.stages)
    ]
    offloaded = {stage: own[first::2] for stage, own in enumerate(names)}
    recomputed = {stage: own[1 - first :: 2] for stage, own in enumerate(names)}
    memory = Memory(recomputed, window=5_000, mode=mode)
    _trains_as_one_process(replace(case, offload=offloaded), memory)
