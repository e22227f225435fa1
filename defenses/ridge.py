"""Ridge regression that goes on for ever: new rows come in, old ones are forgotten."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineRidge:
    """Linear maps `y ~ x W`, one per channel, all fitted in one batch.

    Kept are `A = sum x x^T` and `B = sum x y^T` over the rows, a row of n fits ago with the
    weight `forgetting ** n`; `W = (A + ridge * mean(diag A) I)^-1 B`.

    Args:
        channels: number of maps.
        size: length of x and of y.
        forgetting: above 0, at most 1.
        ridge: above 0.
        device: where the state lives.
    """

    def __init__(
        self, channels: int, size: int, forgetting: float, ridge: float, device: str
    ) -> None:
        self._forgetting = forgetting
        self._ridge = ridge
        self._xx = torch.zeros(channels, size, size, device=device)
        self._xy = torch.zeros(channels, size, size, device=device)
        self.weights = torch.zeros(channels, size, size, device=device)

    def fit(self, channels: list[int], x: Tensor, y: Tensor) -> None:
        """Take in rows `x` and `y` `[len(channels), rows, size]`; rows of zeros do not count.

        A channel without any other row forgets nothing. A map that cannot be solved for stays as
        it is.
        """
        new = x.mT @ x
        some = new.diagonal(dim1=1, dim2=2).sum(1) > 0
        keep = torch.where(some, self._forgetting, 1.0)[:, None, None]
        xx = new + keep * self._xx[channels]
        xy = x.mT @ y + keep * self._xy[channels]
        penalty = self._ridge * xx.diagonal(dim1=1, dim2=2).mean(1)
        penalty = penalty.clamp_min(1e-6)[:, None, None]  # without any row: W = 0
        factor, failed = torch.linalg.cholesky_ex(xx + penalty * torch.eye(len(xx[0])).to(xx))
        fitted = torch.cholesky_solve(xy, factor)
        solved = (failed == 0)[:, None, None]
        self.weights[channels] = torch.where(solved, fitted, self.weights[channels])
        self._xx[channels], self._xy[channels] = xx, xy

    def state_bytes(self) -> int:
        """Return the bytes of the sums and of the maps."""
        return sum(t.nbytes for t in (self._xx, self._xy, self.weights))
