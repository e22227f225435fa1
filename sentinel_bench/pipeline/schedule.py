"""Forward and backward passes over several processes, by torch's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from sentinel_bench.config import Scenario
from sentinel_bench.pipeline.segment import Segment
from sentinel_bench.pipeline.team import LossFn, split_rows

if TYPE_CHECKING:
    from sentinel_bench.pipeline.mesh import Mesh


class Scheduled:
    """Does a pass of all microbatches.

    Args:
        mesh: the processes.
        segments: of this process.
        loss: called with what the last segment has put out and labels, in the last process.
        scenario: shapes.
    """

    def __init__(
        self, mesh: Mesh, segments: Sequence[Segment], loss: LossFn, scenario: Scenario
    ) -> None:
        self._mesh = mesh
        self._segments = segments
        self._loss = loss
        self._scenario = scenario
        self._schedules: dict[bool, Any] = {}
        stages = scenario.grid.stages
        for segment in segments:
            segment.connect(mesh.placement.link, last=segment.range[-1] == stages - 1)
        self._first = segments[0].range[0] == 0
        self._last = segments[-1].range[-1] == scenario.grid.stages - 1

    def run(self, ids: Tensor, labels: Tensor) -> None:
        """Do a pass; leave gradients of the mean over the batch. See `team.Engine`."""
        rides = self._segments[0].rides
        if rides not in self._schedules:
            self._schedules[rides] = self._schedule(rides)
        own, parts = len(self._mesh.replicas), self._scenario.train.microbatches
        given = {}
        if self._last:
            given = {"target": torch.cat(split_rows(labels, own, parts)), "losses": []}
        inputs = [torch.cat(split_rows(ids, own, parts))] if self._first else []
        self._schedules[rides].step(*inputs, return_outputs=False, **given)
        self._count(rides)

    def _schedule(self, rides: bool) -> Any:
        train, order = self._scenario.train, self._mesh.placement.order
        stages: list[Any] = [self._stage(segment, rides) for segment in self._segments]
        options: dict[str, Any] = {"n_microbatches": train.microbatches, "loss_fn": self._loss}
        if order == "interleaved":
            return ScheduleInterleaved1F1B(stages, **options)
        if order == "1f1b":
            return Schedule1F1B(stages[0], **options)
        return ScheduleGPipe(stages[0], **options)

    def _stage(self, segment: Segment, rides: bool) -> PipelineStage:
        """Return torch's stage; the shapes of all messages are given, so that it asks for none."""
        train, device = self._scenario.train, self._mesh.device
        rows = len(self._mesh.replicas) * train.batch_size // train.microbatches
        ids = torch.zeros(rows, train.seq_len, dtype=torch.int64, device=device)
        hidden = torch.zeros(*ids.shape, segment.hidden_size, device=device, requires_grad=True)
        taint = torch.zeros(self._scenario.grid.replicas, device=device, requires_grad=True)
        left = torch.zeros(1, dtype=torch.float64, device=device, requires_grad=True)
        placement = self._mesh.placement
        message = (hidden, taint) if rides else (hidden,)
        if placement.link is not None:
            message = (*message, left)
        first = segment.range[0] == 0
        return PipelineStage(
            segment,
            self._mesh.index_of(segment.range),
            placement.length * placement.chunks,
            device,
            input_args=(ids,) if first else message,
            output_args=message,
            group=self._mesh.pipe,
        )

    def _count(self, rides: bool) -> None:
        """Count the bytes of the messages that this process has sent in a pass."""
        train, grid = self._scenario.train, self._scenario.grid
        tokens = len(self._mesh.replicas) * train.batch_size * train.seq_len
        for segment in self._segments:
            forward, backward = segment.range[-1] < grid.stages - 1, segment.range[0] > 0
            size = tokens * segment.hidden_size * 4
            self._mesh.traffic["activation"] += forward * size
            self._mesh.traffic["gradient"] += backward * size
            if rides:
                taint = train.microbatches * grid.replicas * 4
                self._mesh.traffic["taint"] += (forward + backward) * taint
