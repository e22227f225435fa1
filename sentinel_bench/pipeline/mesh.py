"""Several processes that train one model: `torch.distributed`, gloo on CPUs and NCCL on GPUs.

    rank = group * length + position        (group: of replicas; position: in the pipeline)

All processes that hold a stage hold the same weights of it, see the signals of all its replicas
(`gather`), and so come to the same verdicts without asking each other.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh

from sentinel_bench.config import Scenario
from sentinel_bench.errors import ConfigError
from sentinel_bench.pipeline.schedule import Scheduled
from sentinel_bench.pipeline.segment import Segment
from sentinel_bench.pipeline.team import LossFn
from sentinel_bench.placement import Placement

NOTE = 1024
"""Bytes that `share` sends in one go; longer notes take a second round."""
KINDS = ("activation", "gradient", "taint", "replicas", "weights", "control")
"""What travels: signals; who is tainted; signals that replica groups show each other; sums of
weight gradients; all the rest."""
HEADER = 8
"""Bytes of a note's length."""


def connect(placement: Placement, rank: int, init_method: str, device: str) -> None:
    """Join the other processes.

    Raises:
        ConfigError: there are fewer GPUs here than processes.
    """
    seconds = timedelta(seconds=placement.timeout)
    options: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": _own_gpu(placement, rank)}
    dist.init_process_group(
        init_method=init_method,
        rank=rank,
        world_size=placement.processes,
        timeout=seconds,
        **options,
    )


def disconnect() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Mesh:
    """This process among all; call `connect` first.

    Args:
        placement: which process does what.
        scenario: the grid.
    """

    several = True

    def __init__(self, placement: Placement, scenario: Scenario) -> None:
        grid, rank = scenario.grid, dist.get_rank()
        self.placement = placement
        self.device = torch.device(scenario.device)
        self.column = (rank // placement.length, placement.groups)
        self.position = rank % placement.length
        self.segments: Sequence[range] = placement.stages_of(rank, grid.stages)
        share = grid.replicas // placement.groups
        self.replicas = range(self.column[0] * share, (self.column[0] + 1) * share)
        self.traffic = dict.fromkeys(KINDS, 0)
        """Bytes that this process has sent so far, by kind."""
        self._all = placement.segments(grid.stages)
        self._world = placement.processes
        mesh = init_device_mesh(
            scenario.device, (placement.groups, placement.length), mesh_dim_names=("group", "pipe")
        )
        self.pipe = mesh.get_group("pipe")
        self._peers = mesh.get_group("group")
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=placement.timeout))
        self._warm_up()

    def engine(
        self, segments: Sequence[Segment], loss: LossFn, scenario: Scenario
    ) -> Scheduled | None:
        """Return torch's schedule over the pipeline; None if a pipeline is one process."""
        if self.placement.length == 1:
            return None
        return Scheduled(self, segments, loss, scenario)

    def gather(self, x: Tensor) -> Tensor:
        """Return what all groups have, `[replicas, ...]`, of what this one has, `[own, ...]`."""
        groups = self.placement.groups
        if groups == 1:
            return x
        own = x.detach().contiguous()
        self.traffic["replicas"] += own.nbytes * (groups - 1)
        parts = [torch.empty_like(own) for _ in range(groups)]
        dist.all_gather(parts, own, group=self._peers)
        return torch.cat(parts)

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of the replicas that are here, `[own, ...]`, of `[replicas, ...]`."""
        return x[self.replicas.start : self.replicas.stop]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over all groups, in one message."""
        if self.placement.groups == 1 or not gradients:
            return
        flat = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        self.traffic["weights"] += flat.nbytes
        dist.all_reduce(flat, group=self._peers)
        parts = _unflatten_dense_tensors(flat, gradients)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(list(gradients), list(parts))

    def norm_and_loss(self, norm: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm and loss of the whole pipeline, in one message.

        Args:
            norm: over the stages that are here.
            loss: None where the last stage is not.
        """
        if self.placement.length == 1:
            assert loss is not None
            return norm, loss
        norm = norm.detach().to(self.device)
        parts = torch.stack([norm.square(), torch.zeros_like(norm) if loss is None else loss])
        self.traffic["control"] += parts.nbytes
        dist.all_reduce(parts, group=self.pipe)
        return parts[0].sqrt(), parts[1]

    def share(self, what: Any) -> list[Any]:
        """Return what every process has given, in the order of the ranks."""
        note = pickle.dumps(what)
        size = NOTE - HEADER
        head = len(note).to_bytes(HEADER, "big")
        found = self._gather_bytes(head + note[:size], NOTE)
        lengths = [int.from_bytes(f[:HEADER], "big") for f in found]
        notes = [f[HEADER:] for f in found]
        if max(lengths) > size:
            rest = self._gather_bytes(note[size:], max(lengths) - size)
            notes = [a + b for a, b in zip(notes, rest, strict=True)]
        return [pickle.loads(n[:length]) for n, length in zip(notes, lengths, strict=True)]

    def fetch(self, h: Tensor, segment: range, shape: Sequence[int]) -> Tensor:
        """Return what a segment is fed outside of training; `h` is for the first of all."""
        index = self._all.index(segment)
        if index == 0 or self.placement.length == 1:
            return h
        h = torch.empty(*shape, device=self.device)
        dist.recv(h, src=self._rank_of(index - 1), group=self.pipe)
        return h

    def pass_on(self, h: Tensor, segment: range) -> None:
        """Send on what a segment has put out outside of training."""
        index = self._all.index(segment)
        if index < len(self._all) - 1 and self.placement.length > 1:
            dist.send(h.contiguous(), dst=self._rank_of(index + 1), group=self.pipe)

    def index_of(self, segment: range) -> int:
        """Return the place of a segment among all."""
        return self._all.index(segment)

    def _rank_of(self, index: int) -> int:
        length = self.placement.length
        return self.column[0] * length + index % length

    def _gather_bytes(self, note: bytes, size: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(note.ljust(size, b"\0")), dtype=torch.uint8)
        self.traffic["control"] += size
        parts = [torch.empty_like(own) for _ in range(self._world)]
        dist.all_gather(parts, own, group=self._control)
        return [part.numpy().tobytes() for part in parts]

    def _warm_up(self) -> None:
        """Open all connections, before a schedule depends on their order."""
        for group in (self.pipe, self._peers):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        dist.all_reduce(torch.zeros(1), group=self._control)


def _own_gpu(placement: Placement, rank: int) -> torch.device:
    """Take the GPU of this process: NCCL refuses two processes on one.

    Raises:
        ConfigError: there is none.
    """
    gpus = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", rank))  # torchrun may have several machines
    if local >= gpus:
        raise ConfigError(
            f"{placement.processes} processes on cuda need a GPU each, and {gpus} are visible "
            "here: one process plays all stages on one GPU (leave --processes out)"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
