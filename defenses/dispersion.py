"""Dispersion: compares the weight gradients and losses of the replicas of a stage with each other.

All replicas of a stage estimate one gradient from different data, so theirs have nearly the same
size and point in nearly the same direction. Signals are not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Defense, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Frozen
from sentinel_bench.defenses.fenced import Explained, FencedParams

if TYPE_CHECKING:
    from torch import Tensor

    from sentinel_bench.defenses.robust import RobustFences

LEAST = 3
"""Replicas below which nobody can say which one is odd."""


class DispersionFloor(Frozen):
    """Least half widths; `norm` and `loss` are logarithms."""

    norm: float = Field(0.5, gt=0)
    cosine: float = Field(0.05, gt=0)
    loss: float = Field(0.1, gt=0)


class DispersionParams(FencedParams):
    """Parameters of `dispersion`."""

    floor: DispersionFloor = Field(
        DispersionFloor(), description="least half width for norm, cosine and loss"
    )


class Dispersion(Defense[DispersionParams]):
    """Flags the worker whose weight gradient, or loss, is unlike those of the other replicas.

    Of the weight gradients `g_i` that the active replicas of a stage hand in:

    * `norm`: log of norm(g_i) over the median of the norms;
    * `cosine`: mean of cosine(g_i, g_j) over the others j, less the median of these means;
    * `loss`, at the last stage: log of the replica's mean loss over the median loss.

    Each has a fence of medians (`robust.RobustFences`) per stage. A rank is a replica of the whole
    pipeline; what is flagged of it is the one worker whose gradient is odd at its stage. An odd
    loss flags the last stage's worker, whoever upstream may have caused it. With fewer than three
    gradients there is nothing to compare.

    A gradient that is not finite, or too large to measure in float32, is flagged from the first
    step on and bans at once. The verifier needs the weight gradients of all workers in every step.
    """

    name = "dispersion"
    goal = "flag a worker whose weight gradient or loss is unlike those of its stage's replicas"
    formula = (
        "log(norm(g_i) / median_j norm(g_j)), c_i - median_j c_j with c_i = mean of"
        " cosine(g_i, g_j) over j != i, at the last stage log(loss_i / median_j loss_j), each"
        " outside median +- max(mads * 1.4826 MAD, floor)"
    )
    source = "ours"
    blind_to: ClassVar[str] = (
        "a gradient that is no further from the others than honest ones are from each other (with"
        " small batches, where these are nearly orthogonal, even one with the wrong sign or for"
        " wrong labels), which of two equal ones is the copy (`update-mimic`: both are flagged),"
        " liars who are half of a stage, stages with fewer than three replicas, and attacks on"
        " signals or weights as far as no gradient shows them"
    )
    Params = DispersionParams
    needs_updates = True
    statistics = ("norm", "cosine", "loss")

    def start(self, setup: Setup) -> None:
        """Make fences for norm and cosine of each stage, and for the loss of the last one."""
        import torch

        from sentinel_bench.defenses.robust import RobustFences

        p = self.params
        floor = torch.tensor([p.floor.norm, p.floor.cosine] * setup.stages + [p.floor.loss])
        self._fences: RobustFences = RobustFences(
            floor.to(setup.device), setup.replicas, p.window, p.mads, p.min_steps
        )
        self._values = torch.full((len(floor), setup.replicas), torch.nan, device=setup.device)
        self._last: Tensor | None = None

    def check(self, signals: Signals) -> Verdict:
        """Flag nobody: signals are not looked at."""
        nobody = signals.active.new_zeros(signals.active.shape)
        return Verdict(nobody, nobody)

    def check_updates(self, updates: Updates) -> Verdict:
        """Measure weight gradients and hold them against the fences; weights are let pass."""
        active = updates.active
        nobody = active.new_zeros(active.shape)
        self._last = None
        if updates.kind == "weights" or not active.any():
            return Verdict(nobody, nobody)
        values = self._measure(updates)
        unreadable = active & values[0].isnan()
        if (active & ~unreadable).sum() < LEAST:
            return Verdict(unreadable, unreadable)
        self._last = values
        channels = self._channels(updates, values)
        explained = Explained(self.statistics[: len(values)], values, self._fences, channels)
        if self._fences.all_inside(channels, values, active):
            return Verdict(nobody, nobody, None, explained)
        outside, distance = self._fences.outside(channels, values)
        severe = (~(distance < self.params.severity) & outside).any(0)
        return Verdict(
            flagged=(outside.any(0) & active) | unreadable,
            severe=(severe & active) | unreadable,
            statistics=explained,
        )

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Take the values of the clean gradients just checked into the windows."""
        if self._last is not None:
            values = self._last.masked_fill(~clean, float("nan"))
            self._values[self._channels(updates, values)] = values

    def end_step(self, step: int) -> None:
        """Move all fences by one step."""
        self._fences.push(self._values)
        self._values.fill_(float("nan"))

    def state_bytes(self) -> int:
        """Return the bytes of the windows and fences."""
        return self._fences.state_bytes()

    def _measure(self, updates: Updates) -> Tensor:
        """Return the statistics `[2 or 3, replicas]`; NaN for who is not active."""
        of = updates.active.nonzero().flatten()
        vectors = updates.work.sent(of.tolist()).float()
        losses = updates.work.losses()
        found = vectors.new_full((2 + (losses is not None), len(updates.active)), float("nan"))
        found[:2, of] = compare(vectors)
        if losses is not None:
            found[2, of] = relative(losses[of].float())
        return found

    def _channels(self, updates: Updates, values: Tensor) -> slice:
        """Return where the fences of a stage are; that of the loss follows those of the last."""
        first = 2 * updates.stage
        return slice(first, first + len(values))


def compare(vectors: Tensor) -> Tensor:
    """Compare the sizes and directions of vectors.

    Args:
        vectors: `[n, parameters]` float32. One of which the norm is not finite counts as if it
            were not there.

    Returns:
        `[2, n]`: log of the norm over the median norm, and mean cosine with the others less the
        median of these means; NaN for what does not count. Few liars move the mean cosine of
        everybody, but not its distance to the median.
    """
    from sentinel_bench.defenses.tokens import norms, over

    size = norms(vectors)
    counts = size.isfinite()
    unit = over(vectors, size[:, None])
    gram = (unit @ unit.T)[counts][:, counts]  # a row that is NaN spoils its own row and column
    out = size.new_full((2, len(size)), float("nan"))
    out[0] = relative(size)
    out[1, counts] = (gram.sum(1) - gram.diagonal()) / (len(gram) - 1)
    out[1] -= out[1].nanquantile(0.5)
    return out


def relative(sizes: Tensor) -> Tensor:
    """Return the logs of sizes `[n]` over their median; NaN for those that are not finite."""
    from sentinel_bench.defenses.tokens import log_ratio

    known = sizes.masked_fill(~sizes.isfinite(), float("nan"))
    return log_ratio(known, known.nanquantile(0.5))
