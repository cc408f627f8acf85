"""The activation policy of a stage: which layers' tensors are kept, offloaded or recomputed."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes; what is smaller stays on the device: a copy of it would take longer than its latency hides.
SMALL = 2**16


@dataclass(frozen=True, slots=True)
class ActivationPolicy:
    """The layers of one stage whose storages are not kept on the device till their backward.

    A layer decides for the storages that it makes: its outputs, and internals such as a norm's
    statistics. What an in-place layer writes into belongs to the layer that made it. What the
    stage received, parameters and buffers always stay.

    Attributes:
        offloaded: Names of the layers whose storages wait in host memory, in the order of
            execution; storages below `SMALL` bytes stay.
        recomputed: Names of the layers whose storages are dropped and made again in the backward,
            in the order of execution.
        twice: Names of the layers whose storages are dropped and made again twice, in the order of
            execution: for recomputed layers behind them, which hold what they make, while of these
            nothing stays; and when their own backwards come. So long chains are recomputed in
            the memory of a short one and of the recomputed layers between.
    """

    offloaded: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()

    @property
    def runs_again(self) -> bool:
        """Return True if any layer's forward runs more than once."""
        return bool(self.recomputed or self.twice)
