"""The factor on the loss that keeps half-precision gradients from vanishing, same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LossScale:
    """What `torch.amp.GradScaler` does, decided by whether the step of all ranks was finite.

    Its state is that of torch's class, so that checkpoints fit both.

    Args:
        enabled: Whether the loss is scaled at all.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._state = {
            "scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }

    @property
    def scale(self) -> float:
        return self._state["scale"] if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """After a step: lower after one that overflowed, higher after many that did not."""
        state = self._state
        state["_growth_tracker"] = state["_growth_tracker"] + 1 if finite else 0
        if not finite:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            KeyError: The state is that of a run without scaling, or the other way round.
        """
        if self.enabled:
            self._state = {key: state[key] for key in self._state}
