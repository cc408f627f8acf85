"""The engine of a run with several ranks: it trains a network that is cut over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pathoseg.config import Config
from pathoseg.device import Images, amp_dtype, to_inputs
from pathoseg.giving_up import Commit, IsGivenUp, at_any_time, never
from pathoseg.models.build import lay_out
from pathoseg.models.bundle import Bundle
from pathoseg.outputs.atomic import write_text
from pathoseg.parallel.activations.offload import OffloadMode
from pathoseg.parallel.activations.stage_offload import Park
from pathoseg.parallel.comm.stop_star import StopStar
from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.fitting import split
from pathoseg.parallel.graph.traced import Traced
from pathoseg.parallel.planning.plan import Plan
from pathoseg.parallel.runtime.executor import Microbatches
from pathoseg.parallel.runtime.stage import Training
from pathoseg.parallel.runtime.state import packed, unpacked
from pathoseg.parallel.schedule import timeline
from pathoseg.parallel.schedule.event import Event, from_json, to_json
from pathoseg.progress import say
from pathoseg.tiles.dataset import Batch
from pathoseg.training.distributed import own_device
from pathoseg.training.encoder_training import rate_factors
from pathoseg.training.engine import Loss, StepResult
from pathoseg.training.optimizer import make_optimizer, scale_rates, set_rate
from pathoseg.training.run_folder import TIMELINE, TRACE
from pathoseg.training.tasks import Task

# Is given what all ranks did when.
Drawing = Callable[[Sequence[Event]], None]
_TRACED = 3  # steps of a part of a run, after which the next is traced: the first ones warm up


class PipelineEngine:
    """The `Engine` of one rank of several.

    Args:
        transport: Joins the ranks.
        plan: What every rank holds and does.
        traced: The whole network, with the same weights on every rank; it is changed.
        loss: Per-sample losses.
        task: What a target is.
        card: How pixels become input.
        config: The run's.
        drawing: Draws the events of one step of this part of the run, or None.
        is_given_up: Asked between layers, and ahead of each microbatch of a stage.
        star: Joins the ranks in `begun`; None where nobody calls that.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        traced: Traced,
        loss: Loss,
        task: Task,
        card: Bundle,
        config: Config,
        drawing: Drawing | None,
        is_given_up: IsGivenUp = never,
        star: StopStar | None = None,
    ) -> None:
        self._is_given_up, self._star = is_given_up, star
        self._transport, self._plan, self._drawing = transport, plan, drawing
        self._task, self._card = task, card
        self._device = own_device(transport, config.parallel.device)
        training = Training(
            loss,
            partial(make_optimizer, config=config.train),
            config.seed,
            amp_dtype(self._device, config.train.amp),
            config.train.clip,
            config.train.compile,
        )
        self._layout = lay_out(traced.model, card.model, self._device.type)
        mode = OffloadMode(config.parallel.offload)
        parked = frozenset(Park(each) for each in config.parallel.parked)
        fit = split(traced, plan, training, transport, self._device, mode, parked)
        self._runner, self._names = fit.runner, fit.inputs
        if self._runner.optimizer is not None:
            names = {parameter: name for name, parameter in self._runner.own.items()}
            scale_rates(self._runner.optimizer, names, rate_factors(traced.model, config.train))
        self.leads = transport.rank == 0
        self.round = plan.schedule.microbatches
        self.reads: Collection[int] = sorted(self._runner.reads_inputs | self._runner.reads_targets)
        size = plan.microbatch
        self.rows: Sequence[int] = [
            row for each in self.reads for row in range(each * size, (each + 1) * size)
        ]
        self._steps = 0
        as_they_are = sum(plan.shards > 1 or policy.runs_again for policy in plan.retention)
        if config.train.compile and as_they_are and self.leads:
            say(
                f"{as_they_are} of {plan.stages} stages are not compiled: they recompute layers, "
                "or have strips of tiles."
            )

    def step(
        self, number: int, batch: Batch, rate: float, commit: Commit = at_any_time
    ) -> StepResult:
        if self._runner.optimizer is not None:
            set_rate(self._runner.optimizer, rate)
        size = self._plan.microbatch
        own = {each: slice(at * size, (at + 1) * size) for at, each in enumerate(self.reads)}
        microbatches = Microbatches(
            [size] * self.round,
            lambda each: self._inputs(batch.inputs(own[each])),
            lambda each: self._targets(self._task.targets(batch.labels(own[each]))),
        )
        traced = self._drawing is not None and self._steps == _TRACED
        done = self._runner.step(number, microbatches, traced, self._is_given_up, commit)
        self._steps += 1
        if self._steps == 1 and self.leads:
            for layer, function in self._runner.gathered.items():
                say(f"{layer} looks at whole tiles ({function}): each rank computes all of it.")
        if traced:
            self._draw(done.events)
        return StepResult(done.loss_sum, done.finite)

    def predict(
        self, sizes: Sequence[int], images: Mapping[int, Images]
    ) -> dict[int, torch.Tensor]:
        def targets(each: int) -> Any:
            raise AssertionError("a prediction has no targets")

        inputs = Microbatches(sizes, lambda each: self._inputs(images[each]), targets)
        return self._runner.predict(inputs, self._is_given_up)

    def gather(self, text: str) -> list[str]:
        return self._transport.gather(text)

    def state(self) -> dict[str, Any]:
        return self._runner.state()

    def begun(self) -> dict[str, Any]:
        assert self._star is not None
        parts = [unpacked(part) for part in self._star.gather(packed(self._runner.begun()))]
        if not self.leads:
            return {}
        return self._runner.joined({name: each for part in parts for name, each in part.items()})

    def load(self, state: dict[str, Any]) -> None:
        self._runner.load(state)

    def _inputs(self, images: Images) -> dict[str, torch.Tensor]:
        card = self._card
        named = images if isinstance(images, Mapping) else {"": images}
        own = {name: self._strip(each) for name, each in named.items()}
        part = own if isinstance(images, Mapping) else own[""]
        seen = to_inputs(part, card.mean, card.std, self._device, self._layout)
        return seen if isinstance(seen, dict) else dict.fromkeys(self._names, seen)

    def _strip(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rows of this rank of images (n, height, width, 3)."""
        return np.ascontiguousarray(images[:, self._runner.rows(images.shape[1])])

    def _targets(self, targets: NDArray[Any]) -> torch.Tensor:
        """Labels (n, …, height, width) on the device, of strips the rows of this rank; or (n,)."""
        if targets.ndim > 2:
            targets = targets[..., self._runner.rows(targets.shape[-2]), :]
        return torch.from_numpy(targets).to(self._device)

    def _draw(self, events: Sequence[Event]) -> None:
        """Hand what all ranks did in a step to whoever draws it."""
        told = self.gather(to_json(events))
        measured = [event for text in told for event in from_json(text)]
        if self._drawing is not None and self.leads:
            self._drawing(measured)


def draw_step(run: Path, planned: Sequence[Event], measured: Sequence[Event]) -> None:
    """Write a planned and a measured step, as a picture and as a Chrome trace.

    Args:
        run: The run's folder.
        planned: The events of all ranks, from `simulate`, in seconds.
        measured: The events of all ranks, as executed, in seconds.
    """
    runs = {"planned": planned, "measured": measured}
    write_text(run / TRACE, timeline.chrome_trace(runs))
    write_text(run / TIMELINE, timeline.draw_svg(runs))
    say(f"One step as planned and as it was: {run / TIMELINE}, {run / TRACE} (ui.perfetto.dev).")
