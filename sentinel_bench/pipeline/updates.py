"""What workers hand in when a step ends, shown to a defense without a way to who has tampered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from sentinel_bench.api import Redone
from sentinel_bench.pipeline.cost import aside


class Averaged(Protocol):
    """The work behind weight gradients; see `weights.StageWork`."""

    def mean(self, excluded: Sequence[bool]) -> tuple[list[int], Tensor]:
        """Return who is not excluded, and the mean of their honest weight gradients."""

    def redo(self, of: Sequence[int]) -> Redone:
        """Do the work of replicas `of` again."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What the workers of a stage hand in.

    Attributes:
        replicas: their number.
        tampered: replica to the vector `[parameters]` of an attacker.
        honest: gives the vector that a replica should hand in.
        again: computes it a second time.
        losses: gives the mean loss of each replica, `[replicas]`; None before the last stage.
        work: where gradients come from; None for weights.
        excluded: `[replicas]`, left out of the mean before anybody looks.
        device: where the vectors are.
    """

    replicas: int
    tampered: Mapping[int, Tensor]
    honest: Callable[[int], Tensor]
    again: Callable[[int], Tensor]
    losses: Callable[[], Tensor | None]
    work: Averaged | None
    excluded: Sequence[bool]
    device: torch.device

    def sent(self, replica: int) -> Tensor:
        """Return the vector that a replica hands in, `[parameters]`."""
        return self.tampered[replica] if replica in self.tampered else self.honest(replica)


class Contributions:
    """See `api.Contributions`.

    As with `exchange.Rerun`, a defense holds a number and nothing else.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def sent(self, of: Sequence[int]) -> Tensor:
        """Return what replicas `of` hand in."""
        return torch.stack([self._handed().sent(r) for r in of])

    def recompute(self, of: Sequence[int]) -> Tensor:
        """Return what they should hand in."""
        again = self._handed().again
        return torch.stack([again(r) for r in of])

    def mean(self) -> tuple[list[int], Tensor]:
        """Return whose gradients are averaged, and their mean."""
        work, handed = self._work(), self._handed()
        counted, mean = work.mean(handed.excluded)
        for replica, sent in handed.tampered.items():
            if replica in counted:
                with aside():  # what is sent is all that there is
                    mean = mean + (sent - handed.honest(replica)) / len(counted)
        return counted, mean

    def redo(self, of: Sequence[int]) -> Redone:
        """Return all that they should have sent."""
        return self._work().redo(of)

    def project(self, of: Sequence[int], onto: Tensor) -> Tensor:
        """Return inner products of what they hand in with vectors."""
        with aside():  # each worker does its own
            vectors = [self._handed().sent(r) for r in of]
            distinct = {id(vector): vector for vector in vectors}
            digests = {key: onto @ vector.float() for key, vector in distinct.items()}
            return torch.stack([digests[id(vector)] for vector in vectors])

    def losses(self) -> Tensor | None:
        """Return the mean losses."""
        return self._handed().losses()

    def _work(self) -> Averaged:
        work = self._handed().work
        if work is None:
            raise RuntimeError("weights have neither a mean nor signals: ask for gradients")
        return work

    def _handed(self) -> Handed:
        if self._number not in _OPEN:
            raise RuntimeError("updates can be read only while they are checked")
        return _OPEN[self._number]


_OPEN: dict[int, Handed] = {}
_NUMBERS = count()


@contextmanager
def showing(handed: Handed) -> Iterator[Contributions]:
    """Let what is handed in be read within the `with` block."""
    number = next(_NUMBERS)
    _OPEN[number] = handed
    try:
        yield Contributions(number)
    finally:
        del _OPEN[number]
