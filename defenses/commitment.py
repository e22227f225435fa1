"""Commitment: the verifier keeps a short hash of each signal, and audits the hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Setup, Signals, Verdict
from sentinel_bench.defenses.recompute import AuditParams, Sampling

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-37
"""About the smallest normal bfloat16."""


class CommitmentParams(AuditParams):
    """Parameters of `commitment`."""

    top: int = Field(128, ge=1, description="values in a hash, those of largest magnitude")
    overlap: float = Field(0.8, gt=0, le=1, description="least share of positions that both have")
    rtol: float = Field(
        1e-3, ge=0, lt=2, description="mean relative difference that is rounding, in float32"
    )
    rtol_low: float = Field(
        2e-2, ge=0, lt=2, description="the same in half precision, and on a GPU (autocast)"
    )


class Commitment(Sampling[CommitmentParams]):
    """Keeps the largest values of every signal; on an audit these alone are compared.

    The hash of a signal is where its `top` largest magnitudes are, and these values in bfloat16:
    six bytes for each, kept until the next signal of that boundary and microbatch. The signal is
    not kept itself. Here the work can only be done again at once, with the weights of this step; so
    a share q of the hashes is audited as it comes. TOPLOC compares exponents and mantissas and
    packs a hash into a polynomial; here values are compared, and packing is left out.
    """

    name = "commitment"
    goal = "audit without keeping signals: a hash of 128 values stands for each"
    formula = "top-k positions in common < overlap, or mean |v - v'| / max(|v|, |v'|) > rtol"
    source = "after TOPLOC, arXiv 2501.16007"
    blind_to: ClassVar[str] = (
        "whatever leaves the 128 largest values of a signal as they are and stays below them (most"
        " of a signal is not in its hash), the lies that are not drawn, and attacks on weight"
        " gradients or weights, which are no signals"
    )
    Params = CommitmentParams

    def start(self, setup: Setup) -> None:
        """Make room for one hash per stage, direction, microbatch and replica."""
        import torch

        super().start(setup)
        batch, tokens, hidden = setup.shape
        top = min(self.params.top, batch * tokens * hidden)
        room = (setup.stages, 2, setup.microbatches, setup.replicas, top)
        self._positions = torch.zeros(room, dtype=torch.int32, device=setup.device)
        self._values = torch.zeros(room, dtype=torch.bfloat16, device=setup.device)

    def check(self, signals: Signals) -> Verdict:
        """Keep the hashes of all signals, and audit some."""
        positions, values = self._place(signals)
        positions[:], values[:] = top_values(signals.sent, positions.shape[-1])
        return super().check(signals)

    def compare(
        self, signals: Signals, drawn: Sequence[int], expected: Tensor
    ) -> dict[str, tuple[Tensor, float]]:
        """Compare the hashes that were kept with those of what should have been sent."""
        where, kept = (t[list(drawn)] for t in self._place(signals))
        missing, difference = compare_hashes(where, kept, *top_values(expected, where.shape[-1]))
        return {
            "missing": (missing, 1 - self.params.overlap),
            "difference": (difference, self.tolerance(signals)),
        }

    def state_bytes(self) -> int:
        """Return the bytes of the hashes, and of the secret of what is drawn."""
        return super().state_bytes() + self._positions.nbytes + self._values.nbytes

    def _place(self, signals: Signals) -> tuple[Tensor, Tensor]:
        """Return positions and values `[replicas, top]` that are kept of these signals."""
        key = (signals.stage, int(signals.direction == "gradient"), signals.microbatch)
        return self._positions[key], self._values[key]


def top_values(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the positions and the values of the largest magnitudes of each signal.

    Args:
        x: `[n, batch, tokens, hidden]`.
        top: how many.

    Returns:
        `[n, top]` int32, positions in the flattened signal, and `[n, top]` bfloat16.
    """
    flat = x.flatten(1)
    positions = flat.abs().topk(top, dim=1).indices
    return positions.int(), flat.gather(1, positions).bfloat16()


def compare_hashes(
    where: Tensor, values: Tensor, where_too: Tensor, values_too: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how two hashes `[n, top]` of each signal differ, `[n]` each.

    Returns:
        The share of positions that only one has (the larger of both sides; zeros do not count: any
        zero may be among the largest of a signal that has too few others), and the mean of
        `|v - v'| / max(|v|, |v'|)` over positions that both have, 0 if there is none.
    """
    same = where[:, :, None] == where_too[:, None, :]
    alone = ((values != 0) & ~same.any(2)).double().mean(1)
    alone_too = ((values_too != 0) & ~same.any(1)).double().mean(1)
    v, w = values.double()[:, :, None], values_too.double()[:, None, :]
    relative = (v - w).abs() / v.abs().maximum(w.abs()).clamp_min(TINY)
    both = relative.where(same, 0.0).sum((1, 2)) / same.sum((1, 2)).clamp_min(1)
    return alone.maximum(alone_too), both
