"""The one place where an attack, then a defense, meets a signal.

A boundary sits between stage `index` and stage `index + 1`. Forward it carries activations down,
backward it carries gradients up. Beside the signal rides the taint, one number per replica: the
loss end sends it back as its own gradient (see `echo`), so every verifier upstream knows the ranks
that were tainted in this step without any other channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sentinel_bench.api import Direction
from sentinel_bench.pipeline.exchange import Exchange


class Boundary(nn.Module):
    """Between stage `index` and the next one.

    Args:
        index: the stage upstream of the boundary.
        replicas: how many replicas are stacked along the first axis.
    """

    def __init__(self, index: int, replicas: int) -> None:
        super().__init__()
        self.index = index
        self.replicas = replicas
        self.exchange: Exchange | None = None
        self._passed: Tensor | None = None

    @property
    def passed(self) -> Tensor:
        """What was passed upstream in the last backward pass, in the scale of autograd."""
        if self._passed is None:
            raise RuntimeError("no backward pass has crossed this boundary")
        return self._passed

    def forward(self, h: Tensor, taint: Tensor) -> tuple[Tensor, Tensor]:
        """Carry `h` `[replicas * batch, tokens, hidden]` and `taint` `[replicas]` downstream."""
        if self.exchange is None or self.exchange.idle:
            return h, taint
        out: tuple[Tensor, Tensor] = _Cross.apply(h, taint, self)  # type: ignore[no-untyped-call]
        return out

    def cross(self, h: Tensor, taint: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
        """Let the exchange see the signals, replicas apart, gradients of each one's own loss.

        Autograd's gradient is that of the mean loss over all replicas: a replica's own is
        `replicas` times as large.
        """
        exchange = self.exchange
        assert exchange is not None
        sender: tuple[int, Direction] = (
            (self.index + 1, "gradient") if backward else (self.index, "activation")
        )
        if not exchange.looks(*sender):
            return h, taint
        x = h.reshape(self.replicas, -1, *h.shape[1:])
        tainted = taint.bool().tolist()
        with torch.autocast(h.device.type, enabled=False):  # statistics are not the model's
            if backward:
                x = x * self.replicas
            out, now = exchange.cross(*sender, x, tainted)
        taint_out = taint if now == tainted else taint.new_tensor(now)
        if out is x:
            return h, taint_out
        return (out / self.replicas if backward else out).flatten(0, 1), taint_out


class _Cross(torch.autograd.Function):
    """The boundary in both directions."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, taint: Tensor, boundary: Boundary) -> tuple[Tensor, Tensor]:
        ctx.boundary = boundary
        out, taint_out = boundary.cross(h, taint, backward=False)
        return (out.view_as(h) if out is h else out), (
            taint_out.view_as(taint) if taint_out is taint else taint_out
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_h, grad_taint = grads
        boundary: Boundary = ctx.boundary
        out, taint = boundary.cross(grad_h, grad_taint, backward=True)
        boundary._passed = out
        return out, taint, None


def echo(taint: Tensor) -> Tensor:
    """Return a scalar that is 0 and whose gradient with respect to `taint` is `taint` itself."""
    energy = taint.square().sum() / 2
    return energy - energy.detach()
