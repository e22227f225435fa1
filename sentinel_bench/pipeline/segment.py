"""Consecutive stages of one process, with the boundaries between and around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from sentinel_bench.pipeline.boundary import Boundary
from sentinel_bench.pipeline.stages import Stage
from sentinel_bench.pipeline.wire import Wire, arrive, leave
from sentinel_bench.placement import Link


class Segment(nn.Module):
    """What one process does in a forward pass; the backward pass follows from it.

    Args:
        stages: index to stage, in order and without a gap.
        boundaries: all that touch one of the stages, by their index.
        replicas: of each stage, also those that are elsewhere.
        hidden_size: of a signal.
        fed: gets what each stage is fed, one tensor for each microbatch.
        autocast: returns the precision of the forward pass.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        boundaries: Mapping[int, Boundary],
        replicas: int,
        hidden_size: int,
        fed: dict[int, list[Tensor]],
        autocast: Callable[[], torch.autocast],
    ) -> None:
        super().__init__()
        self.range = range(min(stages), max(stages) + 1)
        self.stages = nn.ModuleList(stages.values())
        around = range(self.range[0] - 1, self.range[-1] + 1)
        self.boundaries = nn.ModuleList(boundaries[i] for i in around if i in boundaries)
        self.rides = True
        self._from_above: Wire | None = None
        self._from_below: Wire | None = None
        self.hidden_size = hidden_size
        self._by_index = {int(b.index): b for b in boundaries.values() if b.index in around}
        self._replicas = replicas
        self._fed = fed
        self._autocast = autocast
        self._microbatch = 0

    def connect(self, link: Link | None, *, last: bool) -> None:
        """Put a link between this segment and its neighbours; the `last` has none downstream."""
        if link is not None:
            self._from_above = None if self.range[0] == 0 else Wire(link)
            self._from_below = None if last else Wire(link)

    def begin_pass(self, *, rides: bool) -> None:
        """Begin with the first microbatch; the taint `rides` if anybody can be tainted."""
        self.rides = rides or bool(self._from_above or self._from_below)
        self._microbatch = 0
        for index in self.range:
            self._fed[index] = []

    def forward(
        self, x: Tensor, taint: Tensor | None = None, left: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Run the next microbatch.

        Args:
            x: token ids `[own replicas * batch, tokens]`, or hidden states
                `[own replicas * batch, tokens, hidden]`.
            taint: `[replicas]`, what came with it; None at the first stage.
            left: `[1]`, when it was sent, over a link.

        Returns:
            Hidden states or logits, the taint if it rides, and when they leave over a link.
        """
        microbatch, self._microbatch = self._microbatch, self._microbatch + 1
        if taint is None:
            taint = torch.zeros(self._replicas, device=x.device, requires_grad=True)
        if self._from_above is not None and left is not None:
            x = arrive(x, left, self._from_above)
        with self._autocast():
            x, taint = self._cross(self.range[0] - 1, x, taint, microbatch)
            for index, stage in zip(self.range, self.stages, strict=True):
                self._fed[index].append(x.detach())
                x = stage(x)
                x, taint = self._cross(index, x, taint, microbatch)
        if self._from_below is not None:
            x, left = leave(x, self._from_below)
            return x, taint, left
        return (x, taint) if self.rides else (x,)

    def _cross(
        self, index: int, x: Tensor, taint: Tensor, microbatch: int
    ) -> tuple[Tensor, Tensor]:
        boundary = self._by_index.get(index)
        return (x, taint) if boundary is None else boundary(x, taint, microbatch)
