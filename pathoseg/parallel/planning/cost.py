"""What a layer's forward and backward take on a device: by its fit, or by its datasheet alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pathoseg.errors import PathosegError
from pathoseg.parallel.graph.layer_graph import Layer, Work
from pathoseg.parallel.planning.hardware import Hardware


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of one layer's forward and backward, for the microbatch that it was traced with."""

    forward: float
    backward: float


class CostModel(Protocol):
    """Predicts what layers take; never less than nothing.

    Attributes:
        note: What the figures are, for the reader of a plan.
    """

    @property
    def note(self) -> str: ...

    def time(self, layer: Layer) -> LayerTime: ...


def cost_model(hardware: Hardware) -> CostModel:
    """The best that is known of a device."""
    return Roofline(hardware)


@dataclass(frozen=True)
class Roofline:
    """The slower of arithmetic and memory, each at its peak (Williams et al., 2009)."""

    hardware: Hardware

    @property
    def note(self) -> str:
        return f"datasheet roofline of {self.hardware.name}: nothing was measured"

    def time(self, layer: Layer) -> LayerTime:
        """A lower bound of what the layer takes.

        Raises:
            PathosegError: The hardware states no arithmetic for the layer's dtype.
        """
        return LayerTime(
            self.pass_time(layer, layer.forward), self.pass_time(layer, layer.backward)
        )

    def pass_time(self, layer: Layer, work: Work) -> float:
        """Seconds of the layer's forward or backward; 0 where it runs no kernel."""
        if not work.written:
            return 0.0
        memory = (work.read + work.written) / self.hardware.bandwidth
        arithmetic = work.flops / self._peak(layer) if work.flops else 0.0
        return max(memory, arithmetic) + self.hardware.overhead

    def _peak(self, layer: Layer) -> float:
        dtype = layer.outputs[0].dtype if layer.outputs else "float32"
        known = self.hardware.flops
        if dtype not in known:
            raise PathosegError(
                f"The hardware {self.hardware.name} states no FLOP/s for {dtype}, in which "
                f"{layer.name} computes.",
                f"Use {' or '.join(known)}, or add {dtype} under `flops` in its file.",
            )
        return known[dtype]
