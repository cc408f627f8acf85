"""Measures the link between two ranks: what a message costs, and what a byte."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from statistics import median

import numpy as np
import torch

from pathoseg.parallel.comm.transport import Transport
from pathoseg.parallel.schedule.costs import Link

_SIZES = tuple(2**power for power in range(0, 27, 2))  # bytes, 1 to 64 Mi
_TAG = 2**20 - 1
_BYTES = 2**28  # that one size may move
_ROUNDS = 15


_HOST = torch.device("cpu")


def measure_links(
    transport: Transport, first: int = 0, second: int | None = None, device: torch.device = _HOST
) -> Link:
    """Time messages there and back between two ranks; all ranks call this.

    Args:
        transport: Joins the ranks; nothing else may be under way.
        first: One end.
        second: The other end; None is the last rank.
        device: The device of this rank's messages.

    Returns:
        Seconds a message and seconds a byte, the same on every rank. A world of one rank has a
        link without cost.
    """
    second = transport.ranks - 1 if second is None else second
    if first == second:
        return Link()
    other = {first: second, second: first}.get(transport.rank)
    transport.prepare([] if other is None else [other], [])
    transport.barrier()
    link = Link()
    if other is not None:
        link = fit_link({size: _one_way(transport, other, size, device) for size in _SIZES})
    told = transport.gather(json.dumps([link.alpha, link.beta]))
    return Link(*json.loads(told[first]))


def fit_link(times: Mapping[int, float]) -> Link:
    """Fit alpha and beta of Hockney's model by least squares of the relative errors.

    Args:
        times: Seconds one way, by bytes; two sizes or more.
    """
    sizes, seconds = np.array(list(times)), np.array(list(times.values()))
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    scale = rows.max(axis=0)
    alpha, beta = np.linalg.lstsq(rows / scale, np.ones(len(sizes)), rcond=None)[0] / scale
    return Link(max(float(alpha), 0.0), max(float(beta), 0.0))


def _one_way(transport: Transport, other: int, size: int, device: torch.device) -> float:
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    came = torch.empty_like(sent)
    seconds = []
    for _ in range(min(_ROUNDS, max(3, _BYTES // size))):
        begin = time.perf_counter()
        if transport.rank < other:
            transport.send(sent, other, _TAG).wait()
            transport.receive(came, other, _TAG).wait()
        else:
            transport.receive(came, other, _TAG).wait()
            transport.send(sent, other, _TAG).wait()
        seconds.append((time.perf_counter() - begin) / 2)
    return median(seconds)
