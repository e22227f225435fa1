"""What detectors without a history of signals share: statistics, each behind a fence of medians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import Field

from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Verdict
from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from sentinel_bench.defenses.robust import RobustFences


class FencedParams(ResponseParams):
    """Parameters of a fence of medians; see `robust.RobustFences`."""

    window: int = Field(50, ge=1, description="steps of clean values behind a fence")
    mads: float = Field(7.0, gt=0, description="half width of a fence, in 1.4826 MAD")
    min_steps: int = Field(10, ge=1, description="steps before a fence closes")


class ResidualFloor(Frozen):
    """Least half widths for statistics of what a worker added to what it received."""

    cosine: float = Field(0.01, gt=0)
    ratio: float = Field(0.05, gt=0)


F = TypeVar("F", bound=FencedParams)


class Fenced(Defense[F]):
    """Measures each replica by some statistics, and flags what is outside of any one's fence.

    There is a fence per stage, direction and statistic, around the values of all microbatches. A
    worker whose value lies `severity` half widths from the median is banned at once. A tainted
    gradient is replaced by the mean of the replicas that are tested and not flagged.

    A subclass names its statistics and measures them. What it cannot measure is NaN, which is
    outside of any closed fence and never enters its window; an infinite value is not allowed.
    """

    statistics: ClassVar[tuple[str, ...]]

    def measure(self, signals: Signals) -> Tensor | None:
        """Return the statistics `[statistics, replicas]`, or None if nothing can be said here.

        Changes nothing: `check` and `preview` both call it.
        """
        raise NotImplementedError

    def floors(self) -> Mapping[str, float]:
        """Return the least half width of each statistic."""
        raise NotImplementedError

    def start(self, setup: Setup) -> None:
        """Make a fence per stage, direction and statistic."""
        import torch

        from sentinel_bench.defenses.robust import RobustFences

        p = self.params
        floors = self.floors()
        floor = torch.tensor([floors[s] for s in self.statistics] * (2 * setup.stages))
        room = (len(floor), setup.microbatches, setup.replicas)
        self._fences: RobustFences = RobustFences(
            floor.to(setup.device), room[1] * room[2], p.window, p.mads, p.min_steps
        )
        self._values = torch.full(room, torch.nan, device=setup.device)
        self._last: Tensor | None = None

    def check(self, signals: Signals) -> Verdict:
        """Measure the signals and hold them against the fences."""
        self._last = self.measure(signals)
        return self._judge(signals, self._last)

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what `check` would say."""
        return self._judge(signals, self.measure(signals))

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Take the values of the clean signals just checked into the windows."""
        if self._last is not None:
            values = self._last.masked_fill(~clean, float("nan"))
            self._values[self._channels(signals), signals.microbatch] = values

    def end_step(self, step: int) -> None:
        """Move all fences by one step."""
        self._fences.push(self._values.flatten(1))
        self._values.fill_(float("nan"))

    def state_bytes(self) -> int:
        """Return the bytes of the windows and fences."""
        return self._fences.state_bytes()

    def _judge(self, signals: Signals, values: Tensor | None) -> Verdict:
        nobody = signals.active.new_zeros(signals.active.shape)
        if values is None:
            return Verdict(nobody, nobody, self._reference(signals, signals.active))
        channels = self._channels(signals)
        explained = Explained(self.statistics, values, self._fences, channels)
        if self._fences.all_inside(channels, values, signals.active):
            return Verdict(nobody, nobody, None, explained)  # nobody's gradient is replaced
        outside, distance = self._fences.outside(channels, values)
        severe = (~(distance < self.params.severity) & outside).any(0)
        flagged = outside.any(0) & signals.active
        reference = self._reference(signals, signals.active & ~flagged)
        return Verdict(flagged, severe & signals.active, reference, explained)

    def _reference(self, signals: Signals, trusted: Tensor) -> Tensor | None:
        """Return the mean gradient of the trusted replicas; None if there are none."""
        if signals.direction == "activation" or not trusted.any():
            return None
        weights = trusted.float() / trusted.sum()
        x = signals.sent
        return (weights @ x.flatten(1).float()).view(x.shape[1:]).to(x.dtype)

    def _channels(self, signals: Signals) -> slice:
        n = len(self.statistics)
        first = (signals.stage * 2 + (signals.direction == "gradient")) * n
        return slice(first, first + n)


class Explained(Mapping[str, "tuple[Tensor, float, float]"]):
    """Statistics of a verdict, put into words only when somebody reads them."""

    def __init__(
        self, names: tuple[str, ...], values: Tensor, fences: RobustFences, channels: slice
    ) -> None:
        self._names = names
        self._values = values
        self._median, self._half = fences.median, fences.half_width  # as they are now
        self._channels = channels

    def __getitem__(self, name: str) -> tuple[Tensor, float, float]:
        if name not in self._names:
            raise KeyError(name)
        i = self._names.index(name)
        channel = self._channels.start + i
        median, half = float(self._median[channel]), float(self._half[channel])
        return self._values[i], median - half, median + half

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
