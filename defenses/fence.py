"""The adaptive fence: an interval around the median that follows what honest workers do.

SENTINEL, arXiv 2603.03592, section 4 and appendix: quartiles of the recent unflagged deviations, a
factor `k` that adapts to a target rate of outliers, and a least width in proportion to the median.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class FenceSettings:
    """Settings of each channel, tensors `[channels]`; see `Fences`."""

    k0: Tensor
    alpha: Tensor
    grow: Tensor
    shrink: Tensor
    slack: Tensor
    least: Tensor
    eps: Tensor


class Fences:
    """One fence per channel (stage, direction and statistic), all updated in one batch a step.

    With quartiles q1, q2, q3 of the deviations in the window and `IQR = max(q3 - q1, eps)`, a
    deviation d is outside if `abs(d - q2) >= max(k * IQR, least * abs(q2))`. From step to step
    `k` grows while more than `alpha` of the window lies outside `k * IQR`, and shrinks while less
    than `slack * alpha` does; at most `max_changes` times a step.

    Args:
        settings: one value per channel.
        replicas: deviations that a channel gets in a step.
        window: steps that are kept.
        max_changes: changes of `k` in one step, each way.
        min_steps: steps in the window before the fence closes; until then nothing is outside.
    """

    def __init__(
        self,
        settings: FenceSettings,
        replicas: int,
        window: int,
        max_changes: int,
        min_steps: int,
    ) -> None:
        channels = len(settings.k0)
        device = settings.k0.device
        self._settings = settings
        self._max_changes = max_changes
        self._min_steps = min(min_steps, window)
        self._values = torch.full((channels, window, replicas), torch.nan, device=device)
        self._slot = 0
        self.k = settings.k0.clone()
        self.median = torch.zeros(channels, device=device)
        self.half_width = torch.full((channels,), torch.inf, device=device)
        self._spread = self.half_width.clone()
        self._low, self._high = -self.half_width, self.half_width

    def all_inside(self, channels: slice, values: Tensor) -> bool:
        """Tell whether all `values` `[n, replicas]` are surely inside: the quick, usual answer."""
        inside = (values > self._low[channels, None]) & (values < self._high[channels, None])
        return bool(inside.all())

    def outside(self, channels: slice, values: Tensor) -> tuple[Tensor, Tensor]:
        """Tell how far deviations lie outside.

        Args:
            channels: n of the channels.
            values: `[n, replicas]` deviations; NaN is outside of any closed fence.

        Returns:
            `[n, replicas]` bool, outside or not, and the distance to the median in half widths
            (0 while the fence is open, NaN for NaN).
        """
        median, half = self.median[channels, None], self.half_width[channels, None]
        distance = (values - median).abs()
        open_ = half.isinf()
        outside = ~(distance < half) & ~open_
        return outside, torch.where(open_, 0.0, distance / half.clamp_min(1e-30))

    def needed_least(self, values: Tensor) -> Tensor:
        """Return the smallest `least` that would have let `values` `[channels, replicas]` pass."""
        distance = (values - self.median[:, None]).abs()
        needed = distance / self.median.abs().clamp_min(1e-30)[:, None]
        inside = distance < self._spread[:, None]
        return torch.where(inside, 0.0, needed)

    def push(self, values: Tensor) -> None:
        """Take the deviations of one step `[channels, replicas]`, NaN where they do not count."""
        self._values[:, self._slot] = values
        self._slot = (self._slot + 1) % self._values.shape[1]
        self._refresh()

    def state_bytes(self) -> int:
        """Return the bytes kept from step to step."""
        state = (self._values, self.k, self.median, self.half_width, self._spread)
        return sum(t.nbytes for t in state)

    def _refresh(self) -> None:
        missing = self._values.isnan()
        count = (~missing).flatten(1).sum(1)
        values = sort_last(self._values.masked_fill(missing, torch.inf).flatten(1))
        q1, q2, q3 = _quartiles(values, count)
        iqr = torch.maximum(q3 - q1, self._settings.eps)
        enough = (~missing.all(2)).sum(1) >= self._min_steps
        self.k = torch.where(enough, self._adapt(values, count, q2, iqr), self.k)
        self.median = torch.where(enough, q2, self.median)
        self._spread = torch.where(enough, self.k * iqr, torch.inf)
        half = torch.maximum(self._spread, self._settings.least * q2.abs())
        self.half_width = torch.where(enough, half, torch.inf)
        self._low, self._high = self.median - self.half_width, self.median + self.half_width

    def _adapt(self, values: Tensor, count: Tensor, q2: Tensor, iqr: Tensor) -> Tensor:
        """Return `k` after the changes of this step: all candidates are tried at once."""
        s = self._settings
        powers = torch.arange(self._max_changes + 1, device=values.device)
        up, down = (self.k[:, None] * f[:, None] ** powers for f in (s.grow, s.shrink))
        share_up = _share_outside(values, count, q2, up * iqr[:, None])
        share_down = _share_outside(values, count, q2, down * iqr[:, None])
        grown = _first(share_up <= s.alpha[:, None], up)
        shrunk = _first(share_down >= (s.slack * s.alpha)[:, None], down)
        too_many = share_up[:, 0] > s.alpha
        return torch.where(too_many, grown, shrunk)


def _quartiles(ordered: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Linear quartiles of the first `count` values of each row of `ordered`."""
    position = (count - 1).clamp_min(0)[:, None] * torch.tensor(QUARTILES, device=count.device)
    low = position.floor()
    a, b = ordered.gather(1, low.long()), ordered.gather(1, position.ceil().long())
    q1, q2, q3 = torch.lerp(a, b, position - low).unbind(1)
    return q1, q2, q3


def _share_outside(ordered: Tensor, count: Tensor, center: Tensor, half: Tensor) -> Tensor:
    """Share of the values at least `half` `[channels, n]` away from `center` `[channels]`.

    Rows of `ordered` are sorted; what is missing is infinite, and last.
    """
    below = torch.searchsorted(ordered, (center[:, None] - half).contiguous(), right=True)
    inside = torch.searchsorted(ordered, (center[:, None] + half).contiguous(), right=False)
    outside = count[:, None] - (inside - below).clamp_min(0)
    return outside / count[:, None].clamp_min(1)


def _first(holds: Tensor, candidates: Tensor) -> Tensor:
    """Return the first candidate of each row that holds, else the last one."""
    found = holds.any(1)
    index = torch.where(found, holds.int().argmax(1), candidates.shape[1] - 1)
    return candidates.gather(1, index[:, None])[:, 0]


def sort_last(x: Tensor) -> Tensor:
    """Sort along the last axis, NaN last; on a CPU with numpy, which is much faster there."""
    if x.device.type != "cpu":
        return x.sort(-1).values
    import numpy as np

    return torch.from_numpy(np.sort(x.numpy(), axis=-1))
