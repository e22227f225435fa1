"""The one place where an attack, then a defense, meets a signal.

A boundary sits between stage `index` and stage `index + 1`. Forward it carries activations down,
backward it carries gradients up. Beside the signal rides the taint, one number per replica: the
loss end sends it back as its own gradient (see `echo`), so every verifier upstream knows the ranks
that were tainted in this step without any other channel.

Where the two stages are in different processes each has a half of the boundary. All that a stage
sends is tampered with and inspected on its own side, before it leaves: attackers, verifier, ledger
and weights of a stage are in one process.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from sentinel_bench.api import Direction
from sentinel_bench.pipeline.exchange import Exchange
from sentinel_bench.pipeline.team import Team

Side = Literal["up", "down"]
"""Stage `index` is upstream, stage `index + 1` downstream."""


class Boundary(nn.Module):
    """Between stage `index` and the next one.

    Args:
        index: the stage upstream of the boundary.
        replicas: how many replicas each stage has.
        team: the processes; None: this one alone.
        sides: which of the two stages are in this process.
    """

    def __init__(
        self,
        index: int,
        replicas: int,
        team: Team | None = None,
        sides: frozenset[Side] = frozenset({"up", "down"}),
    ) -> None:
        super().__init__()
        self.index = index
        self.replicas = replicas
        self.sides = sides
        self.exchange: Exchange | None = None
        self.events = {"activation": 0, "gradient": 0}
        """How many messages have crossed since `begin_pass`."""
        self._team = team
        self._passed: dict[int, Tensor] = {}

    def begin_pass(self) -> None:
        """Begin to count messages."""
        self.events = {"activation": 0, "gradient": 0}

    @property
    def passed(self) -> list[Tensor]:
        """What came upstream in the last backward pass, one for each microbatch.

        `[replicas * batch, tokens, hidden]`, in the scale of autograd: gradients of the mean loss
        of a microbatch, over all replicas.
        """
        if not self._passed:
            raise RuntimeError("no backward pass has crossed this boundary")
        return [self._passed[m] for m in sorted(self._passed)]

    def forward(self, h: Tensor, taint: Tensor, microbatch: int = 0) -> tuple[Tensor, Tensor]:
        """Carry `h` `[own replicas * batch, tokens, hidden]` and `taint` `[replicas]` downstream.

        `taint` is for all replicas, also where others hold some of them.
        """
        if self.exchange is None or self.exchange.idle:
            return h, taint
        out: tuple[Tensor, Tensor] = _Cross.apply(h, taint, self, microbatch)  # type: ignore[no-untyped-call]
        return out

    def cross(
        self, h: Tensor, taint: Tensor, *, backward: bool, microbatch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Let the exchange see the signals, replicas apart, gradients of each one's own loss.

        Autograd's gradient is that of the mean loss over all replicas: a replica's own is
        `replicas` times as large.
        """
        exchange = self.exchange
        assert exchange is not None
        direction: Direction = "gradient" if backward else "activation"
        self.events[direction] += 1
        sender = self.index + 1 if backward else self.index
        departs, arrives = ("down", "up") if backward else ("up", "down")
        out = h
        if departs not in self.sides:
            if exchange.taints:
                exchange.hear(taint, microbatch)
            if not exchange.minds(self.index if backward else self.index + 1, direction):
                return h, taint
        elif not exchange.looks(sender, direction):
            return h, taint
        with torch.autocast(h.device.type, enabled=False):  # statistics are not the model's
            x = sent = self._apart(h, backward)
            if departs in self.sides:
                sent, taint = exchange.depart(sender, direction, x, taint, microbatch)
            if arrives in self.sides:
                sent = exchange.arrive(sender, direction, sent, microbatch)
            if sent is not x:
                out = self._together(sent, backward)
        return out, taint

    def _apart(self, h: Tensor, backward: bool) -> Tensor:
        """Return the signals of all replicas, `[replicas, batch, tokens, hidden]`."""
        own = self.replicas if self._team is None else len(self._team.replicas)
        x = h.reshape(own, -1, *h.shape[1:])
        if backward:
            x = x * self.replicas
        return x if self._team is None else self._team.gather(x)

    def _together(self, x: Tensor, backward: bool) -> Tensor:
        """Return those of the replicas that are here, as one batch: the reverse of `_apart`."""
        own = x if self._team is None else self._team.own(x)
        return (own / self.replicas if backward else own).flatten(0, 1)


class _Cross(torch.autograd.Function):
    """The boundary in both directions."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, taint: Tensor, boundary: Boundary, microbatch: int
    ) -> tuple[Tensor, Tensor]:
        ctx.boundary, ctx.microbatch = boundary, microbatch
        out, taint_out = boundary.cross(h, taint, backward=False, microbatch=microbatch)
        return (out.view_as(h) if out is h else out), (
            taint_out.view_as(taint) if taint_out is taint else taint_out
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        boundary: Boundary = ctx.boundary
        out, taint = boundary.cross(*grads, backward=True, microbatch=ctx.microbatch)
        boundary._passed[ctx.microbatch] = out
        return out, taint, None, None


def echo(taint: Tensor) -> Tensor:
    """Return a scalar that is 0 and whose gradient with respect to `taint` is `taint` itself."""
    energy = taint.square().sum() / 2
    return energy - energy.detach()
