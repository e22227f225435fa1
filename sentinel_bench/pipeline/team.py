"""Who trains one model together: here one process for all; `mesh.py` has several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sentinel_bench.config import Scenario

if TYPE_CHECKING:
    from sentinel_bench.pipeline.segment import Segment


LossFn = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Makes a loss of what the last segment has put out and of the labels of a microbatch."""


class Engine(Protocol):
    """Does the forward and backward passes of all microbatches, over several processes."""

    def run(self, ids: Tensor, labels: Tensor) -> None:
        """Do a pass; leave gradients of the mean over the batch.

        Args:
            ids, labels: `[own replicas * batch, tokens]`.
        """


class Team(Protocol):
    """The processes that train one model together, as one of them sees it.

    Two axes: the pipeline, whose processes hold consecutive stages, and groups of replicas, whose
    processes hold the same stages.
    """

    segments: Sequence[range]
    """Stages that are here; several where the schedule interleaves them."""
    replicas: range
    """Replicas that are here."""
    several: bool
    """True if there is more than this process."""
    column: tuple[int, int]
    """Which group of replicas this is, and how many there are."""
    traffic: dict[str, int]
    """Bytes that this process has sent to others so far, by kind; empty if there are none."""

    def engine(
        self, segments: Sequence[Segment], loss: LossFn, scenario: Scenario
    ) -> Engine | None:
        """Return what does a pass over several processes; None: this one does it in sequence."""

    def gather(self, x: Tensor) -> Tensor:
        """Return what all groups have, `[replicas, ...]`, of what this one has, `[own, ...]`."""

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of the replicas that are here, `[own, ...]`, of `[replicas, ...]`."""

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over all groups."""

    def norm_and_loss(self, norm: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm and loss of the whole pipeline, in one message.

        Args:
            norm: over the stages that are here.
            loss: None where the last stage is not.
        """

    def share(self, what: Any) -> list[Any]:
        """Return what every process has given, in the order of the ranks."""

    def fetch(self, h: Tensor, segment: range, shape: Sequence[int]) -> Tensor:
        """Return what a segment is fed outside of training; `h` is for the first of all."""

    def pass_on(self, h: Tensor, segment: range) -> None:
        """Send on what a segment has put out outside of training."""


class Alone:
    """One process that holds all stages and all replicas.

    Args:
        stages, replicas: shape of the grid.
    """

    several = False
    column = (0, 1)

    def __init__(self, stages: int, replicas: int) -> None:
        self.segments: Sequence[range] = [range(stages)]
        self.replicas = range(replicas)
        self.traffic: dict[str, int] = {}

    def engine(self, segments: Sequence[Segment], loss: LossFn, scenario: Scenario) -> None:
        """The stages follow one another here."""

    def gather(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Leave the gradients as they are."""

    def norm_and_loss(self, norm: Tensor, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what is given."""
        assert loss is not None
        return norm, loss

    def share(self, what: Any) -> list[Any]:
        """Return what this process has given."""
        return [what]

    def fetch(self, h: Tensor, segment: range, shape: Sequence[int]) -> Tensor:
        """Return `h`."""
        return h

    def pass_on(self, h: Tensor, segment: range) -> None:
        """There is nobody to send to."""


def split_rows(x: Tensor, replicas: int, parts: int) -> list[Tensor]:
    """Cut a batch `[replicas * batch, ...]` into microbatches `[replicas * batch / parts, ...]`.

    Each holds the next rows of every replica.
    """
    if parts == 1:
        return [x]
    rows = x.view(replicas, parts, -1, *x.shape[1:])
    return [rows[:, m].flatten(0, 1) for m in range(parts)]


def join_rows(parts: Sequence[Tensor], replicas: int) -> Tensor:
    """Put microbatches together again: the reverse of `split_rows`."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.view(replicas, -1, *x.shape[1:]) for x in parts], 1).flatten(0, 1)
