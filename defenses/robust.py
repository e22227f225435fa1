"""A fence of medians: an interval around the recent honest values that few outliers can move.

The half width is `mads` standard deviations as the median absolute deviation (MAD) estimates them
for a normal distribution (sigma = 1.4826 MAD), and never below a floor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sentinel_bench.defenses.fence import sort_last

SIGMA = 1.4826
"""Standard deviation of a normal distribution over its MAD."""


class RobustFences:
    """One fence per channel (stage, direction and statistic), all updated in one batch a step.

    A value v is outside if `abs(v - median) >= max(mads * 1.4826 * MAD, floor)`, with median and
    MAD over all values of the window, replicas pooled.

    Args:
        floor: least half width of each channel, `[channels]`, above 0.
        replicas: values that a channel gets in a step.
        window: steps that are kept.
        mads: half width in standard deviations.
        min_steps: steps in the window before a fence closes; until then nothing is outside.
    """

    def __init__(
        self, floor: Tensor, replicas: int, window: int, mads: float, min_steps: int
    ) -> None:
        channels = len(floor)
        self._floor = floor
        self._mads = mads
        self._min_steps = min(min_steps, window)
        self._values = floor.new_full((channels, window, replicas), torch.nan)
        self._slot = 0
        self.median = torch.zeros_like(floor)
        self.half_width = torch.full_like(floor, torch.inf)
        self._bound()

    def all_inside(self, channels: slice, values: Tensor, active: Tensor) -> bool:
        """Tell whether everybody is active and all `values` `[n, replicas]` are inside.

        The usual answer is yes; it costs one wait for the device.
        """
        return bool((self._inside(channels, values) & active).all())

    def outside(self, channels: slice, values: Tensor) -> tuple[Tensor, Tensor]:
        """Tell how far values lie outside.

        Args:
            channels: n of the channels.
            values: `[n, replicas]`; NaN is outside of any closed fence.

        Returns:
            `[n, replicas]` bool, outside or not, and the distance to the median in half widths
            (0 while the fence is open, NaN for NaN).
        """
        half = self.half_width[channels, None]
        open_ = half.isinf()
        distance = ((values - self.median[channels, None]).abs() / half).where(~open_, 0.0)
        return ~self._inside(channels, values) & ~open_, distance

    def push(self, values: Tensor) -> None:
        """Take the values of one step `[channels, replicas]`, NaN where they do not count."""
        self._values[:, self._slot] = values
        self._slot = (self._slot + 1) % self._values.shape[1]
        missing = self._values.isnan()
        pooled = self._values.masked_fill(missing, torch.inf).flatten(1)
        count = (~missing).flatten(1).sum(1)
        median = _median(pooled, count)
        deviation = (pooled - median[:, None]).abs_()
        sigma = SIGMA * _median(deviation, count)
        enough = (~missing.all(2)).sum(1) >= self._min_steps
        half = torch.maximum(self._mads * sigma, self._floor)
        self.median = torch.where(enough, median, 0.0)
        self.half_width = torch.where(enough, half, torch.inf)
        self._bound()

    def _inside(self, channels: slice, values: Tensor) -> Tensor:
        return (values > self._low[channels]) & (values < self._high[channels])

    def _bound(self) -> None:
        self._low = (self.median - self.half_width)[:, None]
        self._high = (self.median + self.half_width)[:, None]

    def state_bytes(self) -> int:
        """Return the bytes kept from step to step."""
        return sum(t.nbytes for t in (self._values, self.median, self.half_width))


def _median(x: Tensor, count: Tensor) -> Tensor:
    """Median of the first `count` `[channels]` values of each sorted row; 0 where there is none.

    Args:
        x: `[channels, n]`; what is missing is infinite. (Not finite otherwise: it sorts last.)
    """
    ordered = sort_last(x)
    last = (count - 1).clamp_min(0)
    middle = ordered.gather(1, torch.stack([last // 2, (last + 1) // 2], 1)).mean(1)
    return torch.where(count > 0, middle, 0.0)
