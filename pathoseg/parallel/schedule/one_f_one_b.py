"""1F1B: a backward as soon as there is one, so that few activations are held."""

from __future__ import annotations

from pathoseg.parallel.schedule.action import Action, Kind, chain
from pathoseg.parallel.schedule.schedule import Schedule, linear


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Order forwards until the pipe is full, then backward and forward in turn: PipeDream-Flush.

    With N microbatches on D equal stages it takes GPipe's time and rank r holds the activations of
    min(N, D - r) microbatches. Lowered with recomputation of every stage, it holds those of one
    microbatch, and the inputs of its stage for the others (Narayanan et al., ICML 2021).
    """
    lists = tuple(
        tuple(alternate(0, stage, range(microbatches), ranks - stage)) for stage in range(ranks)
    )
    return Schedule("1f1b", linear(ranks), chain(ranks), (0,) * microbatches, lists)


def alternate(replica: int, stage: int, microbatches: range, in_flight: int) -> list[Action]:
    """Return the visits of one stage: `in_flight` forwards, then backward and forward in turn.

    Args:
        replica: The replica.
        stage: The stage.
        microbatches: Their numbers.
        in_flight: Forwards ahead of the first backward.
    """
    forwards = [Action(Kind.FORWARD, replica, stage, microbatch) for microbatch in microbatches]
    backwards = [Action(Kind.BACKWARD, replica, stage, microbatch) for microbatch in microbatches]
    filled = min(in_flight, len(microbatches))
    order = forwards[:filled]
    for backward, forward in zip(backwards, forwards[filled:], strict=False):
        order += [backward, forward]
    return order + backwards[len(forwards) - filled :]
