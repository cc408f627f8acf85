"""Splitting any PyTorch model over ranks; knows no pathology."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathoseg.parallel.comm.launcher import connect
    from pathoseg.parallel.comm.transport import Transport
    from pathoseg.parallel.cost.hardware import load_hardware
    from pathoseg.parallel.fitting import Fit, fit
    from pathoseg.parallel.planning.plan import Plan, PlanRequest
    from pathoseg.parallel.runtime.stage import Training

__all__ = ["Fit", "Plan", "PlanRequest", "Training", "Transport", "connect", "fit", "load_hardware"]

_PLACES = {
    "Fit": "fitting",
    "Plan": "planning.plan",
    "PlanRequest": "planning.plan",
    "Training": "runtime.stage",
    "Transport": "comm.transport",
    "connect": "comm.launcher",
    "fit": "fitting",
    "load_hardware": "cost.hardware",
}


def __getattr__(name: str) -> Any:
    """Import a name of the face when it is first used (PEP 562): some of them bring torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
