"""Per-sample losses: cross-entropy, focal and soft Dice, and their weighted sum.

A loss maps logits (n, classes, h, w) and targets (n, h, w), or (n, classes) and (n,) for tile
labels, to n numbers, each a function of its own sample alone. Their sum over the samples of a
step, divided by that number of samples, is what is trained on, so a step may be cut into uneven
microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from pathoseg.errors import PathosegError
from pathoseg.models.model_options import LossConfig, Task

IGNORE = 255

# What a network makes of a tile, or of a tile and of its context.
Answer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# One pixel in numerator and denominator of the soft Dice: bounded gradients for tiny regions, and
# a slope that shrinks a class which the sample does not hold.
_SMOOTH = 1.0


def build_loss(
    config: LossConfig, task: Task = "segment", classes: int | None = None
) -> Callable[[Answer, torch.Tensor], torch.Tensor]:
    """The loss that `config` describes, computed in float32 even of half-precision logits.

    Args:
        config: The `loss` table.
        task: The model's.
        classes: Their number, background included, where it is known.

    Returns:
        A function of logits and integer targets (255 is ignored) to a tensor of shape (n,); for
        `objects`, of the answer (n, classes + 1, h, w) and targets (n, 2, h, w), the class and the
        height. Of a pair of answers the second is that for a context, whose classes are one more
        plane of the targets: (n, 2, h, w), for `objects` (n, 3, h, w). It raises PathosegError
        where the class weights do not match the logits.

    Raises:
        PathosegError: A weight is negative or not finite, all are 0, tile labels meet Dice, or
            the class weights are not as many as `classes`.
    """
    if classes is not None:
        _refuse_other_number(config.class_weights, classes)
    dice = config.dice if config.dice is not None else float(task != "classify")
    parts = {"cross_entropy": config.cross_entropy, "focal": config.focal, "dice": dice}
    numbers = {**parts, "focal_gamma": config.focal_gamma, "height": config.height}
    numbers["context"] = config.context
    numbers |= {f"class_weights[{i}]": w for i, w in enumerate(config.class_weights or ())}
    for key, number in numbers.items():
        if not 0 <= number < math.inf:
            raise PathosegError(f"[loss] {key} is {number}.", "Give a number of 0 or above.")
    if not any(parts.values()):
        raise PathosegError(
            "[loss] has no part with a weight above 0, so nothing would be learnt.",
            f"Raise one of {', '.join(parts)}.",
        )
    if task == "classify" and dice:
        raise PathosegError(
            "The Dice loss compares areas, and a tile label has none.",
            "Leave out `dice` in [loss], or set it to 0.",
        )

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        samples, classes = logits.shape[:2]
        flat = targets.reshape(samples, -1).long()
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = F.log_softmax(exact.reshape(samples, classes, -1), dim=1)
        weights = _class_weights(config.class_weights, log_p)
        total = log_p.new_zeros(samples)
        if config.cross_entropy:
            total = total + config.cross_entropy * cross_entropy(log_p, flat, weights)
        if config.focal:
            total = total + config.focal * focal(log_p, flat, weights, config.focal_gamma)
        if dice:
            total = total + dice * soft_dice(log_p, flat)
        return total

    def with_height(answer: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        of_classes = loss(answer[:, :-1], targets[:, 0])
        return of_classes + config.height * height_error(answer[:, -1], targets[:, 1])

    separates = task == "objects"
    of_tile = with_height if separates else loss

    def with_context(answer: Answer, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(answer, tuple):  # a tensor, or its rows on one of several ranks
            return of_tile(answer, targets)
        tile, around = answer
        of_own = of_tile(tile, targets[:, :-1] if separates else targets[:, 0])
        classes = around[:, :-1] if separates else around
        return of_own + config.context * loss(classes, targets[:, -1])

    return with_context


def height_error(height: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Huber's loss of a sample's heights, its mean over the pixels where the height is known.

    Args:
        height: Shape (n, h, w).
        targets: Likewise; negative where it is not known.

    Returns:
        (n,); 0 for a sample without known pixels.
    """
    known = targets >= 0
    exact = height.to(torch.promote_types(height.dtype, torch.float32))
    error = F.smooth_l1_loss(exact, targets.to(exact.dtype), reduction="none") * known
    return error.flatten(1).sum(dim=1) / known.flatten(1).sum(dim=1).clamp(min=1)


def cross_entropy(
    log_p: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Weighted cross-entropy, summed over a sample's valid pixels and divided by their number.

    Args:
        log_p: Logarithms of probabilities, (n, classes, pixels).
        targets: Class indices, (n, pixels).
        weights: (classes,), or None for 1.

    Returns:
        (n,); 0 for a sample without valid pixels.
    """
    return _mean_of_valid(_entropy(log_p, targets, weights), targets)


def focal(
    log_p: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, gamma: float
) -> torch.Tensor:
    """Cross-entropy times (1 − p)^gamma, p being the true class's probability.

    Lin et al., "Focal Loss for Dense Object Detection" (2017), eq. 5, with the class weights as
    alpha. Arguments and result as in `cross_entropy`.
    """
    # Bounded away from 0, where a gamma below 1 has an infinite slope.
    wrong = (-torch.expm1(-_entropy(log_p, targets, None))).clamp(min=1e-7)
    return _mean_of_valid(wrong**gamma * _entropy(log_p, targets, weights), targets)


def soft_dice(log_p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One minus the mean soft Dice of a sample's foreground classes, over its valid pixels.

    Dice of a class is (2 Σ p·y + 1) / (Σ p + Σ y + 1) with probabilities p and truth y (Milletari
    et al., "V-Net", 2016, with a linear denominator). Background is left out, as in nnU-Net: it
    is what remains, and cross-entropy sees it. A class is left out of a sample that neither holds
    it nor predicts it, predicting meaning that it is the likeliest class of some valid pixel. That
    choice is constant almost everywhere, so the loss has a gradient wherever it is continuous.

    Args:
        log_p: Logarithms of probabilities, (n, classes, pixels).
        targets: Class indices, (n, pixels).

    Returns:
        (n,); 0 for a sample in which no class takes part.
    """
    valid = (targets != IGNORE)[:, None]
    classes = torch.arange(1, log_p.shape[1], device=log_p.device)[:, None]
    truth = targets[:, None] == classes
    likeliest = (log_p.argmax(dim=1, keepdim=True) == classes) & valid
    takes_part = (truth | likeliest).any(dim=2)
    p = log_p[:, 1:].exp() * valid
    overlap, size = (p * truth).sum(dim=2), p.sum(dim=2) + truth.sum(dim=2)
    missed = 1 - (2 * overlap + _SMOOTH) / (size + _SMOOTH)
    return (missed * takes_part).sum(dim=1) / takes_part.sum(dim=1).clamp(min=1)


def _entropy(
    log_p: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    return F.nll_loss(log_p, targets, weights, ignore_index=IGNORE, reduction="none")


def _mean_of_valid(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return values.sum(dim=1) / (targets != IGNORE).sum(dim=1).clamp(min=1)


def _refuse_other_number(weights: tuple[float, ...] | None, classes: int) -> None:
    if weights is not None and len(weights) != classes:
        raise PathosegError(
            f"[loss] class_weights has {len(weights)} numbers for {classes} classes.",
            "Give one number a class, background first.",
        )


def _class_weights(weights: tuple[float, ...] | None, log_p: torch.Tensor) -> torch.Tensor | None:
    if weights is None:
        return None
    _refuse_other_number(weights, log_p.shape[1])
    return torch.tensor(weights, dtype=log_p.dtype, device=log_p.device)
