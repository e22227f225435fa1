"""A slow network between two processes, played: messages arrive as late as they would on it.

A message carries the time at which it left. Its receiver waits until the wire would have delivered
it: the wire takes one message after the other, at its rate, and each needs `delay` seconds more.
So a receiver that is busy meanwhile waits less, as on a real wire. The two directions do not slow
each other down. Between machines this needs synchronised clocks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from sentinel_bench.placement import Link


class Wire:
    """One direction of a link, seen by its receiver.

    Args:
        link: its rate and delay.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free = 0.0

    def arrival(self, left: float, size: int) -> float:
        """Return when a message of `size` bytes arrives that left at `left`, in seconds."""
        self._free = max(left, self._free) + self._link.seconds(size)
        return self._free + self._link.delay

    def wait(self, left: float, size: int) -> None:
        """Sleep until such a message has arrived."""
        time.sleep(max(0.0, self.arrival(left, size) - time.time()))


def leave(h: Tensor, back: Wire) -> tuple[Tensor, Tensor]:
    """Return `h` and the time at which it leaves, `[1]` float64; gradients come `back`."""
    out: tuple[Tensor, Tensor] = _Leave.apply(h, back)  # type: ignore[no-untyped-call]
    return out


def arrive(h: Tensor, left: Tensor, wire: Wire) -> Tensor:
    """Return `h` when it has arrived; its gradient carries the time at which it leaves."""
    out: Tensor = _Arrive.apply(h, left, wire)  # type: ignore[no-untyped-call]
    return out


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, back: Wire) -> tuple[Tensor, Tensor]:
        ctx.back = back
        return h.view_as(h), _now(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        h, left = grads
        ctx.back.wait(float(left), h.nbytes)
        return h, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, left: Tensor, wire: Wire) -> Tensor:
        wire.wait(float(left), h.nbytes)
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], _now(grads[0]), None


def _now(like: Tensor) -> Tensor:
    return torch.tensor([time.time()], dtype=torch.float64, device=like.device)
