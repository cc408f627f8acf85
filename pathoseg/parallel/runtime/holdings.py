"""Which parameters and buffers of a model a rank holds; it lets go of all others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pathoseg.parallel.graph.layer_graph import LayerGraph, Partition
from pathoseg.parallel.schedule.placement import Placement


class Holdings:
    """The parameters and buffers that one rank holds of a model.

    What no layer uses belongs to stage 0.

    Args:
        model: The whole model.
        graph: Its layers.
        partition: Its stages.
        placement: Where they are, groups written out.
        rank: Whose holdings these are.

    Attributes:
        parameters: All parameters of the model by name.
        own: Names of the parameters and buffers on this rank, in the model's order.
        told: Those of `own` that this rank tells others of: the lowest rank with the first stage
            that uses them does.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        partition: Partition,
        placement: Placement,
        rank: int,
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self._stages: dict[str, set[int]] = {}
        for stage in range(partition.stages):
            for position in partition.layers(stage):
                layer = graph.layers[position]
                for name in (*layer.parameters, *layer.buffers):
                    self._stages.setdefault(name, set()).add(stage)
        self._model = model
        # Each key of the state dict, shared parameters' several ones too, and its one name here.
        names = {id(tensor): name for name, tensor in self._tensors()}
        self.keys = {
            key: names[id(tensor)]
            for key, tensor in model.state_dict(keep_vars=True).items()
            if id(tensor) in names
        }
        held = {stage for home in placement.homes for stage, at in enumerate(home) if at == rank}
        every = [(name, self._stages.get(name, {0})) for name, _ in self._tensors()]
        self.own = [name for name, stages in every if stages & held]
        self.told = [name for name, stages in every if placement.holders(min(stages))[0] == rank]

    def of(self, stage: int) -> list[nn.Parameter]:
        """The parameters of a stage, in the model's order."""
        return [
            parameter
            for name, parameter in self.parameters.items()
            if stage in self._stages.get(name, {0})
        ]

    def trained(self, stage: int) -> list[nn.Parameter]:
        """Those of them that are trained."""
        return [parameter for parameter in self.of(stage) if parameter.requires_grad]

    def settle(self, device: torch.device) -> None:
        """Moves what this rank holds to its device, and lets go of the memory of the rest."""
        own = set(self.own)
        held = {id(tensor) for name, tensor in self._tensors() if name in own}
        # With the old tensors, so that none of their identities is given to another.
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:
                        target = device if id(tensor) in held else torch.device("meta")
                        moved[id(tensor)] = tensor, _moved(tensor, target)
                    slots[name] = moved[id(tensor)][1]  # type: ignore[assignment]  # of its kind
        self.parameters = dict(self._model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """What this rank holds, by name."""
        own = set(self.own)
        return {name: tensor for name, tensor in self._tensors() if name in own}

    def digest(self) -> str:
        """A checksum of all values, while they are all here."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors():
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(data.numpy().data)
        return digest.hexdigest()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, tensor.requires_grad)
    return moved
